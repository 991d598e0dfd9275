"""The laws of the driver: what is up to date stays as it is, and twice is once."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.caffe.proto.caffe_pb2 import NetParameter, V0LayerParameter
from poseidon.caffe.proto.definition import read_net
from poseidon.caffe.proto.text import parse
from poseidon.caffe.proto.upgrade import _FIELDS, _TYPES, NET_UPGRADES, is_v0, upgrade_net
from poseidon.caffe.proto.upgrade_v1 import UpgradeError
from poseidon.errors import DefinitionError


def net(text: str) -> NetParameter:
    return parse(text, NetParameter(), source="")


def layers(*inner: str) -> str:
    """V0 connections: each is the text of a layer, then its bottoms and tops."""
    return "\n".join(f"layers {{ {text} }}" for text in inner)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", False),
        ("layer { }", False),
        ("layers { }", False),
        ("layers { } layers { layer { } }", True),
    ],
)
def test_question(text: str, expected: bool) -> None:
    assert is_v0(net(text)) is expected


# The inside of a V0 layer => the inside of the same layer today.
CASES = """
type: "conv" num_output: 3 biasterm: false kernelsize: 5 stride: 2 pad: 1 group: 1 blobs_lr: 1 blobs_lr: 2 weight_decay: 1 weight_decay: 0 weight_filler { type: "xavier" } bias_filler { value: 3 }
  => type: "Convolution" param { lr_mult: 1 decay_mult: 1 } param { lr_mult: 2 decay_mult: 0 } convolution_param { num_output: 3 bias_term: false kernel_size: 5 stride: 2 pad: 1 group: 1 weight_filler { type: "xavier" } bias_filler { value: 3 } }
type: "innerproduct" num_output: 3 biasterm: true weight_filler { type: "gaussian" std: 0.01 }
  => type: "InnerProduct" inner_product_param { num_output: 3 bias_term: true weight_filler { type: "gaussian" std: 0.01 } }
type: "pool" pool: STOCHASTIC kernelsize: 3 stride: 2 pad: 0
  => type: "Pooling" pooling_param { pool: STOCHASTIC kernel_size: 3 stride: 2 pad: 0 }
type: "lrn" local_size: 3 alpha: 0.1 beta: 0.5 k: 2
  => type: "LRN" lrn_param { local_size: 3 alpha: 0.1 beta: 0.5 k: 2 }
type: "dropout" dropout_ratio: 0.3 => type: "Dropout" dropout_param { dropout_ratio: 0.3 }
type: "concat" concat_dim: 0 => type: "Concat" concat_param { concat_dim: 0 }
type: "data" source: "db" meanfile: "mean" batchsize: 7 cropsize: 11 mirror: true scale: 0.5 rand_skip: 3
  => type: "Data" data_param { source: "db" batch_size: 7 rand_skip: 3 } transform_param { mean_file: "mean" crop_size: 11 mirror: true scale: 0.5 }
type: "images" source: "list" batchsize: 7 new_height: 8 new_width: 9 shuffle_images: true rand_skip: 3
  => type: "ImageData" image_data_param { source: "list" batch_size: 7 new_height: 8 new_width: 9 shuffle: true rand_skip: 3 }
type: "window_data" source: "list" batchsize: 7 det_fg_threshold: 0.6 det_bg_threshold: 0.4 det_fg_fraction: 0.2 det_context_pad: 16 det_crop_mode: "square"
  => type: "WindowData" window_data_param { source: "list" batch_size: 7 fg_threshold: 0.6 bg_threshold: 0.4 fg_fraction: 0.2 context_pad: 16 crop_mode: "square" }
type: "hdf5_data" source: "list" batchsize: 7
  => type: "HDF5Data" hdf5_data_param { source: "list" batch_size: 7 }
type: "hdf5_output" hdf5_output_param { file_name: "out" }
  => type: "HDF5Output" hdf5_output_param { file_name: "out" }
