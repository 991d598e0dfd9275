"""What a job says at its end: what it reached, where its model is, and how to test it, go on from it and plot it.

Law: pure; flags and paths in, lines out.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from poseidon.proto.caffe_pb2 import NetState
from poseidon.proto.definition import SolverDefinition

OF_ONE_RUN = frozenset({"snapshot", "weights", "output", "job", "background", "net_outputs"})
"""Flags that a job which goes on from another one does not inherit."""


def without_flags(words: Sequence[str], names: Collection[str], *, bare: Collection[str] = ()) -> list[str]:
    """A command's words without some flags and their values.

    Args:
        words: as given: `--flag=value`, `-flag value`, ...
        names: flags to leave out, without dashes.
        bare: those that take no value.
    """
    kept = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if not word.startswith("-") or name not in names:
            kept.append(word)
        elif not equals and name not in bare:
            next(rest, None)
    return kept


def resume_command(words: Sequence[str], state: Path) -> str:
    """The command that goes on from a snapshot.

    Args:
        words: of the command that has run, `train` first.
        state: the solver state.
    """
    kept = without_flags(words, OF_ONE_RUN, bare=["background"])
    return shlex.join(["poseidon", *kept, f"--snapshot={near(state)}"])


def test_commands(solver: SolverDefinition, model: Path) -> list[str]:
    """A command for each test net that scores a model; none for nets that stand in the solver itself."""
    commands = []
    for test in solver.test_nets():
        if not Path(test.definition.source).is_file():
            continue
        words = ["poseidon", "test", "-model", near(Path(test.definition.source)), "-weights", near(model)]
        commands.append(shlex.join([*words, "-iterations", str(test.iterations), *_state_flags(test.state)]))
    return list(dict.fromkeys(commands))


test_commands.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test


def model_of(state: Path) -> Path:
    """The model that was written with a solver state."""
    return state.with_name(state.name.replace(".solverstate", ".caffemodel"))


def near(path: Path) -> str:
    """A path as it is typed: from the working folder where it lies below that."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def listed(entries: Sequence[tuple[str, str]]) -> list[str]:
    """Entries as lines, one below the other.

    >>> listed([("model", "a.caffemodel"), ("go on", "poseidon train")])
    ['  model:  a.caffemodel', '  go on:  poseidon train']
    """
    width = max((len(name) for name, _ in entries), default=0) + 1
    return [f"  {name + ':':<{width}}  {words}" for name, words in entries]


def _state_flags(state: NetState) -> list[str]:
    level = ["-level", str(state.level)] if state.level else []
    return [*level, *(["-stage", ",".join(state.stage)] if state.stage else [])]
