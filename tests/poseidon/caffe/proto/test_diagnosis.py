"""Mistakes in prototxt: the sentence and the place."""

from __future__ import annotations

import random
import time

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

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

SOLVER_CASES = r"""
2:12 base_lr: 0.1\ndevice_id: "0"
  => device_id in SolverParameter: expected an integer, found "0"; write device_id: 0 without quotes
2:1 max_iter: 10\nmax_iter: 20
  => 'max_iter' is set twice in SolverParameter, first in line 1; it takes one value
1:1 layer { }
  => this is a net definition; a solver is expected, the file with net: ... and base_lr: ...
1:1 name: "n" input: "x" layer { }
  => this is a net definition; a solver is expected, the file with net: ... and base_lr: ...
1:12 base_lr: 0,01 => a decimal comma in 0,01; write 0.01
1:13 max_iter: 4,000 => a comma in 4,000; write 4000, or 4.000
1:1 learning_rate: 1 => unknown field 'learning_rate' in SolverParameter; did you mean 'base_lr'?
1:11 max_iter: 4e3
  => max_iter in SolverParameter: expected an integer, found '4e3'; write max_iter: 4000
1:13 debug_info: yes
  => debug_info in SolverParameter: expected true or false, found 'yes'; write debug_info: true
1:6 net: nets/le-net.prototxt
  => net in SolverParameter: expected a string in quotes, found 'nets/le-net.prototxt'; write net: "nets/le-net.prototxt"
1:1 // by me\nbase_lr: 1
  => expected the name of a setting in the file, found '/'; a comment begins with #
1:1 {"base_lr": 1}
  => expected the name of a setting in the file, found '{'; prototxt has no braces around the file and no quotes around names
1:14 solver_mode: GPUS
  => solver_mode in SolverParameter: unknown value 'GPUS'; did you mean 'GPU'? (one of CPU, GPU)
1:6 net: “lenet”
  => net in SolverParameter: expected a string in quotes, found '“'; write straight quotes, ' or "
1:6 net: lenet
  => net in SolverParameter: expected a string in quotes, found 'lenet'; write net: "lenet"
"""

# Line and column of the mistake, the text, and the sentence.
NET_CASES = r"""
2:2 layer { convolution_param {\n kernal_size: 3 } }
  => unknown field 'kernal_size' in ConvolutionParameter; did you mean 'kernel_size'?
1:21 layer { elu_param { qqq: 3 } } => unknown field 'qqq' in ELUParameter; it takes alpha
1:9 layer { bottom_diff_data_zzz: 3 }
  => unknown field 'bottom_diff_data_zzz' in LayerParameter; it takes FIRST_TWELVE, ...
1:1 base_lr: 1
  => this is a solver definition; a net definition is expected, the file with the layers
1:15 layer { name: "conv1 type: "Convolution" bottom: "data" }
  => the string "conv1 has no closing quote; write "conv1"
1:25 layer { name: "a" type: "b }
  => type in LayerParameter: the string "b } has no closing quote on its line
1:9 layer { conv_param { } }
  => unknown field 'conv_param' in LayerParameter; did you mean 'convolution_param'?
1:9 layer { ip_param { } }
  => unknown field 'ip_param' in LayerParameter; did you mean 'inner_product_param'?
1:29 layer { convolution_param { kernel: 3 } }
  => unknown field 'kernel' in ConvolutionParameter; did you mean 'kernel_size'?
1:9 layer { blobs_lr: 1 }
  => unknown field 'blobs_lr' in LayerParameter; in a `layer` block write param { lr_mult: ... }
1:15 layer { type: CONVOLUTION }
  => type in LayerParameter: expected a string in quotes, found 'CONVOLUTION'; write type: "Convolution"
1:16 layers { type: "Data" }
  => type in V1LayerParameter: found "Data"; a type in quotes needs a block named layer, not layers; for layers it would be DATA without quotes
1:16 layers { type: "BatchNorm" }
  => type in V1LayerParameter: found "BatchNorm"; a type in quotes needs a block named layer, not layers
1:31 layer { pooling_param { pool: MEDIAN } }
  => pool in PoolingParameter: unknown value 'MEDIAN'; expected one of MAX, AVE, STOCHASTIC
1:30 layer { pooling_param { pool { } } } => pool takes a value, not a block: write pool: <value>
1:30 layer { pooling_param { pool MAX } } => expected ':' after pool, found 'MAX'
1:24 layer { pooling_param: 3 } => pooling_param is a block: expected '{' after it, found '3'
1:27 layer { pooling_param { } pooling_param { } }
  => 'pooling_param' is set twice in LayerParameter, first in line 1; it takes one value
1:37 layer { convolution_param { pad: [1 2] } } => the list of pad expects ',' or ']', found '2'
1:17 layer { bottom: } => bottom in LayerParameter: expected a string in quotes, found '}'
1:15 layer { name: "a\n} => name in LayerParameter: the string "a has no closing quote on its line
2:1 name: "a"\n} => this '}' closes nothing: there is one too many here or above
1:9 layer { "name": 1 } => expected the name of a setting in LayerParameter, found "name"
1:1 = 3 => expected the name of a setting in the file, found '='; a setting is written name: value
1:1 layer {\n  name: "a"\n => the '{' of 'layer' in line 1 is not closed before the end of the file
1:1 layer {\n  name: "a"\nlayer {\n  name: "b"\n}\n
  => the '{' of 'layer' in line 1 is not closed before 'layer' in line 3
3:5 layer {\n  convolution_param {\n    weight_filler {\n      type: "xavier"\n  }\n}\nlayer {\n}\n
  => the '{' of 'weight_filler' in line 3 is not closed before 'layer' in line 7
4:3 layer {\n  convolution_param {\n    pad: 1\n  top: "x"\n}
  => unknown field 'top' in ConvolutionParameter; is the '}' of 'convolution_param' (line 2) missing before it?
1:9 layer { region_loss_param { } }
  => unknown field 'region_loss_param' in LayerParameter; it is a block of layer type 'RegionLoss' of Yolo's branch of Caffe, which this program does not have
"""


def cases(text: str) -> list[str]:
    return text.strip().replace("\n  ", " ").splitlines()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        *((row, NetParameter) for row in cases(NET_CASES)),
        *((row, SolverParameter) for row in cases(SOLVER_CASES)),
    ],
)
def test_a_mistake_is_described_at_its_place(row: str, message: type[Message]) -> None:
    given, says = row.replace("FIRST_TWELVE", FIRST_TWELVE).split(" => ")
    place, text = given.replace("\\n", "\n").split(" ", 1)
    mistake = diagnose(text, message.DESCRIPTOR)
    assert mistake is not None
    assert (f"{mistake.line}:{mistake.column}", mistake.message) == (place, says)
    with pytest.raises(text_format.ParseError):
        text_format.Parse(text, message())


@pytest.mark.parametrize("text", ["", "# nothing", LEGAL])
def test_legal_text_has_no_mistake(text: str) -> None:
    text_format.Parse(text, NetParameter())
    assert diagnose(text, NET) is None


def test_finds_a_mistake_exactly_when_protobuf_does() -> None:
    """Tokens of legal text dropped, doubled, swapped and replaced, 600 times."""
    generator = random.Random(20)
    tokens = [token.text for token in scan(LEGAL)][:-1]
    foreign = ["-1", "1.5", '"a"', "name", "layer", "MAX", *'{}<>[]:,;1"x']
    refused = 0
    for _ in range(600):
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
    assert 150 < refused < 600


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
