"""Serialization of a solver and its nets to one text, for hosts that do not have the files.

Law: the remote host reads the same bytes. The text also holds the path of each file's folder,
relative to the current folder if it is below it, so that the remote host resolves a relative
`source` by the same rule (`poseidon.base.paths`).
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from poseidon.base.paths import portable
from poseidon.caffe.proto.definition import (
    NetDefinition,
    SolverDefinition,
    parse_net,
    parse_solver,
    read_solver,
)
from poseidon.caffe.proto.text import read_content
from poseidon.errors import DefinitionError

_NET_FILES = ("net", "train_net")


def pack_solver(path: Path, settings: Sequence[str] = ()) -> str:
    """Return a solver file and the net files that it names as one text.

    Args:
        path: the solver file.
        settings: overrides for fields of the solver, which can name other nets. They are not part
            of the text.

    Raises:
        DefinitionError: one of them cannot be read.
    """
    solver = read_solver(path).with_settings(settings)
    named = [getattr(solver.param, name) for name in _NET_FILES if solver.param.HasField(name)]
    nets = {name: _packed(solver.resolve(name)) for name in [*named, *solver.param.test_net]}
    return json.dumps({**_packed(path), "nets": nets})


def unpack_solver(text: str) -> SolverDefinition:
    """Return the solver in a text that `pack_solver` returned.

    Raises:
        DefinitionError: the text is damaged, or a definition is wrong.
    """
    try:
        fields = json.loads(text)
        nets = {name: _net(net) for name, net in fields["nets"].items()}
        source, folder, content = _unpacked(fields)
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise DefinitionError("the definitions that the launcher sent are damaged") from error
    return parse_solver(content, source=source, folder=folder, nets=nets)


def _packed(path: Path) -> dict[str, str]:
    content = base64.b64encode(read_content(path)).decode()
    return {"source": str(path), "folder": portable(path.absolute().parent), "content": content}


def _unpacked(fields: Mapping[str, Any]) -> tuple[str, Path, bytes]:
    content = base64.b64decode(fields["content"], validate=True)
    return str(fields["source"]), Path(fields["folder"]).absolute(), content


def _net(fields: Mapping[str, Any]) -> NetDefinition:
    source, folder, content = _unpacked(fields)
    return parse_net(content, source=source, folder=folder)
