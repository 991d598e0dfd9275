"""Mistakes in prototxt: the sentence and the place."""

from __future__ import annotations

import random
import time

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor

from poseidon.caffe.proto.caffe_pb2 import DESCRIPTOR, NetParameter, SolverParameter
from poseidon.caffe.proto.diagnosis import diagnose
from poseidon.caffe.proto.tokens import scan

NET = DESCRIPTOR.message_types_by_name["NetParameter"]
SOLVER = DESCRIPTOR.message_types_by_name["SolverParameter"]
FIRST_TWELVE = ", ".join(
    sorted(DESCRIPTOR.message_types_by_name["LayerParameter"].fields_by_name)[:12]
)

LEGAL = """name: "legal" force_backward: false
layer {
  name: "conv1"; type: 'Convo' "lution",
  bottom: ["data"] top: "conv1"
  param { lr_mult: 1 } param < lr_mult: 2e0 >
  convolution_param: { num_output: 0x14 kernel_size: [3, 5] pad: 1 pad: 2 engine: CAFFE bias_term: true
    weight_filler { type: "gaussian" std: .01 } }  # a comment with } and "
  include: [{ phase: TRAIN }, { min_level: -1 }]
}
layers { type: POOLING pooling_param { pool: MAX } }
"""

SOLVER_CASES = {
    'base_lr: 0.1\ndevice_id: '
'"0"': (2, 12, 'device_id in SolverParameter: expected an integer, '
'found "0"; write device_id: 0 without quotes'),
    "max_iter: 10\nmax_iter: "
"20": (2, 1, "'max_iter' is set twice in SolverParameter, first in "
"line 1; it takes one value"),
    "layer { }": (1, 1, "this is a net definition; a solver is expected, the file with net: ... "
"and base_lr: ..."),
    'name: "n" input: "x" layer { '
'}': (1, 1, "this is a net definition; a solver is expected, the "
"file with net: ... and base_lr: ..."),
    "base_lr: 0,01": (1, 12, "a decimal comma in 0,01; write 0.01"),
    "learning_rate: "
"1": (1, 1, "unknown field 'learning_rate' in SolverParameter; did you mean "
"'base_lr'?"),
    "max_iter: "
"4e3": (1, 11, "max_iter in SolverParameter: expected an integer, found '4e3'; "
"write max_iter: 4000"),
    "debug_info: "
"yes": (1, 13, "debug_info in SolverParameter: expected true or false, found "
"'yes'; write debug_info: true"),
    "net: nets/le-net.prototxt": (1, 6, "net in SolverParameter: expected a string in quotes, "
"found 'nets/le-net.prototxt'; "
     'write net: "nets/le-net.prototxt"'),
    "// by me\nbase_lr: "
"1": (1, 1, "expected the name of a setting in the file, found '/'; a "
"comment begins with #"),
    '{"base_lr": '
'1}': (1, 1, "expected the name of a setting in the file, found '{'; prototxt has "
"no braces around the file "
     "and no quotes around names"),
    "solver_mode: "
"GPUS": (1, 14, "solver_mode in SolverParameter: unknown value 'GPUS'; did you "
"mean 'GPU'? (one of CPU, GPU)"),
    "net: lenet": (1, 6, "net in SolverParameter: expected a string in quotes, found 'lenet'; "
"write net: \"lenet\""),
}  # fmt: skip

