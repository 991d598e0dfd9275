"""The backward pass of a list of operators: which version's gradient is whose, and their sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from poseidon.caffe2.core.blobs import BlobReference, CreateOperator, GradientSlice
from poseidon.caffe2.core.gradient_sums import (
    KEEP_ONLY_SUM_TAG,
    SUM_TAG,
    GradientSource,
    make_sum,
    must_sum,
)
from poseidon.caffe2.operators import registry
from poseidon.caffe2.operators.gradients import GradientMaker, Sparse
from poseidon.caffe2.proto.caffe2_pb2 import DeviceOption, OperatorDef


class OpSSA(NamedTuple):
    """An operator, and the version of each blob that it reads and of each that it makes."""

    op: OperatorDef
    in_versions: dict[str, int]
    out_versions: dict[str, int]


def GetIndexFromGradientList(g_list: Sequence[Any], name: str) -> int | None:
    """Return the index of the gradient that is, or has a part, of this name, or None."""
    for index, gradient in enumerate(g_list):
        if isinstance(gradient, GradientSlice):
            if name in (str(gradient.indices), str(gradient.values)):
                return index
        elif gradient is not None and str(gradient) == name:
            return index
    return None


class IR:
    """Operators in order, with versions of the blobs: what is needed to build the backward pass.

    A blob that is written again gets a new version. `frontier` is the version that each blob has
    after the last operator; `input_usages[name][version]` are the indices of the operators that
    read a version; `gradient_generators[name][version]` are the sources of its gradient that were
    found so far.
    """

    IS_AUTO_GEN_SUM_OPS_TAG = SUM_TAG
    ONLY_KEEP_IS_AUTO_GEN_SUM_OPS_TAG = KEEP_ONLY_SUM_TAG

    def __init__(self, operators: Iterable[OperatorDef]) -> None:
        """Play operators in order.

        Raises:
            ValueError: nobody reads the output of a StopGradient.
        """
        self.ssa: list[OpSSA] = []
        self.input_usages: defaultdict[str, defaultdict[int, list[int]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self.frontier: defaultdict[str, int] = defaultdict(int)
        self.gradient_frontier: dict[str, int] = {}
        self.gradient_generators: defaultdict[str, defaultdict[int, list[GradientSource]]] = (
            defaultdict(lambda: defaultdict(list))
        )
        for operator in operators:
            self.Play(operator)
        for operator, _, _ in self.ssa:
            if operator.type == "StopGradient" and operator.output[0] not in self.input_usages:
                raise ValueError(
                    f"StopGradient's output '{operator.output[0]}' is orphan.\nYou typically want "
                    f"to specify same input and output for StopGradient. Op:\n\n{operator}"
                )

    def Play(self, op: OperatorDef) -> None:
        """Add an operator: it reads the present versions and makes new ones."""
        in_versions = {}
        for name in op.input:
            in_versions[name] = self.frontier[name]
            self.input_usages[name][self.frontier[name]].append(len(self.ssa))
        out_versions = {}
        for name in op.output:
            if name in self.frontier:
                self.frontier[name] += 1
            out_versions[name] = self.frontier[name]
        self.ssa.append(OpSSA(op, in_versions, out_versions))

    def GetBackwardPass(
        self, ys: Sequence[Any] | Mapping[Any, Any]
    ) -> tuple[list[OperatorDef], dict[Any, Any]]:
        """Return the gradient operators, and the gradient of each blob that has one.

        Args:
            ys: the blobs to differentiate: a list, or a dict to their gradients (None: all ones).

        Raises:
            TypeError: `ys` is neither.
            RuntimeError: a gradient needs an overwritten version of a blob, or cannot be summed.
            Exception: an operator is not differentiable.
        """
        if isinstance(ys, list):
            ys = dict.fromkeys(ys)
        elif not isinstance(ys, dict):
            raise TypeError("ys should either be a list or a dict.")
        for y in map(str, ys):
            self.gradient_frontier[y] = self.frontier[y]
            self.input_usages[y][self.frontier[y]].append(len(self.ssa))
        gradients, operators = self._first_gradients(ys)
        for index in reversed(range(len(self.ssa))):
            found, made = self._differentiate(index, gradients)
            gradients.update(found)
            operators += made
            sums, summed = self.DoGradientAccumulation(index)
            gradients.update(summed)
            operators += sums
        return operators, {
            BlobReference(name): _referred(gradient)
            for name, gradient in gradients.items()
            if gradient is not None
        }

    def _first_gradients(self, ys: Mapping[Any, Any]) -> tuple[dict[str, Any], list[OperatorDef]]:
        gradients: dict[str, Any] = {}
        operators: list[OperatorDef] = []
        for y, gradient in ys.items():
            maker = None
            if gradient is None:
                maker = CreateOperator(
                    "ConstantFill",
                    [BlobReference(str(y))],
                    [BlobReference(f"{y}_autogen_grad")],
                    value=1.0,
                )
                operators.append(maker)
                gradient = maker.output[0]
            if isinstance(gradient, GradientSlice):
                gradient = GradientSlice(str(gradient.indices), str(gradient.values))
                makers: tuple[OperatorDef | None, ...] = (None, None)
            else:
                gradient, makers = str(gradient), (maker,)
            gradients[str(y)] = gradient
            device = maker.device_option if maker is not None else DeviceOption()
            source = GradientSource(gradient, makers, (0,) * len(makers), device)
            self.gradient_generators[str(y)][self.frontier[str(y)]].append(source)
        return gradients, operators

    def _differentiate(
        self, index: int, gradients: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[OperatorDef]]:
        """Return one operator's part of its inputs' gradients, and the operators that make it."""
        forward = self.ssa[index].op
        given = [gradients.get(name) for name in forward.output]
        if all(gradient is None for gradient in given) and forward.type != "ZeroGradient":
            return {}, []
        operators, of_inputs = GradientRegistry.GetGradientForOp(forward, given)
        self.BuildGradientGenerators(index, operators, given, of_inputs)
        found: dict[str, Any] = {}
        for name, gradient in zip(forward.input, of_inputs, strict=False):
            # None replaces a gradient only where the blob is overwritten by this operator: its
            # older version has none.
            if gradient is not None or name not in gradients or name in forward.output:
                found[name] = found.get(name) if gradient is None else gradient
        return found, operators

    def BuildGradientGenerators(
        self,
        fwd_op_idx: int,
        gradient_ops: Sequence[OperatorDef],
        g_output: Sequence[Any],
        g_input: Sequence[Any],
    ) -> None:
        """Note which operator makes the gradient of which version of the forward inputs."""
        forward, in_versions, _ = self.ssa[fwd_op_idx]
        made: dict[str, list[tuple[OperatorDef, int]]] = {}
        for operator in gradient_ops:
            for name in operator.input:
                self.CheckGradientOperatorInput(name, g_output, fwd_op_idx, made)
            for place, name in enumerate(operator.output):
                # What an operator writes again replaces what an earlier one of the same gradient
                # wrote.
                earlier = [part for part in made.get(name, []) if part[0] is operator]
                made[name] = [*earlier, (operator, place)]
        for index, gradient in enumerate(g_input):
            if gradient is None:
                continue
            name, version = forward.input[index], in_versions[forward.input[index]]
            self.gradient_frontier[name] = version
            generators = self.gradient_generators[name][version]
            for source in _sources(gradient, made, forward.device_option):
                if not any(_is_same(source, known) for known in generators):
                    source.local = list(gradient_ops)
                    generators.append(source)

    def CheckGradientOperatorInput(
        self,
        grad_op_input: str,
        g_output: Sequence[Any],
        fwd_op_idx: int,
        locally_generated_blobs: Any,
    ) -> None:
        """Raise RuntimeError when a gradient operator reads an overwritten or unmade blob."""
        forward, in_versions, out_versions = self.ssa[fwd_op_idx]
        for versions in (out_versions, in_versions):
            if grad_op_input in versions:
                expected, now = versions[grad_op_input], self.frontier[grad_op_input]
                if expected != now:
                    raise RuntimeError(
                        f'Gradient name "{grad_op_input}" is expected to correspond to version '
                        f"{expected} of the blob that {forward.type} used, but its version is "
                        f"{now} now: it is overwritten later on."
                    )
                return
        index = GetIndexFromGradientList(g_output, grad_op_input)
        if index is not None:
            name = forward.output[index]
            expected, current = out_versions[name], self.gradient_frontier.get(name)
            if expected != current:
                raise RuntimeError(
                    f'Gradient name "{grad_op_input}" is expected to correspond to version '
                    f'{expected} of "{name}", '
                    f"but currently the version is {current}."
                )
        elif grad_op_input not in locally_generated_blobs:
            raise RuntimeError(
                f'Blob name "{grad_op_input}" not in the scope of operator: {forward}\n'
                "and is not generated by any of the local gradient operators."
            )

    def DoGradientAccumulation(self, fwd_op_idx: int) -> tuple[list[OperatorDef], dict[str, Any]]:
        """Return operators that sum gradients of blobs this operator uses first, and the sums.

        Raises:
            RuntimeError: dense and sparse gradients, or gradients on several devices, meet.
        """
        forward, in_versions, _ = self.ssa[fwd_op_idx]
        operators: list[OperatorDef] = []
        sums: dict[str, Any] = {}
        for name in dict.fromkeys(forward.input):
            usage = self.input_usages[name][in_versions[name]]
            if len(usage) <= 1 or fwd_op_idx != usage[0]:
                continue
            sources = self.gradient_generators[name][in_versions[name]]
            try:
                if not must_sum(sources):
                    continue
            except RuntimeError as error:
                raise RuntimeError(f"Gradients for {name} failed to verify: {error}") from error
            made, sums[name] = make_sum(sources, name)
            operators.extend(made)
        return operators, sums


def _sources(
    gradient: Any, made: Mapping[str, list[tuple[OperatorDef, int]]], device: DeviceOption
) -> list[GradientSource]:
    """Return the operators that make an input's gradient; none where it passes through."""
    if isinstance(gradient, GradientSlice):
        parts = [made.get(str(part), [(None, 0)])[-1] for part in gradient]
        device = next((maker.device_option for maker, _ in parts if maker is not None), device)
        makers = tuple(maker for maker, _ in parts)
        return [GradientSource(gradient, makers, tuple(place for _, place in parts), device)]
    found = made.get(str(gradient), [])
    if not found:
        return [GradientSource(str(gradient), (None,), (0,), device)]
    return [
        GradientSource(str(gradient), (maker,), (place,), maker.device_option)
        for maker, place in found
    ]


