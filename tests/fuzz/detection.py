"""Fuzz targets of detection: nets that run, augmentation of an image, records and annotation
files.
"""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from google.protobuf import text_format

from poseidon.caffe.data.augmentation import Augmentation
from poseidon.caffe.data.batches.transform import Transform, generator, pixels_of, planes
from poseidon.caffe.data.boxes import Box, Object, WindowSampler
from poseidon.caffe.data.datum import (
    Decoding,
    decode_annotated,
    encode_annotated,
    encode_datum,
    object_rows,
)
from poseidon.caffe.data.prepare.annoset import AnnotationFormat, read_objects
from poseidon.caffe.data.prepare.procedural import draw_scene, voc_annotation
from poseidon.caffe.layers import base
from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.proto.caffe_pb2 import (
    TRAIN,
    Datum,
    LayerParameter,
    NetState,
    TransformationParameter,
)
from poseidon.caffe.proto.definition import read_net
from poseidon.caffe.proto.text import parse

# Blobs and images of the fuzz stay small.
LARGEST_BLOB = 1 << 17
LARGEST_SIDE = 300
NET = b"""
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 20 dim: 24 } } }
layer { name: "gt" type: "Input" top: "gt" input_param { shape { dim: 1 dim: 1 dim: 2 dim: 8 } } }
layer { name: "map" type: "Pooling" bottom: "data" top: "map" pooling_param { kernel_size: 8 stride: 8 pool: AVE } }
layer { name: "norm" type: "Normalize" bottom: "map" top: "norm" norm_param { across_spatial: false channel_shared: false
  scale_filler { type: "constant" value: 20 } } }
layer { name: "prior" type: "PriorBox" bottom: "map" bottom: "data" top: "prior" prior_box_param { min_size: 6 max_size: 9
  aspect_ratio: 2 variance: 0.1 variance: 0.1 variance: 0.2 variance: 0.2 step: 8 } }
layer { name: "loc" type: "Convolution" bottom: "norm" top: "loc" convolution_param { num_output: 16 kernel_size: 1 } }
layer { name: "locp" type: "Permute" bottom: "loc" top: "locp" permute_param { order: 0 order: 2 order: 3 order: 1 } }
layer { name: "locf" type: "Flatten" bottom: "locp" top: "locf" }
layer { name: "conf" type: "Convolution" bottom: "norm" top: "conf" convolution_param { num_output: 12 kernel_size: 1
  weight_filler { type: "xavier" } } }
layer { name: "confp" type: "Permute" bottom: "conf" top: "confp" permute_param { order: 0 order: 2 order: 3 order: 1 } }
layer { name: "conff" type: "Flatten" bottom: "confp" top: "conff" }
layer { name: "loss" type: "MultiBoxLoss" bottom: "locf" bottom: "conff" bottom: "prior" bottom: "gt" top: "loss"
  multibox_loss_param { num_classes: 3 code_type: CENTER_SIZE mining_type: HARD_EXAMPLE sample_size: 5
  nms_param { nms_threshold: 0.5 top_k: 9 } } loss_param { normalization: VALID } }
layer { name: "out" type: "DetectionOutput" bottom: "locf" bottom: "conff" bottom: "prior" top: "out"
  detection_output_param { num_classes: 3 nms_param { nms_threshold: 0.5 top_k: 9 eta: 0.9 } keep_top_k: 5
  code_type: CENTER_SIZE confidence_threshold: 0.01 } }
layer { name: "eval" type: "DetectionEvaluate" bottom: "out" bottom: "gt" top: "eval"
  detection_evaluate_param { num_classes: 3 overlap_threshold: 0.5 } }
"""
NETS = (
    NET,
    NET.replace(b"mining_type: HARD_EXAMPLE", b"mining_type: MAX_NEGATIVE").replace(
        b"CENTER_SIZE", b"CORNER"
    ),
    NET.replace(
        b"mining_type: HARD_EXAMPLE", b"mining_type: NONE conf_loss_type: LOGISTIC bp_inside: true"
    ),
)
OBJECTS = torch.tensor([[[[0, 1, 0, 0.1, 0.1, 0.5, 0.6, 0], [1, 2, 0, 0.3, 0.2, 0.9, 0.9, 1]]]])
STEPS = (
    b"""transform_param { mirror: true mean_value: 50 crop_h: 20 crop_w: 24 force_color: true
  resize_param { prob: 1 resize_mode: FIT_LARGE_SIZE_AND_PAD height: 30 width: 30 pad_mode: MIRRORED pad_value: 3
    interp_mode: LINEAR interp_mode: CUBIC }
  noise_param { prob: 1 hist_eq: true decolorize: true gauss_blur: true jpeg: 50 posterize: true erode: true clahe: true
    saltpepper: true saltpepper_param { fraction: 0.1 value: 1 } }
  distort_param { brightness_prob: 0.5 brightness_delta: 32 contrast_prob: 0.5 contrast_lower: 0.5 contrast_upper: 1.5
    hue_prob: 0.5 hue_delta: 18 saturation_prob: 0.5 saturation_lower: 0.5 saturation_upper: 1.5 random_order_prob: 0.5 }
  expand_param { prob: 0.5 max_expand_ratio: 2 } emit_constraint { emit_type: MIN_OVERLAP emit_overlap: 0.2 } }
annotated_data_param { batch_sampler { max_sample: 1 max_trials: 1 } batch_sampler {
  sampler { min_scale: 0.3 max_scale: 1 min_aspect_ratio: 0.5 max_aspect_ratio: 2 }
  sample_constraint { min_jaccard_overlap: 0.3 } max_sample: 1 max_trials: 20 } }
""",
    b"""transform_param { resize_param { resize_mode: FIT_SMALL_SIZE height: 30 width: 40 height_scale: 9 width_scale: 9 }
  crop_size: 20 } annotated_data_param { batch_sampler { sample_constraint { max_object_coverage: 0.7 } } }
""",
)


