"""Net: a compiled definition, run as a torch module.

Law: `forward` is a flat walk over a list made once. It computes what the definition says in the order of the file, lets
go of each blob when nobody needs it any more, and adds nothing to what the layers cost by themselves. Two nets with
the same definition, context and inputs compute the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from poseidon.data.batches.numbered import NumberedReader
from poseidon.errors import DataError, UsageError, unknown
from poseidon.layers.base import Layer, LayerContext, LayerError, Shape, times
from poseidon.layers.inputs.sources import Input, ReadingSource
from poseidon.metrics.glog_lines import GlogSink
from poseidon.net.debug import DebugTrace
from poseidon.net.fit import Fit, check_known
from poseidon.net.fuse import FusedStep, Run, fuse
from poseidon.net.load import Arrays, LoadReport, load_blobs
from poseidon.net.params import ParamInfo
from poseidon.net.plan import NetPlan, Step
from poseidon.net.random_state import pack_states, unpack_states
from poseidon.proto.definition import NetDefinition


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What `compile_net` hands to `Net`.

    Attributes:
        definition: the net, filtered for its phase.
        plan: how its layers are joined.
        context: where it lives.
        layers: one a step.
        shapes: shape of each slot, as compiled.
        params: its learnable tensors.
    """

    definition: NetDefinition
    plan: NetPlan
    context: LayerContext
    layers: tuple[Layer, ...]
    shapes: tuple[Shape, ...]
    params: tuple[ParamInfo, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One line of the flat list that `forward` walks."""

    layer: Layer
    run: Run
    bottoms: tuple[int, ...]
    tops: tuple[int, ...]
    dead: tuple[int, ...]
    cut: tuple[bool, ...] | None
    wants_gradient: bool


class Net(nn.Module):
    """A net that runs. Made by `compile_net`.

    Attributes:
        plan: how the layers are joined.
        parameters_info: the learnable tensors in Caffe's order.
        layer_modules: (name, layer) in order.
        loss_weights: weight of each blob that is an output or weighs in the loss.
        loss: after `forward`, the weighted sum of the losses, a scalar.
        keep_blobs: fill `blobs` in each forward pass; costs the memory of all of them.
        blobs: each blob's last value by name, when kept.
        keep_data: keep what the data layers gave until the next forward pass, for `first_not_finite`.
    """

    def __init__(self, compiled: Compiled) -> None:
        super().__init__()
        self.definition = compiled.definition
        self.plan = compiled.plan
        self.context = compiled.context
        self.parameters_info = compiled.params
        self.layers = nn.ModuleList(compiled.layers)
        names = [param.name for param in compiled.definition.param.layer]
        self.layer_modules: tuple[tuple[str, Layer], ...] = tuple(zip(names, compiled.layers, strict=True))
        self._fit = Fit(compiled.definition, compiled.plan, compiled.layers, compiled.shapes)
        self.loss_weights = dict(self.plan.loss_weights)
        self.loss = torch.zeros((), device=self.context.device)
        self.keep_blobs = False
        self.blobs: dict[str, Tensor] = {}
        self.keep_data = False
        self._fed: list[tuple[Call, Any]] = []
        self._inputs = self._find_inputs()
        steps = [FusedStep(step, run) for step, run in zip(self.plan.steps, self._runs(), strict=True)]
        self._calls = self._list(steps)
        self._traced_calls: tuple[Call, ...] = ()
        self._trace: DebugTrace | None = None
        # Layers whose shapes may change run one by one.
        fused = fuse(self.plan, compiled.layers, self._runs(), apart=self._fit.watched)
        self._fused_calls = self._list(fused)
        self.set_debug_info(self.definition.param.debug_info)

    def set_debug_info(self, on: bool) -> None:
        """From now on log the mean absolute values of all blobs in every pass, or no longer."""
        if not on or self.context.rank != 0:
            self._trace = None
            return
        layers = [layer for _, layer in self.layer_modules]
        sink = GlogSink(logging.getLogger("poseidon.net"))
        self._trace = DebugTrace(
            self.plan, layers, [info.parameter for info in self.parameters_info], sink.write
        )
        self._traced_calls = self._list(self._trace.steps(self._runs()))

    def tell_backward(self) -> None:
        """After a backward pass: log what it gave, where `set_debug_info` asked for it."""
        if self._trace is not None:
            self._trace.tell_backward()

    @property
    def blob_shapes(self) -> dict[str, Shape]:
        """Each blob's shape: as compiled, as told to `reshape`, or, where shapes change by themselves, as it was last."""
        return self._fit.blob_shapes()

    @property
    def input_shapes(self) -> dict[str, Shape]:
        """The blobs that `forward` must be given."""
        return {name: self._fit.shapes[slot] for name, slot in self._inputs}

    def _find_inputs(self) -> tuple[tuple[str, int], ...]:
        return tuple(
            (name, slot)
            for step, (_, layer) in zip(self.plan.steps, self.layer_modules, strict=True)
            if isinstance(layer, Input)
            for name, slot in zip(layer.param.top, step.tops, strict=True)
        )

    def _runs(self) -> list[Run]:
        return [
            partial(self._fit.run, place) if place in self._fit.watched else layer
            for place, (_, layer) in enumerate(self.layer_modules)
        ]

    def _chosen_calls(self) -> tuple[Call, ...]:
        if self._trace is not None:
            return self._traced_calls
        return self._calls if self.keep_blobs else self._fused_calls

    def reshape(self, input_shapes: Mapping[str, Shape]) -> None:
        """Make the net ready for inputs of other shapes; all layers that this reaches are set up again.

        Args:
            input_shapes: new shapes of some or all inputs.

        Raises:
            UsageError: no such input.
            DefinitionError: a layer cannot take the shapes that follow, or a blob would change its shape; the net is
                then as it was.
        """
        check_known(input_shapes, self.input_shapes)
        slots = dict(self._inputs)
        self._fit.reshape({slots[name]: tuple(shape) for name, shape in input_shapes.items()})

    def forward(self, inputs: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Run every layer once.

        Args:
            inputs: a float tensor for the top of each Input layer; only its first extent may differ from
                `input_shapes` (`reshape` changes them). None for a net that reads its own data.

        Returns:
            the blobs that no layer uses up, by name as Caffe lists them.

        Raises:
            UsageError: an input is missing, unknown or of another shape.
            DataError: what the data could not give, or a label outside the range of its scores.
            DefinitionError: a layer cannot take the shape that a bottom has this time.
        """
        self.loss = (
            torch.zeros((), device=self.context.device) if not self.plan.losses else self.loss.detach()
        )
        self.blobs = {}
        self._fed = []
        values: list[Tensor | None] = [None] * self.plan.slots
        self._take(inputs or {}, values)
        keep = self.keep_blobs
        for call in self._chosen_calls():
            arguments: list[Any] = [values[slot] for slot in call.bottoms]
            if call.cut is not None:
                arguments = [v.detach() if cut else v for v, cut in zip(arguments, call.cut, strict=True)]
            try:
                result: Any = call.run(*arguments)
            except DataError as error:
                raise self._placed(call, error) from error
            except LayerError as error:
                raise self.definition.error(call.layer.param.name, str(error)) from error
            del arguments
            if self.keep_data and not call.bottoms:
                self._fed.append((call, result))
            if len(call.tops) == 1:
                values[call.tops[0]] = result
            else:
                for slot, top in zip(call.tops, result, strict=True):
                    values[slot] = top
            del result
            if call.wants_gradient:
                self._ask_gradient(call, values)
            if not keep:
                for slot in call.dead:
                    values[slot] = None
        return self._finish(values)

    def first_not_finite(self) -> str:
        """Run the layers once more over the data of the last pass (`keep_data`), until one has an output that is not finite.

        Whatever the layers draw or move in a pass is afterwards as it was.

        Returns:
            A clause that names layer and blob, and whether the layer's own weights are finite.
        """
        state = self.random_state()
        moved = [(i.parameter, i.parameter.detach().clone()) for i in self.parameters_info if i.statistics]
        try:
            with torch.no_grad():
                return self._first_not_finite()
        finally:
            self.set_random_state(state)
            for parameter, before in moved:
                parameter.detach().copy_(before)

    def _first_not_finite(self) -> str:
        fed = {id(call.layer): result for call, result in self._fed}
        values: list[Any] = [None] * self.plan.slots
        for call in self._calls:
            known = id(call.layer) in fed
            if any(values[slot] is None for slot in call.bottoms) or not (known or call.bottoms):
                continue  # it hangs on an input that was given, and is not kept
            result = fed[id(call.layer)] if known else call.run(*(values[slot] for slot in call.bottoms))
            results = (result,) if len(call.tops) == 1 else result
            for slot, value, top in zip(call.tops, results, call.layer.param.top, strict=True):
                values[slot] = value
                if not _all_finite(value):
                    whole = all(_all_finite(blob) for blob in call.layer.blobs())
                    own = "" if whole else ", whose weights are not finite either"
                    return f"the first output that is not finite is '{top}' of layer '{call.layer.param.name}'{own}"
        return "a second pass over the same data finds no output that is not finite"

    def close(self) -> None:
        """Stop the data layers' threads and close their files."""
        for _, layer in self.layer_modules:
            layer.close()

    def readers(self) -> list[tuple[str, NumberedReader]]:
        """Name and reader of each layer that reads records, in order."""
        return [
            (name, layer.reader)
            for name, layer in self.layer_modules
            if isinstance(layer, ReadingSource) and layer.reader is not None
        ]

    def load_blobs(self, saved: Iterable[tuple[str, Arrays]]) -> LoadReport:
        """Take over saved blobs by layer name; see `poseidon.net.load`.

        Raises:
            SnapshotError: a layer's blobs differ in number or shape.
        """
        layers = dict(self.layer_modules)
        owned = self.owned_blobs()
        names = (f"{name}.{i}" for name, layer in layers.items() for i in range(len(layer.blob_specs)))
        return load_blobs(layers, saved, shared={name for name in names if name not in owned})

    def owned_blobs(self) -> frozenset[str]:
        """`<layer>.<index>` of every blob that is not shared from another layer."""
        return frozenset(info.name for info in self.parameters_info)

    def layer_blobs(self) -> list[tuple[str, str, list[NDArray[Any]]]]:
        """Name, type and copies of the blobs of every layer, shared ones with each sharer, as Caffe saves them."""
        return [
            (name, layer.param.type, [blob.detach().cpu().numpy().copy() for blob in layer.blobs()])
            for name, layer in self.layer_modules
        ]

    def random_state(self) -> bytes:
        """Return the state of every layer that draws random numbers."""
        return pack_states(self._generators())

    def set_random_state(self, state: bytes) -> None:
        """Put back what `random_state` gave.

        Raises:
            SnapshotError: the state is of a net with other random layers, or on another kind of device.
        """
        unpack_states(self._generators(), state)

    def _generators(self) -> list[torch.Generator]:
        return [layer.generator for _, layer in self.layer_modules if layer.generator is not None]

    def _list(self, steps: Iterable[FusedStep]) -> tuple[Call, ...]:
        return tuple(self._call(fused.step, fused.run) for fused in steps if not isinstance(fused.run, Input))

    def _call(self, step: Step, run: Run) -> Call:
        return Call(
            layer=self.layer_modules[step.layer][1],
            run=run,
            bottoms=step.bottoms,
            tops=step.tops,
            dead=step.dead,
            cut=step.cut if any(step.cut) else None,
            wants_gradient=any(slot in self.plan.wants_gradient for slot in step.tops),
        )

    def _take(self, inputs: Mapping[str, Tensor], values: list[Tensor | None]) -> None:
        """Check the given inputs and put them into their slots."""
        for name in inputs:
            if name not in self.input_shapes:
                raise UsageError(unknown("input", name, self.input_shapes))
        for name, slot in self._inputs:
            shape = self._fit.shapes[slot]
            if name not in inputs:
                raise UsageError(f"input '{name}' was not given, expected a tensor of shape {times(shape)}")
            value = inputs[name]
            if value.dim() != len(shape) or tuple(value.shape[1:]) != shape[1:]:
                raise UsageError(f"input '{name}' has shape {times(value.shape)}, expected {times(shape)}")
            value = value.to(self.context.device)
            if slot in self.plan.wants_gradient and not value.requires_grad:
                value = value.detach().requires_grad_()
            values[slot] = value

    def _placed(self, call: Call, error: DataError) -> DataError:
        """Return a layer's error with its file, line and name."""
        return DataError(str(self.definition.error(call.layer.param.name, str(error))))

    def _ask_gradient(self, call: Call, values: list[Any]) -> None:
        for slot in call.tops:
            if slot in self.plan.wants_gradient and not values[slot].requires_grad:
                values[slot] = values[slot].detach().requires_grad_()

    def _finish(self, values: list[Any]) -> dict[str, Tensor]:
        """Sum the loss, show the kept blobs and give the outputs."""
        total: Tensor | None = None
        for slot, weight in self.plan.losses:
            term = values[slot] if values[slot].dim() == 0 else values[slot].sum()
            term = term if weight == 1 else term * weight
            total = term if total is None else total + term
        if total is not None:
            self.loss = total
        if self.keep_blobs:
            self.blobs = {name: values[slot] for name, slot in self.plan.names.items()}
        return {name: values[slot] for name, slot in self.plan.outputs}


def _all_finite(value: Tensor) -> bool:
    return not value.is_floating_point() or bool(value.isfinite().all())