def _is_same(source: GradientSource, known: GradientSource) -> bool:
    """Return whether two sources are one output of one operator; passed ones never are."""
    return (
        source.makers[0] is not None
        and all(a is b for a, b in zip(source.makers, known.makers, strict=False))
        and source.places == known.places
    )


def _referred(gradient: Any) -> Any:
    if isinstance(gradient, GradientSlice):
        return GradientSlice(*(BlobReference(str(part)) for part in gradient))
    return BlobReference(gradient)


class GradientRegistry:
    """The gradients of operators: first what is registered in Python, then the operators' own."""

    gradient_registry_: dict[
        str, Callable[[OperatorDef, Sequence[Any]], tuple[Any, Sequence[Any]]]
    ] = {}  # noqa: RUF012

    @classmethod
    def RegisterGradient(cls, op_type: str) -> Callable[[Any], Any]:
        """Register `(op, g_output) -> (operators, g_input)` as the gradient of an operator."""

        def register(function: Any) -> Any:
            cls.gradient_registry_[op_type] = function
            return function

        return register

    @classmethod
    def _GetGradientForOpCC(
        cls, op_def: OperatorDef, g_output: Sequence[Any]
    ) -> tuple[list[OperatorDef], list[Any]]:
        """Return what the rule of the operator itself gives."""
        known = registry.find(op_def.type)
        if known.gradient is None:
            raise NotImplementedError(f"the operator {op_def.type} has no gradient")
        try:
            known.check(op_def)
        except ValueError as error:
            raise ValueError(f"the operator did not pass schema checking: {error}") from error
        maker = GradientMaker(op_def, [_plain(gradient) for gradient in g_output])
        known.gradient(maker)
        return maker.operators, [
            GradientSlice(gradient.indices, gradient.values)
            if isinstance(gradient, Sparse)
            else gradient
            for gradient in maker.gradients
        ]

    @classmethod
    def GetGradientForOp(
        cls, op: OperatorDef, g_output: Sequence[Any]
    ) -> tuple[list[OperatorDef], list[Any]]:
        """Return the gradient operators of an operator, and the gradients of its inputs.

        Raises:
            Exception: it is not differentiable, or lacks the gradient of an output.
        """
        try:
            own = cls.gradient_registry_.get(op.type)
            operators, of_inputs = (own or cls._GetGradientForOpCC)(op, g_output)
        except Exception as error:
            reason = error.args[0] if error.args else error
            raise Exception(
                f"Exception when creating gradient for [{op.type}]:{reason}.\nOp:\n{op}"
            ) from error
        if operators is None:
            return [], list(of_inputs)
        return operators if isinstance(operators, list) else [operators], list(of_inputs)

    @classmethod
    def GetBackwardPass(
        cls, operators: Iterable[OperatorDef], ys: Any, ys_generate_gradient: bool = False
    ) -> tuple[list[OperatorDef], dict[Any, Any]]:
        """Return the gradient operators of operators, and the gradient of each blob; see `IR`."""
        return IR(operators).GetBackwardPass(ys)


def _plain(gradient: Any) -> Any:
    if isinstance(gradient, GradientSlice):
        return Sparse(str(gradient.indices), str(gradient.values))
    return None if gradient is None else str(gradient)
