"""Words of error messages: numbers with their nouns, and names that nobody knows with the nearest legal one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Longer lists hide the message; a reader of eight names still finds his own.
LISTED_AT_MOST = 8


def counted(count: int, noun: str) -> str:
    """A number with its noun: `1 top`, `2 tops`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def once_or(count: int) -> str:
    """How often something that may be common to `count` things may be given: `once or 3 times`."""
    return "once" if count == 1 else f"once or {count} times"


def unknown(kind: str, name: str, choices: Iterable[str]) -> str:
    """A clause such as `unknown layer type 'Convolutoin'; did you mean 'Convolution'?`."""
    names = sorted(set(choices))
    # Names that differ in case only must be found first: difflib counts case as a difference.
    same = [choice for choice in names if choice.lower() == name.lower()]
    near = same or difflib.get_close_matches(name, names, n=1)
    text = f"unknown {kind} '{name}'"
    if near:
        return f"{text}; did you mean '{near[0]}'?"
    if names and len(names) <= LISTED_AT_MOST:
        return f"{text}; known: {', '.join(names)}"
    return text
