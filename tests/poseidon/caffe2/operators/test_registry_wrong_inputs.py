"""Every operator answers inputs of the wrong rank, type or number with one sentence, without
torch's text.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.operators.registry import ANY, REQUIRED, find, registered
from poseidon.caffe2.runtime.errors import is_own
from tests.support.caffe2_operators import call

SHAPES: tuple[tuple[int, ...], ...] = ((), (3,), (2, 3), (2, 3, 4), (1, 2, 4, 4))
KINDS = ("float32", "int64", "bool", "string")
VALUES: dict[Any, Any] = {int: 1, float: 0.5, bool: 1, str: "a", bytes: b"a"}
CLASS = re.compile(r"\b\w+(Error|Exception|Iteration)\b: ")
NOT_CALLED = {
    # They wait for other processes, or connect to them.
    "CreateCommonWorld",
    "FileStoreHandlerCreate",
    "RedisStoreHandlerCreate",
    "TCPStoreHandlerCreate",
    # An argument of theirs is a message.
    "Cast",
    "FeedBlob",
    "IsMemberOf",
}


def _value(kind: Any) -> Any:
    """Return a value for an argument of a type."""
    return [VALUES[typing.get_args(kind)[0]]] if typing.get_origin(kind) is list else VALUES[kind]


def _array(shape: tuple[int, ...], kind: str) -> Any:
    if kind == "string":
        return np.full(shape, b"x", object)
    return np.array(np.arange(np.prod(shape)).reshape(shape) % 3, kind)


def _inputs(count: int) -> Iterator[list[Any]]:
    """Yield inputs of one rank and type, then of different ones."""
    for shape in SHAPES:
        yield [_array(shape, "float32")] * count
    for kind in KINDS:
        yield [_array((2, 3), kind)] * count
    for start in range(5):
        first, others = ("float32", "int64") if start % 2 else ("int64", "float32")
        shapes = [SHAPES[(start + 2 * place) % 5] for place in range(count)]
        yield [_array(shape, others if place else first) for place, shape in enumerate(shapes)]


@pytest.mark.filterwarnings("ignore")  # of torch and NumPy, on divisions by 0
def test_wrong_inputs_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some operators write files
    for name in registered():
        if not find(name).blobs and name not in NOT_CALLED:
            assert_one_sentence(name)


def assert_one_sentence(name: str) -> None:
    known = find(name)
    arguments = {
        key: _value(parameter.type)
        for key, parameter in known.parameters.items()
        if parameter.default is REQUIRED
    }
    least, most = known.inputs
    outputs = [f"y{place}" for place in range(max(known.outputs[0], min(known.outputs[1], 1)))]
    for count in sorted({least, min(most, least + 1)}):
        for inputs in _inputs(count):
            workspace.ResetWorkspace()
            names = [f"x{place}" for place in range(count)]
            for blob, value in zip(names, inputs, strict=True):
                workspace.FeedBlob(blob, value)
            try:
                call(name, names, outputs, **arguments)
            except RuntimeError as error:
                line = str(error).splitlines()[0]
                assert line.startswith(f"[enforce fail at {name}] "), line
                assert not CLASS.search(line), line
                cause = error.__cause__
                if cause is not None and not is_own(cause) and len(str(cause)) > 1:
                    assert str(cause).splitlines()[0] not in line
    if most < ANY:
        too_many = core.CreateOperator(name, ["x"] * (most + 1), outputs, **arguments)
        workspace.FeedBlob("x", np.zeros(1, "float32"))
        with pytest.raises(RuntimeError, match=f"{most + 1} inputs are given"):
            workspace.RunOperatorOnce(too_many)
