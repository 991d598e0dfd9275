"""V0 is recognised and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.errors import DefinitionError
from poseidon.proto.caffe_pb2 import NetParameter
from poseidon.proto.definition import read_net
from poseidon.proto.text import parse
from poseidon.proto.upgrade.v0 import is_v0


@pytest.mark.parametrize(
    "text, expected",
    [("", False), ("layer { }", False), ("layers { }", False), ("layers { } layers { layer { } }", True)],
)
def test_question(text: str, expected: bool) -> None:
    assert is_v0(parse(text, NetParameter(), source="")) is expected


def test_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text(
        'name: "old"\nlayers {\n  layer { name: "conv1" type: "conv" kernelsize: 5 }\n  bottom: "data"\n}\n'
    )
    with pytest.raises(DefinitionError, match=r"net.prototxt:2: this is Caffe's first grammar"):
        read_net(path)
