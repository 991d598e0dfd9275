"""Layer types and blocks of well-known branches of Caffe that this program does not have."""

from __future__ import annotations

_YOLO, _SSD, _DEEPLAB, _FLOWNET, _DEFORMABLE, _NVCAFFE, _CTPN = (
    "Yolo's",
    "SSD's",
    "DeepLab's",
    "FlowNet's",
    "Deformable R-FCN's",
    "NVCaffe's",
    "CTPN's",
)

_TYPES = {
    "AnnotatedData": _SSD,
    "DetectionEvaluate": _SSD,
    "DetectionOutput": _SSD,
    "MultiBoxLoss": _SSD,
    "VideoData": _SSD,
    "BoxData": _YOLO,
    "DetectionLoss": _YOLO,
    "EvalDetection": _YOLO,
    "RegionLoss": _YOLO,
    "Yolo": _YOLO,
    "Yolov3DetectionOutput": _YOLO,
    "DenseCRF": _DEEPLAB,
    "DomainTransform": _DEEPLAB,
    "MatRead": _DEEPLAB,
    "MatWrite": _DEEPLAB,
    "SegAccuracy": _DEEPLAB,
    "MultiStageMeanfield": "CRF-RNN's",
    "Correlation": _FLOWNET,
    "DataAugmentation": _FLOWNET,
    "FlowWarp": _FLOWNET,
    "GenerateAugmentationParameters": _FLOWNET,
    "Resample": _FLOWNET,
    "DeformableConvolution": _DEFORMABLE,
    "DeformablePSROIPooling": _DEFORMABLE,
    "CenterLoss": "Center Loss's",
    "LargeMarginInnerProduct": "SphereFace's",
    "MarginInnerProduct": "SphereFace's",
    "WarpCTCLoss": "the CTC",
    "CTCLoss": "the CTC",
    "CTCDecoder": "the CTC",
    "DetectNetTransformation": _NVCAFFE,
    "Transpose": _CTPN,
    "Reverse": _CTPN,
    "Lstm": _CTPN,
    "SegData": "CUHK's",
}
"""Types, with the branch in the possessive."""


def _words(name: str) -> str:
    return name.lower().replace("_", "")


_LOWERED = {_words(name): name for name in _TYPES}


def of_type(name: str) -> str | None:
    """Return a layer type with its branch, for messages; None unless a branch is known to have
    the type.
    """
    known = _LOWERED.get(_words(name))
    if known is None:
        return None
    return f"'{known}' of {_TYPES[known]} branch of Caffe, which this program does not have"


def with_block(kind: str, block: str) -> str:
    """Return the message for a layer of an unknown type that has an unknown block."""
    branch = of_type(kind)
    what = f"it is {branch}" if branch else "both are of a branch of Caffe that is not here"
    return (
        f"unknown layer type '{kind}', whose block '{block}' is unknown, too; {what} (for a type "
        "of your own see --import)"
    )


def of_block(name: str) -> str | None:
    """Return a clause about an unknown block of a layer, `region_loss_param`; None if no branch
    is known to have it.
    """
    stem, separator, rest = name.rpartition("_param")
    known = None if not separator or rest else _LOWERED.get(_words(stem))
    if known is None:
        return None
    return f"it is a block of layer type {of_type(known)}"
