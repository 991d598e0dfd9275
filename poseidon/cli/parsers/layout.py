"""How help looks: one line for each flag, at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from poseidon.flags.flag import Flag, Takes

WIDTH = 80
_COUNTED = {Takes.OPTIONAL_WORD: "[{}]", Takes.WORDS: "[{} ...]"}
"""How usage shows arguments that may be missing or several."""


def overview(title: str, groups: Mapping[str, Mapping[str, str]], example: str, more: str) -> str:
    """Return the help of `poseidon` itself: each command in a line."""
    column = 4 + max(len(name) for commands in groups.values() for name in commands)
    parts = [title, "usage: poseidon COMMAND [flags]\n       poseidon COMMAND --help"]
    parts += [example] if example else []
    for headline, commands in groups.items():
        lines = [f"  {name}".ljust(column) + line for name, line in commands.items()]
        parts.append("\n".join([f"{headline}:", *lines]))
    return "\n\n".join([*parts, *filter(None, [more])]) + "\n"


def usage(command: str, shown: Sequence[Flag]) -> str:
    """Return the line of usage of a command with these flags."""
    words = [f"usage: poseidon {command}"]
    words += [_left(flag) for flag in shown if flag.required]
    if any(not flag.takes.is_word for flag in shown):
        words.append("[flags]")
    words += [
        _COUNTED.get(flag.takes, "{}").format(_left(flag)) for flag in shown if flag.takes.is_word
    ]
    return " ".join(words)


def section(title: str, terms: str, shown: Sequence[Flag]) -> str:
    """Return a headline, the meaning of its terms, and each flag in a line."""
    return "\n".join([f"{title}:", *([wrapped(terms)] if terms else []), *_lines(shown)])


def wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)


def _left(flag: Flag) -> str:
    """Return the beginning of a flag's line in the help."""
    if flag.of:
        return f"{flag.name}={flag.metavar}"
    if flag.takes is Takes.SWITCH:
        return f"--[no]{flag.name}" if flag.default else flag.title
    if flag.takes.is_word:
        return flag.title
    return f"{flag.title}={flag.metavar}"


def _lines(flags: Sequence[Flag]) -> Iterator[str]:
    column = 4 + max(len(_left(flag)) for flag in flags)
    for flag in flags:
        first, *others = textwrap.wrap(flag.text, WIDTH - column, break_on_hyphens=False)
        yield f"  {_left(flag)}".ljust(column) + first
        yield from (" " * column + line for line in others)
