"""The shapes that the inputs of an operator must have, in one line such as `"N C *S, C, C"`.

Commas divide the inputs, spaces the dimensions of one:

* a letter is a size, the same wherever the letter stands; `4D` is four times D, a number itself;
* `_` is any size;
* `*S` is any number of dimensions, the same wherever it stands; `*` is any number of dimensions;
* `one` is a single value in a tensor of any shape;
* `?` is any shape;
* `...` at the end: further inputs are like the first ones, in their order.

With `order="NHWC"` the second dimension of `N C *S` is the last. Inputs other than tensors are not
looked at; an empty blob does not fit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from poseidon.errors import counted

Shape = tuple[int, ...]
Sizes = dict[str, Shape]
"""What a letter and a star stand for: one size and several."""

_DIMENSION = re.compile(r"(\d*)([A-Z]?)")
_INPUT = re.compile(r"\?|one|((\d*[A-Z]|\d+|_|\*[A-Z]?)( |$))+")


@dataclass(frozen=True, slots=True)
class InputShapes:
    """A parsed line.

    Attributes:
        inputs: the dimensions of each input.
        repeated: whether further inputs are like the first ones.
    """

    inputs: tuple[tuple[str, ...], ...]
    repeated: bool

    def channels_last(self) -> InputShapes:
        """Return the shapes of the order NHWC."""
        turned = tuple(
            (one[0], one[2], one[1]) if len(one) == 3 and one[2].startswith("*") else one
            for one in self.inputs
        )
        return InputShapes(turned, self.repeated)

    def guard(self, function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
        """Return a function that checks its inputs, then calls another.

        It looks again only when a shape has changed, since a check takes longer than a small
        operator. A single value reaches the function with one dimension at most, so that a result
        has no more dimensions than the others.

        Args:
            function: what is called.
            names: the names of its inputs, for the error.
        """
        accepted: list[Any] = []
        nested: list[int] = []  # single values of several dimensions

        def call(*inputs: Any) -> Any:
            nonlocal accepted, nested
            given = [getattr(value, "shape", None) for value in inputs]
            if given != accepted:
                for name, value in zip(names, inputs, strict=True):
                    if value is None:
                        raise ValueError(f"{name} is empty: no operator has given it a value")
                self.check(given, names)
                accepted = given
                single = [index for index, shape in enumerate(given) if self._of(index) == ("one",)]
                nested = [index for index in single if len(given[index] or ()) > 1]
            if nested:
                inputs = tuple(x.reshape(1) if i in nested else x for i, x in enumerate(inputs))
            return function(*inputs)

        return call

    def check(self, shapes: Sequence[Sequence[int] | None], names: Sequence[str]) -> None:
        """Raise ValueError for the first input whose shape does not fit; None is not a tensor."""
        sizes: Sizes = {}
        for index, (shape, name) in enumerate(zip(shapes, names, strict=True)):
            pattern = self._of(index)
            if shape is not None and not _fits(pattern, tuple(shape), sizes):
                raise ValueError(
                    f"{name} has the shape {tuple(shape)}, expected {_expected(pattern, sizes)}"
                )

    def _of(self, index: int) -> tuple[str, ...]:
        if self.repeated:
            return self.inputs[index % len(self.inputs)]
        return self.inputs[index] if index < len(self.inputs) else ("?",)


def axis_of(axis: int, dimensions: int) -> int:
    """Return an axis counted from the first; a negative one counts from the last.

    Raises:
        ValueError: there is no such axis.
    """
    if not -dimensions <= axis < dimensions:
        raise ValueError(f"the axis is {axis}, expected {-dimensions} to {dimensions - 1}")
    return axis % dimensions


def check_count(name: str, value: Any, expected: int) -> None:
    """Raise ValueError for an input that has not so many values, in whatever shape."""
    count = math.prod(value.shape)
    if count != expected:
        raise ValueError(f"{name} has {counted(count, 'value')}, expected {expected}")


def check_tensor(name: str, value: Any, shape: Shape) -> None:
    """Raise ValueError for an input that has not a shape."""
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} has the shape {tuple(value.shape)}, expected {shape}")


def parse_shapes(line: str) -> InputShapes:
    """Return the shapes of a line.

    Raises:
        ValueError: the line has a different form.
    """
    inputs = [part.strip() for part in line.split(",")]
    repeated = inputs[-1] == "..."
    inputs = inputs[: len(inputs) - repeated]
    for part in inputs or [line]:
        if not _INPUT.fullmatch(part) or part.count("*") > 1:
            raise ValueError(f"{line!r} has no form of shapes: {part!r}")
    return InputShapes(tuple(tuple(part.split()) for part in inputs), repeated)


def _fits(pattern: tuple[str, ...], shape: Shape, sizes: Sizes) -> bool:
    """Return whether a shape fits; remember what its letters stand for."""
    if pattern == ("?",):
        return True
    if pattern == ("one",):
        return math.prod(shape) == 1
    star = next((place for place, part in enumerate(pattern) if part.startswith("*")), None)
    if star is None:
        return len(shape) == len(pattern) and all(
            map(_is_size, pattern, shape, [sizes] * len(shape))
        )
    behind = len(pattern) - star - 1
    if len(shape) < star + behind:
        return False
    end = len(shape) - behind
    return (
        all(_is_size(part, size, sizes) for part, size in zip(pattern, shape[:star], strict=False))
        and (
            pattern[star] == "*"
            or sizes.setdefault(pattern[star], shape[star:end]) == shape[star:end]
        )
        and all(
            _is_size(part, size, sizes)
            for part, size in zip(pattern[star + 1 :], shape[end:], strict=True)
        )
    )


def _is_size(part: str, size: int, sizes: Sizes) -> bool:
    if part == "_":
        return True
    times, letter = _split(part)
    if not letter:
        return size == times
    if letter not in sizes and size % times == 0:
        sizes[letter] = (size // times,)
    return letter in sizes and size == times * sizes[letter][0]


def _expected(pattern: tuple[str, ...], sizes: Sizes) -> str:
    """Return the shape that an input should have, with the sizes that are known."""
    if pattern == ("one",):
        return "one value"
    found: list[str] = []
    for part in pattern:
        if part == "_":
            found.append("any")
        elif part.startswith("*"):
            found += map(str, sizes[part]) if part in sizes else ["..."]
        else:
            times, letter = _split(part)
            known = times * sizes[letter][0] if letter in sizes else part if letter else times
            found.append(str(known))
    return f"({', '.join(found)}{',' if len(found) == 1 else ''})"


def _split(part: str) -> tuple[int, str]:
    match = _DIMENSION.fullmatch(part)
    assert match is not None
    return int(match[1] or 1), match[2]
