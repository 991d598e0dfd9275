"""The contract of an operator: a small function over tensors, with Caffe2's gradient.

    @operator("LeakyRelu", gradient="LeakyReluGradient(O0, GO0) -> GI0")
    def leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
        return functional.leaky_relu(x, alpha)

    @operator("LeakyReluGradient")
    def leaky_relu_gradient(y: Tensor, dy: Tensor, *, alpha: float = 0.01) -> Tensor:
        return torch.where(y > 0, dy, alpha * dy)

To add one: write the function in a module of a sub-package, and a test beside the others.

**The signature is the schema.**
* Positional parameters are the inputs, in order. A default (`None`) makes an input optional; `*xs`
  takes any number.
* Keyword-only parameters are the operator's arguments, converted to the annotated type: `int`,
  `float`, `bool`, `str`, `bytes`, lists of these, `tuple[int, ...]`, `NetDef`, `TensorProto`,
  `Argument` (the message itself), each or `| None`. One without a default is
  required. A trailing underscore is dropped (`min_` is `min`). Arguments that the function does not
  name are ignored, as Caffe2 ignores them (`order`, `use_cudnn`, ...): name what matters.
* A keyword-only parameter annotated with a dataclass stands for an argument for each of its fields:
  so several operators share arguments, and the function that computes with them.
* A keyword-only parameter annotated `Context` gets the `Context`: device, number of outputs, random
  generator, definition, workspace.
* The return annotation gives the outputs: `Tensor` is one, `tuple[Tensor, Tensor]` up to two,
  `tuple[Tensor, ...]` or a list any number, `None` none. An operator may be given fewer output
  names than it returns values. `outputs=(1, 3)` declares the legal numbers where the annotation
  does not.
* With `blobs=True` the function gets two sequences of `Blob`, inputs and outputs, reads and sets
  their `value` itself and returns nothing: for operators that work on the blobs themselves (Python,
  readers, inner nets).
* A class takes the place of the function where an operator keeps state between runs: `__init__` has
  the arguments (and the `Context`), `__call__` the inputs and the return annotation.

**Values.** A blob holds a `torch.Tensor` (on its device), a numpy array of `bytes` objects
(Caffe2's tensor of strings), `bytes` (a plain string) or any other object (readers, stores,
mutexes). Use torch functions that work on each device and, where the shape of the result depends on
shapes only, on meta tensors: shape inference runs the function on these.

`start=begin` is for operators that wait for other processes: `begin(buckets, owned, *inputs,
**arguments)` starts the operator and returns a `Pending` (`poseidon.caffe2.shards.buckets`). A net
runs other operators until it waits for the result. `owned` tells that nothing else refers to the
memory of the first tensor, which is the first output too: the operator may overwrite it.

`shapes="N C *S, C"` tells which shapes the inputs must have
(`poseidon.caffe2.operators.input_shapes` has the form). Others are refused before the function is
called: give it where torch would broadcast, or read over the end, and Caffe2 refused. `expected="N
C *S, C"` tells the same where torch refuses other shapes itself. It is looked at after a failure
only, to name the input that does not fit, and takes no time otherwise. It must allow all that the
function takes.

`plain=torch.relu` names torch's own function where that does the same as the operator without
arguments: it is called directly, which saves a tenth of the time of a small operator. It must not
return its input itself.

**In place.** An output may have the name of an input; the blob is then bound to the new
tensor. A function must not write to its inputs, except where Caffe2 demands the same blob (updates
of parameters, counters, Scatter...): there it writes to the input and returns it. An output may be
a view of an input.

**Gradients** are rules that make the gradient operators. `I1` is the second input, `O0` the first
output, `GO0` the gradient of that output, `GI1` the gradient of the input 1 (its name is
`<input>_grad`); `I*`, `O*`, `GO*`, `GI*` are all of them, `I1?` is left out where the operator has
no input 1, `_GI0_dims` is `_<gradient>_dims`:

    "FCGradient(I0, I1, GO0) -> GI1, GI2, GI0"          with the forward operator's arguments
    "Scale(GO0) -> GI0 {scale=2.0}; Mul(GI0, I0) -> GI0"    two operators; the first has an argument of its own only
    "Scale(GO0) -> GI0 {scale=2.0, ...}"                own arguments, then the forward operator's
    "MergeDim(GO0) -> GI0 {}"                           no arguments
    "@Gradient(I0, GO0) -> GI0"                         `@` is the type of the forward operator
    "GI0 = GO0"                                         no operator: the gradient passes through
    "GI0 = (I1, GO0)"                                   a sparse gradient: indices and values
    "is_test: F(GO0) -> GI0 | F(GO0, O1) -> GI0"        by an argument: the first where it is not 0
    NO_GRADIENT                                         differentiable, and no gradient goes to the inputs

or a function `(GradientMaker) -> None` that calls `maker.op(...)`, `maker.dense(...)`,
`maker.sparse(...)`. Without a rule the operator is not differentiable: asking for its gradient is
an error. The rule must give exactly what Caffe2 gave (types, order of inputs and outputs,
arguments): recorded nets are compared.

Write a gradient operator as a formula of what the rule gives it. `torch.func.vjp` of the forward
function gives the same numbers, but it runs the forward function again: it takes 2 to 20 times as
long.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import sys
import threading
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch

from poseidon.caffe2.operators.gradients import GradientRule, parse_rule
from poseidon.caffe2.operators.input_shapes import InputShapes, parse_shapes
from poseidon.caffe2.proto.caffe2_pb2 import Argument, NetDef, OperatorDef, TensorProto

NO_GRADIENT = ""
"""The rule of an operator through which no gradient flows."""
ANY = 1 << 30
"""No upper limit of the number of inputs or outputs."""
REQUIRED = object()


@dataclass(slots=True)
class Context:
    """What an operator is beside its inputs and arguments.

    Attributes:
        definition: the operator's definition.
        device: the device of its outputs; the meta device in shape inference.
        workspace: the workspace that it runs in, a `runtime.Workspace`.
        generator: random numbers of its own if the device option gives a seed, else None.
    """

    definition: OperatorDef
    device: torch.device
    workspace: Any = None
    generator: torch.Generator | None = None

    @property
    def outputs(self) -> int:
        """The number of outputs that the definition names."""
        return len(self.definition.output)


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument of an operator.

    Attributes:
        type: its type.
        default: its default, `REQUIRED` where it has none.
        keyword: the Python parameter that gets it.
        field: its field in the parameter's dataclass, None where the parameter is its value.
    """

    type: Any
    default: Any
    keyword: str
    field: str | None = None

    def convert(self, argument: Argument) -> Any:
        """Return the value of an argument as the parameter's type."""
        return _convert(argument, self.type)


