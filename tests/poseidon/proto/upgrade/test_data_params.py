"""Transformation settings move to transform_param."""

from __future__ import annotations

import pytest

from poseidon.proto.caffe_pb2 import NetParameter
from poseidon.proto.text import parse
from poseidon.proto.upgrade.driver import upgrade_net
from poseidon.proto.upgrade.errors import UpgradeError

CASES = [
    (
        'layer { data_param { source: "s" scale: 0.5 mean_file: "m" crop_size: 3 mirror: true } }',
        'layer { data_param { source: "s" } transform_param { scale: 0.5 mean_file: "m" crop_size: 3 mirror: true } }',
    ),
    (
        "layers { type: IMAGE_DATA image_data_param { new_height: 9 mirror: false } }",
        'layer { type: "ImageData" image_data_param { new_height: 9 } transform_param { mirror: false } }',
    ),
    (
        "layers { type: WINDOW_DATA window_data_param { crop_size: 7 } transform_param { crop_size: 7 scale: 2 } }",
        'layer { type: "WindowData" window_data_param { } transform_param { crop_size: 7 scale: 2 } }',
    ),
    ('layer { data_param { source: "s" } }', 'layer { data_param { source: "s" } }'),
    ("layer { power_param { scale: 2 } }", "layer { power_param { scale: 2 } }"),
]


@pytest.mark.parametrize("old, new", CASES)
def test_settings_move(old: str, new: str) -> None:
    assert upgrade_net(parse(old, NetParameter(), source="")) == parse(new, NetParameter(), source="")


def test_a_contradiction_is_refused() -> None:
    net = parse(
        "layer { } layer { data_param { mirror: true } transform_param { mirror: false } }",
        NetParameter(),
        source="",
    )
    with pytest.raises(
        UpgradeError, match="mirror is set in transform_param and, with another value, in data_param"
    ) as caught:
        upgrade_net(net)
    assert caught.value.layer == 1
