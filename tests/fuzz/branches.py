"""Seeds of the fuzz: a small net for each layer type of branches of Caffe, with most of its
fields set.
"""

from __future__ import annotations

from tests.support.nets import inputs, layer

Shapes = dict[str, tuple[int, ...]]
IMAGE: Shapes = {"x": (1, 8, 6, 6)}
PROPOSALS: Shapes = {"s": (1, 4, 3, 3), "d": (1, 8, 3, 3), "i": (1, 3)}
REGIONS: Shapes = {"x": (3, 8, 6, 6), "r": (2, 5)}
# Shapes, type, bottoms, tops, body.
LAYERS: tuple[tuple[Shapes, str, str, str, str], ...] = (
    (IMAGE, "BN", "x", "y m v", "bn_param { bn_mode: LEARN scale_filler { value: 1 } shift_filler "
"{ value: 0 } }"),
    (IMAGE, "BN", "x", "y", "bn_param { slope_filler { value: 1 } bias_filler { value: 0 } "
"momentum: 0.9 eps: 1e-5 frozen: false }"),
    (IMAGE, "BN", "x", "y", "bn_param { var_eps: 1e-10 decay: 0.05 moving_average: true axis: 2 }"),
    (IMAGE, "Pooling", "x", "y m", "pooling_param { kernel_size: 2 stride: 2 ceil_mode: false }"),
    (IMAGE, "Reorg", "x", "y", "reorg_param { stride: 2 reverse: false }"),
    ({"x": (1, 2, 3, 3), "m": (1, 2, 3, 3)}, "Upsample", "x m", "y", "upsample_param { scale: 2 "
"pad_out_h: true pad_out_w: false }"),
    ({"x": (1, 2, 3, 3), "m": (1, 2, 3, 3)}, "Upsample", "x m", "y", "upsample_param { "
"upsample_h: 6 upsample_w: 5 }"),
    (REGIONS, "PSROIPooling", "x r", "y", "psroi_pooling_param { spatial_scale: 0.5 output_dim: 2 "
"group_size: 2 }"),
    (REGIONS, "ROIPooling", "x r", "y", "roi_pooling_param { spatial_scale: 0.5 pooled_h: 2 "
"pooled_w: 3 }"),
    (REGIONS, "ROIAlign", "x r", "y", "roi_align_param { spatial_scale: 0.5 pooled_h: 2 pooled_w: "
"3 sampling_ratio: 2 }"),
    (PROPOSALS, "Proposal", "s d i", "y p", "proposal_param { feat_stride: 8 base_size: 8 "
"min_size: 1 ratio: 1 scale: 1 scale: 2 pre_nms_topn: 9 post_nms_topn: 4 nms_thresh: 0.5 }"),
    ({"f": (1, 2, 3, 3), "g": (2, 5), "i": (1, 3)}, "AnchorTarget", "f g i", "l t a b",
     "anchor_target_param { feat_stride: 8 base_size: 8 ratio: 1 scale: 1 allowed_border: 0 "
"batch_size: 8 fg_fraction: 0.5 positive_overlap: 0.7 negative_overlap: 0.3 clobber_positives: "
"false positive_weight: -1 }"),
    ({"r": (3, 5), "g": (2, 5)}, "ProposalTarget", "r g", "y l t a b",
     "proposal_target_param { num_classes: 4 batch_size: 8 fg_fraction: 0.25 fg_thresh: 0.5 "
"bg_thresh_hi: 0.5 bg_thresh_lo: 0 agnostic: true bbox_mean: [0, 0, 0, 0] bbox_std: [1, 1, 1, 1] }"),
    ({"a": (3, 4), "b": (3, 4), "w": (3, 4)}, "SmoothL1LossOHEM", "a b w", "l e", "loss_param { "
"normalization: PRE_FIXED pre_fixed_normalizer: 8 normalize: true }"),
    ({"a": (3, 4), "b": (3, 4), "w": (3, 4)}, "SmoothL1Loss", "a b w", "l", "smooth_l1_loss_param "
"{ sigma: 2 }"),
    ({"x": (3, 4), "l": (3,)}, "SoftmaxWithLossOHEM", "x l", "a p e", "loss_param { ignore_label: "
"-1 weight_by_label_freqs: true class_weighting: [1, 2, 1, 1] }"),
    ({"r": (4, 5), "e": (4,), "l": (4,), "w": (4, 8)}, "BoxAnnotatorOHEM", "r e l w", "a b", "box_annotator_ohem_param { roi_per_img: 2 ignore_label: -1 }"),
    (PROPOSALS, "Python", "s d i", "y", "python_param { module: 'rpn.proposal_layer' layer: "
"'ProposalLayer' param_str: \"'feat_stride': 16\\n'scales': [2]\\n'ratios': [0.5, 1]\" }"),
    ({}, "DenseImageData", "", "d l", "dense_image_data_param { source: 'list' batch_size: 2 "
"rand_skip: 1 shuffle: true new_height: 4 new_width: 4 is_color: true root_folder: '/' } "
"transform_param { crop_size: 3 mirror: true }"),
    ({}, "ImageSegData", "", "d l e", "image_data_param { source: 'list' batch_size: 2 "
"new_height: 4 new_width: 4 label_type: PIXEL ignore_label: 9 } transform_param { crop_h: 3 "
"crop_w: 5 mirror: true }"),
    ({}, "ROIData", "", "d i g", "roi_data_param { source: 'windows' root_folder: '/' scale: 20 "
"max_size: 40 shuffle: true } transform_param { mean_value: 3 mirror: true }"),
)  # fmt: skip


def seeds() -> list[bytes]:
    """Return the nets as prototxt."""
    return [
        (inputs(**shapes) + "\n" + layer(kind, bottoms, tops, body)).encode()
        for shapes, kind, bottoms, tops, body in LAYERS
    ]