@dataclass(frozen=True, slots=True)
class Operator:
    """A registered operator: its function and its schema.

    Attributes:
        name: its type in a definition.
        make: the function, or the class whose instances are called.
        stateful: whether `make` is a class.
        inputs, outputs: the least and the largest number.
        single: whether it returns one value, not a sequence of values.
        parameters: arguments by name.
        groups: the dataclass of each Python parameter that has one.
        context: the parameter that gets the `Context`, None where there is none.
        gradient: the rule of its gradient, None where it is not differentiable.
        blobs: whether it is called with its blobs, not with their values.
        plain: what is called where no argument is given, None for the function itself.
        start: the function that starts it without waiting for its result; None for most operators.
        shapes: those that its inputs must have, None where the function finds out itself.
        expected: those that name the wrong input after a failure.
    """

    name: str
    make: Callable[..., Any]
    stateful: bool
    inputs: tuple[int, int]
    outputs: tuple[int, int]
    single: bool
    parameters: dict[str, Parameter]
    groups: dict[str, type]
    context: str | None
    gradient: GradientRule | None = field(default=None)
    blobs: bool = False
    plain: Callable[..., Any] | None = None
    start: Callable[..., Any] | None = None
    shapes: InputShapes | None = None
    expected: InputShapes | None = None

    def arguments(self, definition: OperatorDef) -> dict[str, Any]:
        """Return the keyword arguments of the function that a definition gives.

        Raises:
            ValueError: an argument is missing or has no value of the declared type.
        """
        given: dict[str, Any] = {}
        for argument in definition.arg:
            parameter = self.parameters.get(argument.name)
            if parameter is not None:
                value = parameter.convert(argument)
                if parameter.field is None:
                    given[parameter.keyword] = value
                else:
                    given.setdefault(parameter.keyword, {})[parameter.field] = value
        for name, parameter in self.parameters.items():
            if parameter.default is REQUIRED and parameter.keyword not in given:
                raise ValueError(f"{self.name}: the argument {name} is required")
        return {
            keyword: self.groups[keyword](**value) if keyword in self.groups else value
            for keyword, value in given.items()
        }

    def argument(self, definition: OperatorDef, name: str) -> Any:
        """Return an argument that a definition gives, or its default; None for a required one."""
        parameter = self.parameters[name]
        given = [argument for argument in definition.arg if argument.name == name]
        if given:
            return parameter.convert(given[-1])
        return None if parameter.default is REQUIRED else parameter.default

    def check(self, definition: OperatorDef) -> None:
        """Raise ValueError for a number of inputs or outputs that the operator does not have."""
        for what, limits, count in (
            ("inputs", self.inputs, len(definition.input)),
            ("outputs", self.outputs, len(definition.output)),
        ):
            if not limits[0] <= count <= limits[1]:
                legal = str(limits[0]) if limits[0] == limits[1] else f"{limits[0]} to {limits[1]}"
                legal = f"{limits[0]} or more" if limits[1] == ANY else legal
                raise ValueError(f"{self.name}: {count} {what} are given, {legal} expected")