def load_running_net(path: Path) -> None:
    """Compile a net of the layers of SSD, and run it forward and back."""
    definition = read_net(path)
    state = NetState(phase=TRAIN)
    with mock.patch.object(base, "LARGEST_BLOB", LARGEST_BLOB):
        net = compile_net(definition, LayerContext(phase=TRAIN, seed=1), state=state)
    shapes = net.input_shapes
    given = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(1))
        for name, shape in shapes.items()
    }
    if shapes.get("gt") == tuple(OBJECTS.shape):
        given["gt"] = OBJECTS
    net(given)
    if net.loss.requires_grad:
        net.loss.backward()
    net.close()


def load_steps(path: Path) -> None:
    """Augment an image with its objects."""
    layer = parse(path.read_text(errors="replace"), LayerParameter(), source=str(path))
    scene = draw_scene(3, size=(40, 50))
    transform = Transform(
        layer.transform_param, train=True, resolve=lambda name: Path(name.replace("\0", ""))
    )
    steps = transform.augmentation or Augmentation(TransformationParameter())
    sampler = WindowSampler(layer.annotated_data_param.batch_sampler)
    resize = layer.transform_param.resize_param
    transform.output_shape((3, 40, 50))
    if max(resize.height, resize.width) > LARGEST_SIDE:
        return  # legal, and slow
    boxes = [
        Object(1, 0, Box(*(value / 50 for value in box)), False) for box in scene.boxes.tolist()
    ]
    for choice in transform.draws(1, np.arange(2)):
        random = generator(np.append(choice, [1, 2]))
        image, objects = steps.before(pixels_of(planes(scene.image)), boxes, random)
        window = sampler.choose(objects, random)
        assert window is None or (window.area <= 1 + 1e-9 and min(window) >= 0)
        pixels = planes(steps.after(image, random))
        out = np.empty(transform.cropped_shape(pixels.shape), np.float32)
        placement = transform.place(pixels, choice, out)
        for item in steps.placed(
            objects, image.shape[:2], placement.window, mirrored=placement.mirrored
        ):
            assert item.box.xmin <= item.box.xmax and item.box.ymin <= item.box.ymax


def records() -> list[bytes]:
    """Return annotated records."""
    scene = draw_scene(1, size=(9, 11))
    datum = Datum.FromString(encode_datum(np.ascontiguousarray(scene.image.transpose(2, 0, 1)), 2))
    objects = [Object(n, 0, Box(0.1, 0.2, 0.3, 0.4), bool(n)) for n in range(3)]
    return [encode_annotated(datum, objects), encode_annotated(datum, [])]


def load_record(path: Path) -> None:
    """Read an annotated record."""
    found = decode_annotated(path.read_bytes(), Decoding.AS_STORED)
    rows = object_rows([found.objects or []])
    assert found.image.ndim == 3 and rows.shape[-1] == 8 and np.isfinite(rows).all()


def annotations() -> list[bytes]:
    """Return annotation files of each format."""
    scene = draw_scene(2, size=(40, 50))
    boxes = scene.boxes.tolist()
    content = {
        "image": {"height": 40, "width": 50},
        "annotation": [
            {"category_id": "disc", "bbox": [a, b, c - a, d - b]} for a, b, c, d in boxes
        ],
    }
    lines = "".join(f"{n} {a} {b} {c} {d}\n" for n, (a, b, c, d) in enumerate(boxes))
    return [voc_annotation(scene).encode(), json.dumps(content).encode(), lines.encode()]


def load_annotation(path: Path) -> None:
    """Read an annotation file in the format that its first character suggests."""
    forms = {b"<": AnnotationFormat.XML, b"{": AnnotationFormat.JSON}
    form = forms.get(path.read_bytes()[:1], AnnotationFormat.TXT)
    labels = {"disc": 1, "square": 2, "triangle": 3}
    for item in read_objects(path, form, (40, 50), labels):
        assert item.box.xmin <= item.box.xmax and np.isfinite(item.box).all()


def texts_of_steps() -> list[bytes]:
    """Return layers with all fields of the augmentation."""
    return [
        text_format.MessageToString(text_format.Parse(text, LayerParameter())).encode()
        for text in STEPS
    ]
