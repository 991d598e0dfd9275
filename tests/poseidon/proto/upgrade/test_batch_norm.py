"""BatchNorm's three `param` blocks."""

from __future__ import annotations

import pytest

from poseidon.proto.caffe_pb2 import NetParameter
from poseidon.proto.text import parse
from poseidon.proto.upgrade.driver import needs_upgrade, upgrade_net

ZERO = "param { lr_mult: 0 decay_mult: 0 } "


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("param { lr_mult: 1 } param { } param { lr_mult: 0 }", ZERO * 3),
        (
            'param { name: "m" } param { } param { }',
            f'param {{ name: "m" lr_mult: 0 decay_mult: 0 }} {ZERO * 2}',
        ),
        (ZERO * 3, None),
        ("param { lr_mult: 0 }", None),
        ("", None),
    ],
)
def test_statistics_are_left_alone(before: str, after: str | None) -> None:
    old = parse(f'layer {{ type: "BatchNorm" {before} }}', NetParameter(), source="")
    assert needs_upgrade(old) is (after is not None)
    new = old if after is None else parse(f'layer {{ type: "BatchNorm" {after} }}', NetParameter(), source="")
    assert upgrade_net(old) == new


def test_other_layers_keep_their_multipliers() -> None:
    net = parse('layer { type: "Scale" param { } param { } param { } }', NetParameter(), source="")
    assert upgrade_net(net) == net
