"""The laws of the driver: what is up to date stays as it is, and twice is once."""

from __future__ import annotations

import pytest

from poseidon.caffe.proto.caffe_pb2 import NetParameter
from poseidon.caffe.proto.text import parse
from poseidon.caffe.proto.upgrade.driver import NET_UPGRADES, upgrade_net

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