type: "infogain_loss" source: "h" => type: "InfogainLoss" infogain_loss_param { source: "h" }
type: "softmax_loss" => type: "SoftmaxWithLoss"
"""


@pytest.mark.parametrize("row", CASES.strip().replace("\n  ", " ").splitlines())
def test_every_setting_finds_its_place(row: str) -> None:
    old, new = row.split(" => ")
    text = layers(f'layer {{ name: "x" {old} }} bottom: "a" top: "b"')
    upgraded = upgrade_net(net(text))
    assert upgraded == net(f'layer {{ name: "x" bottom: "a" top: "b" {new} }}')
    assert upgrade_net(upgraded) == upgraded


def test_no_setting_is_forgotten() -> None:
    """The three left over were never read by a layer of BVLC Caffe; they are an error there too."""
    known = {field.name for field in V0LayerParameter.DESCRIPTOR.fields}
    assert known - set(_FIELDS) == {"type", "new_num", "new_channels"}
    assert len(_TYPES) == 24


def test_padding_is_folded_into_what_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text(
        layers(
            'layer { name: "pad" type: "padding" pad: 2 } bottom: "data" top: "padded"',
            'layer { name: "conv" type: "conv" num_output: 1 kernelsize: 5 } bottom: "padded" '
            'top: "conv"',
            'layer { name: "pad" type: "padding" pad: 1 } bottom: "conv" top: "padded"',
            'layer { name: "pool" type: "pool" kernelsize: 3 } bottom: "padded" top: "pool"',
        )
    )
    definition = read_net(path)
    conv, pool = definition.param.layer
    assert (list(conv.bottom), list(conv.convolution_param.pad)) == (["data"], [2])
    assert (list(pool.bottom), pool.pooling_param.pad) == (["conv"], 1)
    assert definition.layer_lines == (2, 4)


def test_blobs_come_along() -> None:
    upgraded = upgrade_net(net(layers('layer { name: "x" type: "conv" blobs { num: 1 data: 3 } }')))
    assert list(upgraded.layer[0].blobs[0].data) == [3]


def test_unknown_settings_of_a_layer_are_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text(
        layers('layer { type: "relu" }', 'layer { type: "relu" kernelsize: 3 new_num: 2 }')
    )
    with caplog.at_level("WARNING"):
        assert read_net(path).param == net('layer { type: "ReLU" } layer { type: "ReLU" }')
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}:2: {name} is not a setting of a 'relu' layer of Caffe's first format (V0); ignored"
        for name in ("kernelsize", "new_num")
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('layer { type: "convolution" }', "unknown layer type"),
        ('layer { type: "padding" pad: 1 } top: "b"', "a padding layer has one bottom and one top"),
    ],
)
def test_fields_that_cannot_be_upgraded_are_refused(text: str, message: str) -> None:
    with pytest.raises(UpgradeError, match=message) as caught:
        upgrade_net(net(layers('layer { type: "relu" }', text)))
    assert caught.value.layer == 1


def test_padding_for_others_is_a_mistake_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text(
        layers(
            'layer { type: "padding" pad: 2 } bottom: "data" top: "padded"',
            'layer { type: "relu" } bottom: "padded" top: "relu"',
        )
    )
    with pytest.raises(DefinitionError, match=r"net.prototxt:2"):
        read_net(path)


TODAY = 'name: "n" layer { name: "d" type: "Data" data_param { source: "s" } transform_param { scale: 2 } }'
OLD = (
    'input: "a" input_dim: [1, 1, 1, 1] layers { type: DATA data_param { scale: 2 } blobs_lr: 1 } '
    "layers { type: RELU }"
)


def test_what_is_up_to_date_is_given_back() -> None:
    net = parse(TODAY, NetParameter(), source="")
    assert upgrade_net(net) is net


@pytest.mark.parametrize("text", [TODAY, OLD])
def test_twice_is_once_and_leaves_no_question(text: str) -> None:
    once = upgrade_net(parse(text, NetParameter(), source=""))
    assert upgrade_net(once) == once
    assert not any(needed(once) for needed, _ in NET_UPGRADES)
