"""A solver and its nets as one text, to be read on a machine that has none of the files.

Law: what is read there is, byte for byte, what lies here. The folder of each file comes along as a name, relative to the
current folder where it lies below it, so that a relative `source` is looked for there by the rule of
`poseidon.proto.paths` as it is here.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from poseidon.errors import DefinitionError
from poseidon.proto.definition import NetDefinition, SolverDefinition, net_of, read_solver, solver_of
from poseidon.proto.text import read_content

_NET_FILES = ("net", "train_net")


def portable(path: Path) -> str:
    """A path by which another machine means what we mean: relative to the current folder where it lies below it."""
    absolute = path.absolute()
    try:
        return str(absolute.relative_to(Path.cwd()))
    except ValueError:
        return str(absolute)


def pack_solver(path: Path, settings: Sequence[str] = ()) -> str:
    """A solver's file and those of the nets that it names, as one text.

    Args:
        path: of the solver.
        settings: fields that are set in place of the file's; they may name other nets, and do not become part of the text.

    Raises:
        DefinitionError: one of them cannot be read.
    """
    solver = read_solver(path).with_settings(settings)
    named = [getattr(solver.param, name) for name in _NET_FILES if solver.param.HasField(name)]
    nets = {name: _packed(solver.resolve(name)) for name in [*named, *solver.param.test_net]}
    return json.dumps({**_packed(path), "nets": nets})


def unpack_solver(text: str) -> SolverDefinition:
    """The solver in a text of `pack_solver`.

    Raises:
        DefinitionError: it is none, or a definition is wrong.
    """
    try:
        fields = json.loads(text)
        nets = {name: _net(net) for name, net in fields["nets"].items()}
        source, folder, content = _unpacked(fields)
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise DefinitionError("the definitions that came with the job are damaged") from error
    return solver_of(content, source=source, folder=folder, nets=nets)


def _packed(path: Path) -> dict[str, str]:
    content = base64.b64encode(read_content(path)).decode()
    return {"source": str(path), "folder": portable(path.absolute().parent), "content": content}


def _unpacked(fields: Mapping[str, Any]) -> tuple[str, Path, bytes]:
    content = base64.b64decode(fields["content"], validate=True)
    return str(fields["source"]), Path(fields["folder"]).absolute(), content


def _net(fields: Mapping[str, Any]) -> NetDefinition:
    source, folder, content = _unpacked(fields)
    return net_of(content, source=source, folder=folder)
