"""The readers of flags: each returns the value of a text, and raises argparse.ArgumentTypeError
for a text that it does not take.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TypeVar

from poseidon.errors import nearest

Choice = TypeVar("Choice", bound=Enum)
T = TypeVar("T")

TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def one_of(
    choices: Sequence[str], instead: Mapping[str, str] | None = None
) -> Callable[[str], str]:
    """Return the reader of a flag with these values, in upper or lower case.

    Args:
        instead: the flags that mean another word, which users may expect among the values.
    """

    def read(text: str) -> str:
        if meant := (instead or {}).get(text.lower()):
            raise argparse.ArgumentTypeError(
                f"expected one of {', '.join(choices)}, found '{text}', which is {meant}"
            )
        found = {choice.lower(): choice for choice in choices}.get(text.lower())
        if found is None:
            near = nearest(text, choices)
            hint = f"; did you mean {near}?" if near else ""
            raise argparse.ArgumentTypeError(
                f"expected one of {', '.join(choices)}, found '{text}'{hint}"
            )
        return found

    return read


def member_of(
    kind: type[Choice], instead: Mapping[str, str] | None = None
) -> Callable[[str], Choice]:
    """Return the reader of the members of an Enum, by their values; see `one_of`."""
    members = {str(member.value): member for member in kind}
    read = one_of(tuple(members), instead)
    return lambda text: members[read(text)]


def input_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Return the name and the shape of an input.

    >>> input_shape("data:1,3,227,227")
    ('data', (1, 3, 227, 227))
    """
    name, _, extents = text.rpartition(":")
    numbers = extents.split(",")
    if not name or not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise argparse.ArgumentTypeError(
            f"expected NAME:N,C,H,W, for example data:1,3,227,227, found '{text}'"
        )
    return name, tuple(int(number) for number in numbers)


def renamed(text: str) -> tuple[str, str]:
    """Return both names of a tensor.

    >>> renamed("fc8.weight=fc.weight")
    ('fc8.weight', 'fc.weight')
    """
    ours, _, theirs = text.partition("=")
    if not (ours and theirs):
        raise argparse.ArgumentTypeError(f"expected OURS=THEIRS, found '{text}'")
    return ours, theirs


def whole(text: str) -> int:
    """Read a whole number."""
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"expected a whole number, found '{text}'")
    return int(text)


def count(text: str) -> int:
    """Read a whole number, 0 or more."""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"expected a whole number, 0 or more, found '{text}'")
    return int(text)


def natural(text: str) -> int:
    """Read a whole number, 1 or more."""
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more, found '{text}'")
    return int(text)


def extents(text: str) -> tuple[int, int]:
    """Return height and width; one number stands for both.

    >>> extents("256,320"), extents("256")
    ((256, 320), (256, 256))
    """
    numbers = [natural(part) for part in text.split(",")]
    if len(numbers) > 2:
        raise argparse.ArgumentTypeError(f"expected height and width, H,W, found '{text}'")
    return numbers[0], numbers[-1]


def mean(text: str) -> Path | tuple[float, ...]:
    """Return the values of a mean, or the path of its file.

    >>> mean("104,117,123")
    (104.0, 117.0, 123.0)
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        return Path(text)


def number(text: str) -> float:
    """Read a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, found '{text}'") from None


def positive(text: str) -> float:
    """Read a finite number above 0."""
    if not 0 < number(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, found '{text}'")
    return float(text)


def port(text: str) -> int:
    """Read a TCP port."""
    if not (re.fullmatch(r"[0-9]{1,5}", text) and 0 < int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"expected a port, 1 to 65535, found '{text}'")
    return int(text)


def truth(text: str) -> bool:
    """Read true or false, as gflags spells them."""
    if text.lower() not in TRUTH:
        raise argparse.ArgumentTypeError(f"expected true or false, found '{text}'")
    return TRUTH[text.lower()]


def devices(text: str) -> str:
    """Read device numbers; a Python list, [0, 1], is taken as well."""
    return re.sub(r"[\[\]()\s]", "", text)


def path(text: str) -> Path | None:
    """Read a path; None if it is empty."""
    return Path(text) if text else None


def stated(read: Callable[[str], T]) -> Callable[[str], T]:
    """Return a function that reads a value and refuses an empty one, such as "$JOB" of a variable
    that is not set: the flag would have no effect.
    """

    def read_stated(text: str) -> T:
        if not text.strip(" ,"):
            raise argparse.ArgumentTypeError("the value is empty; is a variable not set?")
        return read(text)

    return read_stated


def parts(text: str) -> tuple[str, ...]:
    """Read names that commas separate."""
    return tuple(name for part in text.split(",") if (name := part.strip()))


def paths(text: str) -> tuple[Path, ...]:
    """Read paths that commas separate."""
    return tuple(map(Path, parts(text)))