NET_CASES = {
    "layer { convolution_param {\n kernal_size: 3 } }":
        (2, 2, "unknown field 'kernal_size' in ConvolutionParameter; did you mean 'kernel_size'?"),
    "layer { elu_param { qqq: 3 } }":
        (1, 21, "unknown field 'qqq' in ELUParameter; it takes alpha"),
    "layer { bottom_diff_data_zzz: 3 }":
        (1, 9, f"unknown field 'bottom_diff_data_zzz' in LayerParameter; it takes {FIRST_TWELVE}, "
"..."),
    "base_lr: 1":
        (1, 1, "this is a solver definition; a net definition is expected, the file with the layers"),
    'layer { name: "conv1 type: "Convolution" bottom: "data" }':
        (1, 15, "the string \"conv1 has no closing quote; write \"conv1\""),
    'layer { name: "a" type: "b }':
        (1, 25, "type in LayerParameter: the string \"b } has no closing quote on its line"),
    'layer { conv_param { } }':
        (1, 9, "unknown field 'conv_param' in LayerParameter; did you mean 'convolution_param'?"),
    'layer { ip_param { } }':
        (1, 9, "unknown field 'ip_param' in LayerParameter; did you mean 'inner_product_param'?"),
    'layer { convolution_param { kernel: 3 } }':
        (1, 29, "unknown field 'kernel' in ConvolutionParameter; did you mean 'kernel_size'?"),
    "layer { blobs_lr: 1 }":
        (1, 9, "unknown field 'blobs_lr' in LayerParameter; in a `layer` block write param { "
"lr_mult: ... }"),
    "layer { type: CONVOLUTION }":
        (1, 15, "type in LayerParameter: expected a string in quotes, found 'CONVOLUTION'; write "
"type: \"Convolution\""),
    'layers { type: "Data" }':
        (1, 16, 'type in V1LayerParameter: found "Data"; a type in quotes needs a block named '
'layer, not layers; for layers it would be DATA without quotes'),
    'layers { type: "BatchNorm" }':
        (1, 16, 'type in V1LayerParameter: found "BatchNorm"; a type in quotes needs a block '
'named layer, not layers'),
    "layer { pooling_param { pool: MEDIAN } }":
        (1, 31, "pool in PoolingParameter: unknown value 'MEDIAN'; expected one of MAX, AVE, "
"STOCHASTIC"),
    "layer { pooling_param { pool { } } }":
        (1, 30, "pool takes a value, not a block: write pool: <value>"),
    "layer { pooling_param { pool MAX } }":
        (1, 30, "expected ':' after pool, found 'MAX'"),
    "layer { pooling_param: 3 }":
        (1, 24, "pooling_param is a block: expected '{' after it, found '3'"),
    "layer { pooling_param { } pooling_param { } }":
        (1, 27, "'pooling_param' is set twice in LayerParameter, first in line 1; it takes one "
"value"),
    "layer { convolution_param { pad: [1 2] } }":
        (1, 37, "the list of pad expects ',' or ']', found '2'"),
    "layer { bottom: }":
        (1, 17, "bottom in LayerParameter: expected a string in quotes, found '}'"),
    'layer { name: "a\n}':
        (1, 15, "name in LayerParameter: the string \"a has no closing quote on its line"),
    'name: "a"\n}':
        (2, 1, "this '}' closes nothing: there is one too many here or above"),
    'layer { "name": 1 }':
        (1, 9, "expected the name of a setting in LayerParameter, found \"name\""),
    "= 3":
        (1, 1, "expected the name of a setting in the file, found '='; a setting is written name: "
"value"),
    'layer {\n  name: "a"\n':
        (1, 1, "the '{' of 'layer' in line 1 is not closed before the end of the file"),
    'layer {\n  name: "a"\nlayer {\n  name: "b"\n}\n':
        (1, 1, "the '{' of 'layer' in line 1 is not closed before 'layer' in line 3"),
    'layer {\n  convolution_param {\n    weight_filler {\n      type: "xavier"\n  }\n}\nlayer '
'{\n}\n':
        (3, 5, "the '{' of 'weight_filler' in line 3 is not closed before 'layer' in line 7"),
    'layer {\n  convolution_param {\n    pad: 1\n  top: "x"\n}':
        (4, 3, "unknown field 'top' in ConvolutionParameter; is the '}' of 'convolution_param' "
"(line 2) missing before it?"),
    'layer { region_loss_param { } }':
        (1, 9, "unknown field 'region_loss_param' in LayerParameter; it is a block of layer type "
"'RegionLoss' of Yolo's branch of Caffe, which this program does not have"),
}  # fmt: skip


@pytest.mark.parametrize("text", NET_CASES)
def test_net_mistakes(text: str) -> None:
    mistake = diagnose(text, NET)
    assert mistake is not None
    assert (mistake.line, mistake.column, mistake.message) == NET_CASES[text]
    with pytest.raises(text_format.ParseError):
        text_format.Parse(text, NetParameter())


