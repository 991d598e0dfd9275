"""Rules that make gradient operators: a small language for the common ones, a maker for all."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from poseidon.caffe2.proto.caffe2_pb2 import OperatorDef


@dataclass(frozen=True, slots=True)
class Sparse:
    """A sparse gradient: names of the blobs of its indices and values."""

    indices: str
    values: str


Gradient = str | Sparse | None
"""The gradient of a blob: the name of a blob, a sparse pair, or none."""


@dataclass(slots=True)
class GradientMaker:
    """Makes the gradient operators of one forward operator.

    Attributes:
        forward: the forward operator.
        given: the gradients of its outputs.
        operators: what was made so far.
        gradients: the gradient of each input so far.
    """

    forward: OperatorDef
    given: Sequence[Gradient]
    operators: list[OperatorDef] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gradients = [None] * len(self.forward.input)

    def I(self, index: int) -> str:  # noqa: E743 (the letters of the rules)
        """Return the name of an input."""
        return self.forward.input[index]

    def O(self, index: int) -> str:  # noqa: E743
        """Return the name of an output."""
        return self.forward.output[index]

    def GO(self, index: int) -> str:
        """Return the gradient of an output.

        Raises:
            ValueError: it is not given, or it is sparse.
        """
        gradient = self.given[index]
        if not isinstance(gradient, str):
            state = "missing" if gradient is None else "sparse"
            raise ValueError(f"the gradient of the output {self.forward.output[index]} is {state}")
        return gradient

    def GI(self, index: int) -> str:
        """Return the name for the gradient of an input, and note that this input has it.

        Raises:
            ValueError: the input has a sparse gradient already.
        """
        name = f"{self.forward.input[index]}_grad"
        if isinstance(self.gradients[index], Sparse):
            raise ValueError(f"the input {self.forward.input[index]} has a sparse gradient already")
        self.gradients[index] = name
        return name

    def argument(self, name: str, default: Any = None) -> Any:
        """Return the value of an argument of the forward operator."""
        for argument in self.forward.arg:
            if argument.name == name:
                fields = [descriptor.name for descriptor, _ in argument.ListFields()]
                value = getattr(argument, fields[-1]) if fields[-1] != "name" else []
                return list(value) if fields[-1] in ("floats", "ints", "strings") else value
        return default

    def dense(self, index: int, name: str) -> None:
        """Set the gradient of an input to a blob that exists already."""
        self.gradients[index] = name

    def sparse(self, index: int, indices: str, values: str) -> None:
        """Set the gradient of an input to a sparse one."""
        self.gradients[index] = Sparse(indices, values)

    def op(
        self,
        kind: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        arguments: dict[str, Any] | None = None,
        copy: bool | None = None,
    ) -> OperatorDef:
        """Add an operator.

        Args:
            kind: its type.
            inputs, outputs: names of blobs.
            arguments: arguments of its own.
            copy: whether it has the forward operator's arguments too: by default if it has none.
        """
        made = OperatorDef(type=kind, name="", input=inputs, output=outputs, is_gradient_op=True)
        for name, value in (arguments or {}).items():
            argument = made.arg.add(name=name)
            if isinstance(value, float):
                argument.f = value
            elif isinstance(value, (list, tuple)):
                argument.ints.extend(value)
            elif isinstance(value, (str, bytes)):
                argument.s = value.encode() if isinstance(value, str) else value
            else:
                argument.i = int(value)
        if copy or (copy is None and not arguments):
            made.arg.extend(self.forward.arg)
        if self.forward.HasField("device_option"):
            made.device_option.CopyFrom(self.forward.device_option)
        if self.forward.HasField("engine"):
            made.engine = self.forward.engine
        self.operators.append(made)
        return made


GradientRule = Callable[[GradientMaker], None]

_ALTERNATIVE = re.compile(r"\s*(?:(\w+):)?(.*)", re.DOTALL)
_STATEMENT = re.compile(r"(@?\w+)\(([^)]*)\)\s*->\s*([^{]*?)\s*(?:\{([^}]*)\})?$")
_SPARSE = re.compile(r"GI(\d+)\s*=\s*\(([^,]+),([^)]+)\)$")
_PASSED = re.compile(r"(GI(?:\d+|\*))\s*=\s*(\w+)$")
_NAME = re.compile(r"(_?)(GI|GO|I|O)(\d+|\*)(\?|_\w+)?$")


def parse_rule(text: str) -> GradientRule:
    """Return the rule that a text of the language in `operators.registry` stands for.

    Raises:
        ValueError: the text is not a rule.
    """
    alternatives = []
    for part in text.split("|"):
        found = _ALTERNATIVE.fullmatch(part)
        assert found is not None
        steps = [_step(step.strip()) for step in found[2].split(";") if step.strip()]
        alternatives.append((found[1], steps))

    def rule(maker: GradientMaker) -> None:
        chosen = (steps for name, steps in alternatives if not name or maker.argument(name, 0))
        for step in next(chosen, ()):
            step(maker)

    return rule


def _step(text: str) -> GradientRule:
    if match := _STATEMENT.match(text):
        kind, inputs, outputs, arguments = match.groups()
        ins, outs = _split(inputs), _split(outputs)
        parts = _split(arguments or "")
        own = {
            key: _value(value)
            for key, value in (pair.split("=") for pair in parts if pair != "...")
        }
        copy = arguments is None or "..." in parts
        return lambda maker: _add(maker, kind, ins, outs, own, copy)
    if match := _SPARSE.match(text):
        index, indices, values = int(match[1]), match[2].strip(), match[3].strip()
        return lambda maker: maker.sparse(index, *_names(maker, indices), *_names(maker, values))
    if match := _PASSED.match(text):
        passed_to, passed = match.groups()
        return lambda maker: _pass(maker, passed_to, passed)
    raise ValueError(f"{text!r} is not a gradient rule")


def _pass(maker: GradientMaker, passed_to: str, passed: str) -> None:
    places = range(len(maker.forward.input)) if passed_to == "GI*" else [int(passed_to[2:])]
    for place in places:
        maker.dense(place, *_names(maker, passed))


def _add(
    maker: GradientMaker,
    kind: str,
    inputs: list[str],
    outputs: list[str],
    own: dict[str, Any],
    copy: bool,
) -> None:
    maker.op(
        kind.replace("@", maker.forward.type),
        [name for text in inputs for name in _names(maker, text)],
        [name for text in outputs for name in _names(maker, text)],
        own,
        copy,
    )


def _names(maker: GradientMaker, text: str) -> list[str]:
    match = _NAME.match(text)
    if match is None:
        raise ValueError(f"{text!r} names no blob of a gradient rule")
    prefix, kind, number, suffix = match.groups()
    count = len(maker.forward.output if "O" in kind else maker.forward.input)
    if number == "*":
        indices = [i for i in range(count) if kind != "GO" or maker.given[i] is not None]
    else:
        indices = [int(number)] if suffix != "?" or int(number) < count else []
    names = [getattr(maker, kind)(index) for index in indices]
    return [prefix + name + (suffix or "").removeprefix("?") for name in names]


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _value(text: str) -> Any:
    return float(text) if "." in text else int(text)
