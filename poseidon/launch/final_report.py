"""What a job prints at its end: its scores, its model, and the commands to test it, resume it and plot it.

Law: pure; arguments and paths in, lines out.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from poseidon.proto.caffe_pb2 import NetState
from poseidon.proto.definition import SolverDefinition

OF_ONE_RUN = frozenset({"snapshot", "weights", "output", "job", "background", "net_outputs"})
"""Flags that a resumed job does not take over."""


def without_flags(argv: Sequence[str], names: Collection[str], *, bare: Collection[str] = ()) -> list[str]:
    """Return the arguments of a command without some flags and their values.

    Args:
        argv: as given: `--flag=value`, `-flag value`, ...
        names: flags to leave out, without dashes.
        bare: those that take no value.
    """
    kept = []
    rest = iter(argv)
    for argument in rest:
        name, equals, _ = argument.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if not argument.startswith("-") or name not in names:
            kept.append(argument)
        elif not equals and name not in bare:
            next(rest, None)
    return kept


def resume_command(argv: Sequence[str], state: Path) -> str:
    """Return the command that resumes a job from a snapshot.

    Args:
        argv: of the command that has run, `train` first.
        state: the solver state.
    """
    kept = without_flags(argv, OF_ONE_RUN, bare=["background"])
    return shlex.join(["poseidon", *kept, f"--snapshot={short_path(state)}"])


def test_commands(solver: SolverDefinition, model: Path) -> list[str]:
    """Return a command for each test net that scores a model; none for nets inside the solver's own file."""
    commands = []
    for test in solver.test_nets():
        if not Path(test.definition.source).is_file():
            continue
        net = short_path(Path(test.definition.source))
        argv = ["poseidon", "test", "-model", net, "-weights", short_path(model)]
        commands.append(shlex.join([*argv, "-iterations", str(test.iterations), *_state_flags(test.state)]))
    return list(dict.fromkeys(commands))


test_commands.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test


def model_of(state: Path) -> Path:
    """Return the model that was written with a solver state."""
    return state.with_name(state.name.replace(".solverstate", ".caffemodel"))


def short_path(path: Path) -> str:
    """Return a path as a user types it: relative, if it is below the working folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def aligned(entries: Sequence[tuple[str, str]]) -> list[str]:
    """Return entries as lines, their texts in one column.

    >>> aligned([("model", "a.caffemodel"), ("resume", "poseidon train")])
    ['  model:   a.caffemodel', '  resume:  poseidon train']
    """
    width = max((len(name) for name, _ in entries), default=0) + 1
    return [f"  {name + ':':<{width}}  {text}" for name, text in entries]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 worker, 2 workers."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _state_flags(state: NetState) -> list[str]:
    level = ["-level", str(state.level)] if state.level else []
    return [*level, *(["-stage", ",".join(state.stage)] if state.stage else [])]
