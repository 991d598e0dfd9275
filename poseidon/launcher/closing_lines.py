"""The last lines of a job: what it reached, and commands that use the result or continue.

Law: pure, except for paths, which are relative to the working folder where that is shorter. A
command does something as it is pasted.
"""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from poseidon.base import text_files
from poseidon.base.paths import own_command, short_path
from poseidon.flags.values import TRUTH

OF_ONE_RUN = frozenset({"snapshot", "weights", "output", "job", "background", "net_outputs"})
"""Flags that a resumed job does not take over."""
_SWITCHES = frozenset({"background"})
"""Those that may stand without a value."""


def without_flags(argv: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the arguments of a command without some flags and their values.

    Args:
        argv: as given: `--flag=value`, `-flag value`, ...
        names: flags to leave out, without dashes; `_SWITCHES` has the switches among them.
    """
    kept = []
    rest = deque(argv)
    while rest:
        argument = rest.popleft()
        name, equals, _ = argument.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if not argument.startswith("-") or name not in names:
            kept.append(argument)
        elif not equals and rest and (name not in _SWITCHES or rest[0].lower() in TRUTH):
            rest.popleft()
    return kept


def resume_command(argv: Sequence[str], changes: Mapping[str, str]) -> str:
    """Return the command that resumes a job.

    Args:
        argv: of the command that has run, `train` first.
        changes: values by flag, in place of earlier ones: the snapshot, a greater max_iter.
    """
    kept = without_flags(argv, {*OF_ONE_RUN, *changes})
    fields = changes.keys() - OF_ONE_RUN  # `--set snapshot=N` is a field of the solver
    kept = _without_settings(kept, fields)
    flags = [f"--{name}={value}" for name, value in changes.items()]
    return " ".join([own_command(), shlex.join([*map(_shortened, kept), *flags])])


def model_of(state: Path) -> Path:
    """Return the model that was written with a solver state."""
    return state.with_name(state.name.replace(".solverstate", ".caffemodel"))


def aligned(entries: Sequence[tuple[str, str]]) -> list[str]:
    """Return entries as lines, their texts in one column.

    >>> aligned([("model", "a.caffemodel"), ("resume", "poseidon train")])
    ['  model:   a.caffemodel', '  resume:  poseidon train']
    """
    return [f"  {line}" for line in text_files.aligned([(f"{n}:", text) for n, text in entries])]


def _without_settings(argv: Sequence[str], names: Collection[str]) -> list[str]:
    """Return arguments without `--set NAME=VALUE` for some names."""
    kept: list[str] = []
    rest = iter(argv)
    for argument in rest:
        flag, equals, setting = argument.partition("=")
        words = [argument]
        if flag.lstrip("-") == "set" and flag.startswith("-"):
            if not equals:
                setting = next(rest, "")
                words.append(setting)
            if setting.partition("=")[0] in names:
                continue
        kept += words
    return kept


def _shortened(argument: str) -> str:
    """Return `--flag=/absolute/path` or `/absolute/path` with a shorter path to the same file."""
    flag, equals, value = (
        argument.partition("=") if argument.startswith("-") else ("", "", argument)
    )
    if not Path(value).is_absolute() or not Path(value).exists():
        return argument
    return f"{flag}{equals}{short_path(Path(value))}"
