"""Net: a compiled definition as a torch module.

Law: `forward` iterates over a flat list that is built once. It runs the layers in the order of the
file, frees each blob after its last use, and adds no overhead to the layers. Two nets with the same
definition, context and inputs compute the same bits.
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

from poseidon.caffe.data.batches.numbered import NumberedReader
from poseidon.caffe.layers.base import Layer, LayerContext, LayerError, Shape, times
from poseidon.caffe.layers.sources import Input, ReadingSource, Source
from poseidon.caffe.net.debug import DebugTrace
from poseidon.caffe.net.fuse import FusedStep, Run, fuse, in_form, plain
from poseidon.caffe.net.load import Arrays, LoadReport, load_blobs
from poseidon.caffe.net.net_plan import LayerStep, NetPlan
from poseidon.caffe.net.params import ParamInfo, pack_states, unpack_states
from poseidon.caffe.net.shapes import SlotShapes, check_known
from poseidon.caffe.proto.definition import NetDefinition
from poseidon.engine.own_time import WAITED
from poseidon.errors import DataError, JobError, UsageError, out_of_memory, unknown
from poseidon.exchange.device import memory_in_use
from poseidon.observe.metrics.glog_lines import GlogSink


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The result of a compilation, the argument of `Net`.

    Attributes:
        definition: the net, filtered for its phase.
        layers: the layers, one for each step.
    """

    definition: NetDefinition
    plan: NetPlan
    context: LayerContext
    layers: tuple[Layer, ...]
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    params: tuple[ParamInfo, ...]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """An element of the list that `forward` iterates over."""

    layer: Layer
    index: int
    run: Run
    bottoms: tuple[int, ...]
    tops: tuple[int, ...]
    dead: tuple[int, ...]
    cut: tuple[bool, ...] | None
    wants_gradient: bool


