"""Words of error messages: numbers with their nouns, and names that nobody knows with the nearest legal one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from poseidon.errors import nearest

_ELSEWHERE = {
    **dict.fromkeys(("conv", "conv2d"), "Convolution"),
    **dict.fromkeys(("fullyconnected", "fc", "linear", "dense", "ip"), "InnerProduct"),
    **dict.fromkeys(("maxpool", "maxpooling", "avgpool", "averagepooling"), "Pooling"),
    **dict.fromkeys(("crossentropy", "crossentropyloss", "softmaxloss"), "SoftmaxWithLoss"),
    **dict.fromkeys(("mse", "mseloss", "l2loss"), "EuclideanLoss"),
    **dict.fromkeys(("bn", "batchnormalization"), "BatchNorm"),
    **dict.fromkeys(("add", "sum"), "Eltwise"),
}
"""What other frameworks call a type."""
# Longer lists hide the message; a reader of eight names still finds his own.
LISTED_AT_MOST = 8


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: `1 top`, `2 tops`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def once_or(count: int) -> str:
    """How often something that may be common to `count` things may be given: `once or 3 times`."""
    return "once" if count == 1 else f"once or {count} times"


def unknown_type(name: str, types: Iterable[str]) -> str:
    """Return a clause for a layer type that nobody registered, with all near names, and what to do about a type of one's own."""
    names = sorted(set(types))
    lowered = {choice.lower(): choice for choice in names}
    near = [lowered[match] for match in difflib.get_close_matches(name.lower(), lowered, n=3)]
    first = _ELSEWHERE.get(name.lower()) or lowered.get(name.lower()) or nearest(name, names)
    near = list(dict.fromkeys([first, *near])) if first else near
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(names)}"
    also = f"near too: {', '.join(near[1:])}; " if len(near) > 1 else ""
    return f"unknown layer type '{name}'; {hint} ({also}for a type of your own see --import)"


def unknown(kind: str, name: str, choices: Iterable[str]) -> str:
    """Return a clause such as `unknown layer type 'Convolutoin'; did you mean 'Convolution'?`."""
    names = sorted(set(choices))
    near = nearest(name, names)
    text = f"unknown {kind} '{name}'"
    if near:
        return f"{text}; did you mean '{near}'?"
    if names and len(names) <= LISTED_AT_MOST:
        return f"{text}; known: {', '.join(names)}"
    return text