_operators: dict[str, Operator] = {}
_families: set[str] = set()  # the modules of this package, once they were imported
_import_of_families = threading.RLock()
registered_twice: list[str] = []
"""Names that two modules register: a mistake."""


def operator(
    *names: str,
    gradient: str | GradientRule | None = None,
    inputs: tuple[int, int] | None = None,
    outputs: tuple[int, int] | None = None,
    blobs: bool = False,
    plain: Callable[..., Any] | None = None,
    start: Callable[..., Any] | None = None,
    shapes: str | None = None,
    expected: str | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Register a function, or a class, as the operator of names; see the module's docstring.

    Args:
        names: one name, or several of the same operator (`Conv`, `Conv2D`).
        gradient: a rule, or None where the operator is not differentiable.
        inputs, outputs: the least and the largest number, where the signature does not give them.
        blobs: whether it is called with any number of blobs, not with their values.
        plain: torch's function that does the same without arguments: one call less.
        start: the function that starts it without waiting for its result.
        shapes: those that its inputs must have.
        expected: those that name the wrong input after a failure; by default `shapes`.
    """
    parsed = None if shapes is None else parse_shapes(shapes)
    explained = parsed if expected is None else parse_shapes(expected)
    if blobs:
        inputs, outputs = inputs or (0, ANY), outputs or (0, ANY)

    def register(make: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            if name in _operators and _operators[name].make.__module__ != make.__module__:
                registered_twice.append(name)
            found = _describe(name, make, gradient, inputs, outputs)
            _operators[name] = replace(
                found, blobs=blobs, plain=plain, start=start, shapes=parsed, expected=explained
            )
        return make

    return register


def _all_operators() -> dict[str, Operator]:
    """Return every operator by name; the first call imports the families.

    They are imported here because some of them import the runtime, which imports this module.
    """
    with _import_of_families:
        if not _families:
            package = __name__.rpartition(".")[0]
            modules = pkgutil.walk_packages(sys.modules[package].__path__, f"{package}.")
            _families.update(module.name for module in modules)
            for name in sorted(_families):
                importlib.import_module(name)
    return _operators


def registered() -> list[str]:
    """Return the names of all operators."""
    return sorted(_all_operators())


def is_registered(name: str) -> bool:
    return name in _all_operators()


def nearest(name: str, count: int = 3) -> list[str]:
    """Return the names of operators that are most like a name."""
    folded = {known.lower(): known for known in _all_operators()}
    found = difflib.get_close_matches(name.lower(), folded, count, 0.5)
    return [folded[key] for key in found]


def find(name: str) -> Operator:
    """Return the operator of a name.

    Raises:
        KeyError: there is none; the message names the nearest.
    """
    known = _all_operators().get(name)
    if known is None:
        near = nearest(name)
        hint = f"; the nearest are {', '.join(near)}" if near else ""
        raise KeyError(f"there is no operator {name}{hint}")
    return known


def _describe(
    name: str,
    make: Callable[..., Any],
    gradient: str | GradientRule | None,
    inputs: tuple[int, int] | None,
    outputs: tuple[int, int] | None,
) -> Operator:
    stateful = isinstance(make, type)
    call = vars(make).get("__call__", make.__call__) if isinstance(make, type) else make
    arguments = inspect.signature(make, eval_str=True).parameters.values()
    signature = inspect.signature(call, eval_str=True)
    positional = [
        p
        for p in signature.parameters.values()
        if p.kind is not p.KEYWORD_ONLY and p.name != "self"
    ]
    several = any(p.kind is p.VAR_POSITIONAL for p in positional)
    required = sum(p.default is p.empty for p in positional if p.kind is not p.VAR_POSITIONAL)
    keyword_only = [p for p in arguments if p.kind is p.KEYWORD_ONLY]
    contexts = [p.name for p in keyword_only if p.annotation is Context]
    parameters: dict[str, Parameter] = {}
    groups: dict[str, type] = {}
    for p in keyword_only:
        if p.annotation is Context:
            continue
        if isinstance(p.annotation, type) and is_dataclass(p.annotation):
            groups[p.name] = p.annotation
            for each in inspect.signature(p.annotation, eval_str=True).parameters.values():
                parameters[each.name.removesuffix("_")] = Parameter(
                    _plain(each.annotation), each.default, p.name, each.name
                )
        else:
            default = REQUIRED if p.default is p.empty else p.default
            parameters[p.name.removesuffix("_")] = Parameter(_plain(p.annotation), default, p.name)
    returned = signature.return_annotation
    return Operator(
        name=name,
        make=make,
        stateful=stateful,
        inputs=inputs or (required, ANY if several else len(positional)),
        outputs=outputs or _outputs(returned),
        single=typing.get_origin(returned) not in (tuple, list) and returned is not None,
        parameters=parameters,
        groups=groups,
        context=contexts[0] if contexts else None,
        gradient=parse_rule(gradient) if isinstance(gradient, str) else gradient,
    )


def _outputs(returned: Any) -> tuple[int, int]:
    if returned is None:
        return 0, 0
    origin, parts = typing.get_origin(returned), typing.get_args(returned)
    if origin is list or (origin is tuple and Ellipsis in parts):
        return 0, ANY
    return (1, len(parts)) if origin is tuple else (1, 1)


def _plain(annotation: Any) -> Any:
    """Return the type of `X | None`: X."""
    if isinstance(annotation, types.UnionType):
        return next(part for part in typing.get_args(annotation) if part is not type(None))
    return annotation


def _convert(argument: Argument, kind: Any) -> Any:
    if kind is Argument:
        return argument
    if kind is bytes:
        return argument.s
    if kind is str:
        return argument.s.decode(errors="surrogateescape")
    if kind is NetDef:
        return argument.n
    if kind is TensorProto:
        return argument.t
    several = typing.get_origin(kind)
    if several in (list, tuple):
        part = typing.get_args(kind)[0]
        if part in (str, bytes):
            return several(
                text.decode(errors="surrogateescape") if part is str else text
                for text in argument.strings
            )
        return several(map(part, argument.floats or argument.ints or _single(argument)))
    single = _single(argument)
    if not single:
        raise ValueError(f"the argument {argument.name} has no value of type {kind.__name__}")
    return kind(single[0])


def _single(argument: Argument) -> list[float]:
    if argument.HasField("f"):
        return [argument.f]
    return [argument.i] if argument.HasField("i") else []