class Net(nn.Module):
    """A runnable net, created by `compile_net`.

    Attributes:
        parameters_info: the learnable tensors in Caffe's order.
        layer_modules: the pairs (distinct name, layer) in order.
        loss: after `forward`, the weighted sum of the losses, a scalar.
        keep_blobs: store all blobs in `blobs` in each forward pass, which keeps their memory.
        blobs: with `keep_blobs`, the last value of each blob by name.
        keep_data: keep the tops of the data layers until the next forward pass, for
            `first_not_finite`.
    """

    def __init__(self, compiled: Compiled) -> None:
        super().__init__()
        self.definition = compiled.definition
        self.plan = compiled.plan
        self.context = compiled.context
        self.parameters_info = compiled.params
        self.layers = nn.ModuleList(compiled.layers)
        self.layer_modules: tuple[tuple[str, Layer], ...] = tuple(
            zip(compiled.names, compiled.layers, strict=True)
        )
        self._slot_shapes = SlotShapes(
            compiled.definition, compiled.plan, compiled.layers, compiled.shapes
        )
        self.loss = torch.zeros((), device=self.context.device)
        self.keep_blobs = False
        self.blobs: dict[str, Tensor] = {}
        self.keep_data = False
        self._kept_data: dict[int, Any] = {}
        self._inputs = self._find_inputs()
        steps = [
            FusedStep(step, run) for step, run in zip(self.plan.steps, self._runs(), strict=True)
        ]
        self._calls = self._calls_of(steps)
        self._traced_calls: tuple[LayerCall, ...] = ()
        self._trace: DebugTrace | None = None
        # Layers whose shapes may change are not fused.
        fused = fuse(self.plan, compiled.layers, self._runs(), apart=self._slot_shapes.dynamic)
        self._fused_calls = self._calls_of(fused)
        self.set_debug_info(self.definition.param.debug_info)

    def set_debug_info(self, on: bool) -> None:
        """Enable or disable the log of the mean absolute values of all blobs in every pass."""
        if not on or self.context.rank != 0:
            self._trace = None
            return
        layers = [layer for _, layer in self.layer_modules]
        sink = GlogSink(logging.getLogger("poseidon.caffe.net"))
        self._trace = DebugTrace(
            self.plan, layers, [info.parameter for info in self.parameters_info], sink.write
        )
        self._traced_calls = self._calls_of(self._trace.steps(self._runs()))

    def log_backward(self) -> None:
        """Log the diffs of the last backward pass if `set_debug_info` has enabled it."""
        if self._trace is not None:
            self._trace.log_backward()

    @property
    def blob_shapes(self) -> dict[str, Shape]:
        """The shape of each blob, after the last `reshape` or forward pass."""
        return self._slot_shapes.blob_shapes()

    @property
    def slot_shapes(self) -> tuple[Shape, ...]:
        """The shape of each slot of the plan, after the last `reshape` or forward pass."""
        return tuple(self._slot_shapes.shapes)

    @property
    def changing_slots(self) -> frozenset[int]:
        """The slots whose shapes may change from pass to pass: the number of regions, for
        example.
        """
        changing = {
            i for i, (_, layer) in enumerate(self.layer_modules) if layer.tops_may_change_shape
        }
        return frozenset(
            slot
            for i in changing | set(self._slot_shapes.dynamic)
            for slot in self.plan.steps[i].tops
        )

    @property
    def input_shapes(self) -> dict[str, Shape]:
        """The shapes of the inputs that `forward` needs."""
        return {name: self._slot_shapes.shapes[slot] for name, slot in self._inputs}

    def _find_inputs(self) -> tuple[tuple[str, int], ...]:
        return tuple(
            (name, slot)
            for step, (_, layer) in zip(self.plan.steps, self.layer_modules, strict=True)
            if isinstance(layer, Input)
            for name, slot in zip(layer.param.top, step.tops, strict=True)
        )

    def _runs(self) -> list[Run]:
        return [
            partial(self._slot_shapes.run, position)
            if position in self._slot_shapes.dynamic
            else layer
            for position, (_, layer) in enumerate(self.layer_modules)
        ]

    def _chosen_calls(self) -> tuple[LayerCall, ...]:
        if self._trace is not None:
            return self._traced_calls
        return self._calls if self.keep_blobs else self._fused_calls

    def reshape(self, input_shapes: Mapping[str, Shape]) -> None:
        """Change the shapes of inputs and set up all layers that this affects.

        Raises:
            UsageError: an input is unknown.
            DefinitionError: a layer does not accept the resulting shapes, or a learnable blob would
                change its shape. The net is then unchanged.
        """
        check_known(input_shapes, self.input_shapes)
        slots = dict(self._inputs)
        self._slot_shapes.reshape(
            {slots[name]: tuple(shape) for name, shape in input_shapes.items()}
        )

    def forward(self, inputs: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Run every layer once. Return the outputs, the blobs that no layer reads, by name in
        Caffe's order.

        Args:
            inputs: a float tensor for the top of each Input layer. Only its first extent may differ
                from `input_shapes` (see `reshape`). None for a net that reads its own data.

        Raises:
            UsageError: an input is missing or unknown, or has a wrong shape.
            DataError: a record cannot be read, or a label is out of range.
            DefinitionError: a layer does not accept the shape of a bottom.
        """
        self.loss = (
            torch.zeros((), device=self.context.device)
            if not self.plan.losses
            else self.loss.detach()
        )
        self.blobs = {}
        self._kept_data = {}
        values: list[Tensor | None] = [None] * self.plan.slots
        self._set_inputs(inputs or {}, values)
        keep = self.keep_blobs
        for call in self._chosen_calls():
            arguments: list[Any] = [values[slot] for slot in call.bottoms]
            if call.cut is not None:
                arguments = [
                    v.detach() if cut else v for v, cut in zip(arguments, call.cut, strict=True)
                ]
            try:
                result: Any = call.run(*arguments)
            except DataError as error:
                raise DataError(str(self.definition.error(call.index, str(error)))) from error
            except LayerError as error:
                raise self.definition.error(call.index, str(error)) from error
            except (MemoryError, RuntimeError) as error:
                lost = self._without_memory(call.index, error, "forward pass")
                if lost is None:
                    raise
                raise lost from error
            del arguments
            if self.keep_data and not call.bottoms:
                self._kept_data[call.index] = result
            if len(call.tops) == 1:
                values[call.tops[0]] = result
            else:
                for slot, top in zip(call.tops, result, strict=True):
                    values[slot] = top
            del result
            if call.wants_gradient:
                self._require_gradient(call, values)
            if not keep:
                for slot in call.dead:
                    values[slot] = None
        return self._finish(values)

    def drop_graph(self) -> None:
        """Free what the last pass has kept for a backward pass. Its loss stays."""
        self.loss = self.loss.detach()
        self.blobs = {}

    def drop_data(self) -> None:
        """Free the data of the last pass, which `keep_data` has kept."""
        self._kept_data = {}

    def first_not_finite(self) -> str:
        """Repeat the last pass on the same data (`keep_data`) up to the first layer with an
        output that is not finite.

        The random states and statistics of the layers are restored afterwards.

        Returns:
            a clause that names the layer and the blob, and says whether the layer's weights are
            finite.
        """
        state = self.random_state()
        statistics = [
            (i.parameter, i.parameter.detach().clone())
            for i in self.parameters_info
            if i.statistics
        ]
        try:
            with torch.no_grad():
                return self._first_not_finite()
        finally:
            self.set_random_state(state)
            for parameter, before in statistics:
                parameter.detach().copy_(before)

    def _first_not_finite(self) -> str:
        values: list[Any] = [None] * self.plan.slots
        for call in self._calls:
            known = call.index in self._kept_data
            if any(values[slot] is None for slot in call.bottoms) or not (known or call.bottoms):
                continue  # depends on an input of the caller, which is not kept
            result = (
                self._kept_data[call.index]
                if known
                else call.run(*(values[slot] for slot in call.bottoms))
            )
            results = (result,) if len(call.tops) == 1 else result
            for slot, value, top in zip(call.tops, results, call.layer.param.top, strict=True):
                values[slot] = value
                if not _all_finite(value):
                    finite_weights = all(_all_finite(blob) for blob in call.layer.blobs())
                    suffix = "" if finite_weights else ", whose weights are not finite either"
                    return f"the first output that is not finite is '{top}' of layer '{call.layer.param.name}'{suffix}"
        return "a second pass over the same data finds no output that is not finite"

    def close(self) -> None:
        """Stop the threads of the data layers and close their files."""
        for _, layer in self.layer_modules:
            layer.close()

    @property
    def layers_by_name(self) -> dict[str, Layer]:
        """The layers by distinct name: `ip`, and `ip#2` for a second one of this name."""
        return dict(self.layer_modules)

    def readers(self) -> list[tuple[str, NumberedReader[Any]]]:
        """Return the name and the reader of each layer that reads records, in order."""
        return [
            (name, layer.reader)
            for name, layer in self.layer_modules
            if isinstance(layer, ReadingSource) and layer.reader is not None
        ]

    def load_blobs(self, saved: Iterable[tuple[str, Arrays]], *, own: bool = False) -> LoadReport:
        """Load saved blobs by layer name; see `poseidon.caffe.net.load`.

        Args:
            own: this net has saved them, for a state.

        Raises:
            SnapshotError: the blobs of a layer differ in number or shape, or are missing in the
                net's own state.
        """
        layers = self.layers_by_name
        owned = self.owned_blobs()
        names = (
            f"{name}.{i}" for name, layer in layers.items() for i in range(len(layer.blob_specs))
        )
        shared = {name for name in names if name not in owned}
        return load_blobs(layers, saved, shared=shared, own=own)

    def owned_blobs(self) -> frozenset[str]:
        """Return the names `<layer>.<index>` of the blobs that are not shared from another
        layer.
        """
        return frozenset(info.name for info in self.parameters_info)

    def layer_blobs(self) -> list[tuple[str, str, list[NDArray[Any]]]]:
        """Return distinct name, type and copies of the blobs of every layer.

        Shared blobs are repeated, as in Caffe's models.
        """
        return [
            (name, layer.param.type, [blob.detach().cpu().numpy().copy() for blob in layer.blobs()])
            for name, layer in self.layer_modules
        ]

    def random_state(self) -> bytes:
        """Return the states of the generators of all layers that draw random numbers."""
        return pack_states(self._generators())

    def set_random_state(self, state: bytes) -> None:
        """Restore states that `random_state` returned.

        Raises:
            SnapshotError: the states belong to a net with different random layers, or on a
                different kind of device.
        """
        unpack_states(self._generators(), state)

    def _generators(self) -> list[torch.Generator]:
        return [layer.generator for _, layer in self.layer_modules if layer.generator is not None]

    def _calls_of(self, steps: Iterable[FusedStep]) -> tuple[LayerCall, ...]:
        return tuple(
            self._call(fused.step, fused.run) for fused in steps if not isinstance(fused.run, Input)
        )

    def _call(self, step: LayerStep, run: Run) -> LayerCall:
        layer = self.layer_modules[step.layer][1]
        if step.bottoms:
            run = in_form(layer, run)
        elif not isinstance(layer, Source):
            run = partial(_read, run)
        return LayerCall(
            layer=layer,
            index=step.layer,
            run=run,
            bottoms=step.bottoms,
            tops=step.tops,
            dead=step.dead,
            cut=step.cut if any(step.cut) else None,
            wants_gradient=any(slot in self.plan.wants_gradient for slot in step.tops),
        )

    def _set_inputs(self, inputs: Mapping[str, Tensor], values: list[Tensor | None]) -> None:
        """Check the inputs and store them in their slots."""
        for name in inputs:
            if name not in self.input_shapes:
                raise UsageError(unknown("input", name, self.input_shapes))
        for name, slot in self._inputs:
            shape = self._slot_shapes.shapes[slot]
            if name not in inputs:
                raise UsageError(
                    f"input '{name}' is missing, expected a tensor of shape {times(shape)}"
                )
            value = inputs[name]
            if value.dim() != len(shape) or tuple(value.shape[1:]) != shape[1:]:
                raise UsageError(
                    f"input '{name}' has shape {times(value.shape)}, expected {times(shape)}"
                )
            value = value.to(self.context.device)
            if slot in self.plan.wants_gradient and not value.requires_grad:
                value = value.detach().requires_grad_()
            values[slot] = value

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a multiple of the loss.

        Raises:
            JobError: memory ran out; the text names the layer that was reached.
        """
        is_first = all(info.parameter.grad is None for info in self.parameters_info)
        try:
            loss.backward()
        except (MemoryError, RuntimeError) as error:
            lost = self._without_memory(
                self._reached() if is_first else None, error, "backward pass, here or just above"
            )
            if lost is None:
                raise
            raise lost from error

    def _reached(self) -> int | None:
        """Return the index of the highest layer that the first backward pass has not left: it, or
        a layer without parameters above it, was running.
        """
        waiting = [
            index
            for index, (_, layer) in enumerate(self.layer_modules)
            if any(source.requires_grad for source in layer.sources())
            and all(source.grad is None for source in layer.sources())
        ]
        return max(waiting, default=None)

    def _without_memory(self, index: int | None, error: Exception, where: str) -> JobError | None:
        """Return the error of a layer for which memory ran out; None for another error.

        Args:
            index: of the layer; None: unknown.
            where: in which pass, and where in it.
        """
        if out_of_memory(error) is None:
            return None
        text = str(out_of_memory(error, memory_in_use(self.context.device)))
        first = self.slot_shapes[self.plan.steps[0].tops[0]] if self.plan.steps[0].tops else ()
        size = f", with a batch_size of {first[0]}" if first else ""
        text = f"in the {where}{size}: {text}"
        return JobError(text if index is None else str(self.definition.error(index, text)))

    def _require_gradient(self, call: LayerCall, values: list[Any]) -> None:
        for slot in call.tops:
            if slot in self.plan.wants_gradient and not values[slot].requires_grad:
                values[slot] = values[slot].detach().requires_grad_()

    def _finish(self, values: list[Any]) -> dict[str, Tensor]:
        """Compute the loss, store the kept blobs and return the outputs."""
        total: Tensor | None = None
        for slot, weight in self.plan.losses:
            term = values[slot].float()
            term = term if term.dim() == 0 else term.sum()
            term = term if weight == 1 else term * weight
            total = term if total is None else total + term
        if total is not None:
            self.loss = total
        if self.keep_blobs:
            self.blobs = {name: values[slot] for name, slot in self.plan.names.items()}
        outputs = {name: values[slot] for name, slot in self.plan.outputs}
        if self.context.autocast is None and not self.context.channels_last:
            return outputs
        return {name: plain(value) for name, value in outputs.items()}


def _read(run: Run) -> Any:
    """Run a user's layer without bottoms; its time is one of waiting for data."""
    with WAITED.measure(needed=True):
        return run()


def _all_finite(value: Tensor) -> bool:
    return not value.is_floating_point() or bool(value.isfinite().all())