@pytest.mark.parametrize("text", SOLVER_CASES)
def test_solver_mistakes(text: str) -> None:
    mistake = diagnose(text, SOLVER)
    assert mistake is not None
    assert (mistake.line, mistake.column, mistake.message) == SOLVER_CASES[text]
    with pytest.raises(text_format.ParseError):
        text_format.Parse(text, SolverParameter())


@pytest.mark.parametrize("text", ["", "# nothing", LEGAL])
def test_legal_text_has_no_mistake(text: str) -> None:
    text_format.Parse(text, NetParameter())
    assert diagnose(text, NET) is None


def test_finds_a_mistake_exactly_when_protobuf_does() -> None:
    """Tokens of legal text dropped, doubled, swapped and replaced, 2000 times."""
    generator = random.Random(20)
    tokens = [token.text for token in scan(LEGAL)][:-1]
    foreign = [
        "{",
        "}",
        "<",
        ">",
        "[",
        "]",
        ":",
        ",",
        ";",
        "1",
        "-1",
        "1.5",
        '"a"',
        '"',
        "name",
        "layer",
        "MAX",
        "x",
    ]
    refused = 0
    for _ in range(2000):
        broken = list(tokens)
        for _ in range(generator.choice((1, 1, 2))):
            at = generator.randrange(len(broken))
            action = generator.randrange(4)
            if action == 0:
                del broken[at]
            elif action == 1:
                broken.insert(at, broken[at])
            elif action == 2:
                broken[at] = generator.choice(foreign)
            else:
                broken.insert(at, generator.choice(foreign))
        text = generator.choice((" ", "\n")).join(broken)
        try:
            text_format.Parse(text, NetParameter())
            legal = True
        except text_format.ParseError:
            legal = False
        refused += not legal
        assert (diagnose(text, NET) is None) == legal, text
    assert 500 < refused < 2000


def test_a_long_definition_is_explained_at_once() -> None:
    text = LEGAL * 700 + "}"
    started = time.process_time()
    assert diagnose(text.replace('name: "legal" force_backward: false', ""), NET) is not None
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (
            'type: "DetectNetTransformation" detectnet_groundtruth_param { stride: 16 }',
            "unknown layer type 'DetectNetTransformation', whose block 'detectnet_groundtruth_param' "
            "is unknown, too; it is 'DetectNetTransformation' of NVCaffe's branch",
        ),
        ('transpose_param { dim: 1 } type: "Transpose"', "'Transpose' of CTPN's branch"),
        ('type: "SegData" seg_data_param { batch_size: 1 }', "'SegData' of CUHK's branch"),
        (
            'include { phase: TRAIN } type: "KernelLoss" kernel_param { a: 1 }',
            "unknown layer type 'KernelLoss', whose block 'kernel_param' is unknown, too; both are of "
            "a branch of Caffe that is not here",
        ),
        (
            'type: "Convolution" convolutoin_param { num_output: 1 }',
            "unknown field 'convolutoin_param' in LayerParameter; did you mean 'convolution_param'?",
        ),
        (
            'type: "DenseImageData" dense_image_data_param { label_divide_factor: 255 }',
            "ENet's branch divides the labels by it",
        ),
    ],
)
def test_the_type_of_a_layer_is_named_before_its_block(layer: str, says: str) -> None:
    mistake = diagnose(f'layer {{ name: "g" {layer} }}', NET)
    assert mistake is not None and says in mistake.message
    assert ("did you mean" in mistake.message) == ("did you mean" in says)


@pytest.mark.parametrize(
    ("text", "descriptor", "says"),
    [
        ('layers { name: "g" type: CROP }', NET, "CROP is of longjon's branch"),
        ("base_lr: 1 device_id: [0, 1]", SOLVER, "device_id takes one number"),
        ("base_lr: 1 stepearly: 3", SOLVER, "lowers the rate when the test's score stops rising"),
    ],
)
def test_values_of_branches_are_named(text: str, descriptor: Descriptor, says: str) -> None:
    mistake = diagnose(text, descriptor)
    assert mistake is not None and says in mistake.message
