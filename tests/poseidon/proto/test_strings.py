"""Strings that are no text are found at any depth."""

from __future__ import annotations

import pytest

from poseidon.proto.caffe_pb2 import LayerParameter, NetParameter
from poseidon.proto.strings import strings_are_text

NET = NetParameter(
    name="AA",
    layer=[
        LayerParameter(
            name="BB",
            top=["CC", "DD"],
            convolution_param={"weight_filler": {"type": "EE"}},  # type: ignore[arg-type]
        )
    ],
)


def test_text_is_text() -> None:
    assert strings_are_text(NET)
    assert strings_are_text(NetParameter())


@pytest.mark.parametrize("string", (b"AA", b"BB", b"CC", b"DD", b"EE"))
def test_one_bad_string_is_found(string: bytes) -> None:
    content = NET.SerializeToString().replace(string, b"\xe3A")
    assert not strings_are_text(NetParameter.FromString(content))
