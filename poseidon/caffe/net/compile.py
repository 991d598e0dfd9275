"""Compilation of a definition to a `Net`.

Law: every mistake that can be found without data is found here and raised as an error with file,
line and layer. Initial weights depend on the seed and the blob's index in the net, not on the rank,
the device or the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from poseidon.caffe.layers.base import Layer, LayerContext, LayerError, Shape, new_blob, times
from poseidon.caffe.layers.registry import create, layer_class
from poseidon.caffe.net.load import first_values
from poseidon.caffe.net.net import Compiled, Net
from poseidon.caffe.net.net_plan import LayerStep, NetPlan, plan_net
from poseidon.caffe.net.params import ParamInfo, ParamTable, derive_seed
from poseidon.caffe.proto.caffe_pb2 import NetState, Phase
from poseidon.caffe.proto.definition import NetDefinition, filter_net
from poseidon.engine.document import WorkerDocument
from poseidon.errors import DataError, DefinitionError
from poseidon.exchange.device import TYPES

META = torch.device("meta")


def compile_net(
    definition: NetDefinition,
    context: LayerContext,
    *,
    state: NetState,
    share_with: Net | None = None,
) -> Net:
    """Build the net of one phase.

    Args:
        definition: the net with all phases.
        context: the environment of the layers. The phase comes from `state`, and
            `resolve` from the definition by default.
        share_with: a net (the train net) whose blobs this one (a test net) uses in layers of the
            same name; the second layer of a name uses those of the second.

    Raises:
        DefinitionError: a mistake in the definition.
        DataError: a database or a mean file is missing or broken.
    """
    net = filter_phase(definition, state)
    resolve = definition.resolve if context.resolve is Path else context.resolve
    donors = share_with.layers_by_name if share_with else {}
    compiler = _Compiler(net, replace(context, phase=state.phase, resolve=resolve), donors)
    try:
        return compiler.compile()
    except BaseException:
        compiler.close()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedLayers:
    """The layers that a check has set up.

    Attributes:
        shapes: the shapes of the blobs by name, as far as they are known without the layers that
            are left out.
        params: the learnable tensors of the net, on torch's meta device; None if layers are left
            out.
    """

    by_name: dict[str, Layer]
    shapes: dict[str, Shape]
    params: tuple[ParamInfo, ...] | None


@contextmanager
def checked_layers(
    definition: NetDefinition,
    context: LayerContext,
    *,
    state: NetState,
    share_with: Mapping[str, Layer] | None = None,
    leave_out: Callable[[type[Layer]], bool],
) -> Iterator[CheckedLayers]:
    """Set up the layers of one phase on torch's meta device: all checks of `compile_net`,
    without memory for blobs.

    A layer that is left out is not created. Neither are the layers above it, whose bottoms have
    unknown shapes, and those that share a blob with it.

    Args:
        definition: the net with all phases.
        context: the environment of the layers. The phase comes from `state`, and `resolve` from the
            definition.
        share_with: the layers of a net whose blobs this one uses, by name.
        leave_out: returns True for the class of a layer that must not be set up.

    Returns:
        the layers that were set up. They are closed when the block ends.

    Raises:
        DefinitionError: a mistake in the definition.
        DataError: a database or a mean file is missing or broken.
    """
    net = filter_phase(definition, state)
    on_meta = replace(context, phase=state.phase, resolve=definition.resolve, device=META)
    compiler = _Compiler(net, on_meta, share_with or {}, leave_out)
    try:
        shapes = compiler.check()
        yield CheckedLayers(
            by_name=dict(zip(compiler.distinct_names(), compiler.layers, strict=True)),
            shapes=shapes,
            params=compiler.known_params(),
        )
    finally:
        compiler.close()


def filter_phase(definition: NetDefinition, state: NetState) -> NetDefinition:
    """Return the layers of one phase.

    Raises:
        DefinitionError: the phase has no layers.
    """
    net = filter_net(definition, state)
    if not net.param.layer:
        raise DefinitionError(
            f"the net has no layer for phase {Phase.Name(state.phase)}, expected at least one",
            source=net.source,
        )
    return net


def plan_phase(definition: NetDefinition, state: NetState) -> NetPlan:
    """Plan one phase, with all checks that need neither shapes nor data.

    Raises:
        DefinitionError: no layer is left, a type or a bottom is unknown, ...; see `plan_net`.
    """
    return plan_net(filter_phase(definition, state), layer_class)


class _Compiler:
    """The state of a compilation, which sets up the layers in order."""

    def __init__(
        self,
        definition: NetDefinition,
        context: LayerContext,
        donors: Mapping[str, Layer],
        leave_out: Callable[[type[Layer]], bool] = lambda _: False,
    ) -> None:
        self.definition = definition
        self.context = context
        self.donors = donors
        self.leave_out = leave_out
        self.left_out = 0  # layers
        self.unknown_params: set[str] = set()  # the names of blobs of layers that are left out
        self.table = ParamTable()
        self.layers: list[Layer] = []
        self.keys: list[str | None] = []  # the distinct name of each layer that has blobs
        self.blobs_seen = 0

    def compile(self) -> Net:
        plan = plan_net(self.definition, layer_class)
        shapes = self._set_up(plan)
        assert len(shapes) == plan.slots, "only a check leaves layers out"
        self._choose_gradients()
        return Net(
            Compiled(
                definition=self.definition,
                plan=plan,
                context=self.context,
                layers=tuple(self.layers),
                names=self.distinct_names(),
                shapes=tuple(shapes[slot] for slot in range(plan.slots)),
                params=self.table.infos(),
            )
        )

    def check(self) -> dict[str, Shape]:
        """Set up the layers that are not left out. Return the shapes of the known blobs."""
        plan = plan_net(self.definition, layer_class)
        shapes = self._set_up(plan)
        return {name: shapes[slot] for name, slot in plan.names.items() if slot in shapes}

    def known_params(self) -> tuple[ParamInfo, ...] | None:
        """Return the learnable tensors of the layers that were set up; None if some are left
        out.
        """
        if self.left_out:
            return None
        self._choose_gradients()
        return self.table.infos()

    def distinct_names(self) -> tuple[str, ...]:
        """Return a distinct name for each layer that was set up.

        A layer without blobs never takes a name from one that has some: train and test nets would
        then call these differently.
        """
        return tuple(
            self.table.names.add(layer.param.name) if key is None else key
            for key, layer in zip(self.keys, self.layers, strict=True)
        )

    def close(self) -> None:
        """Close all layers."""
        for layer in self.layers:
            layer.close()

    def _set_up(self, plan: NetPlan) -> dict[int, Shape]:
        """Create each layer, call its `setup` and install its blobs.

        Returns:
            the shape of every slot, except the slots of layers that are left out and of the layers
            above them.
        """
        shapes: dict[int, Shape] = {}
        for step in plan.steps:
            if self._is_left_out(step, shapes):
                continue
            with self._located(step.layer):
                layer = self._create(step.layer)
                layer.overwrites_bottom = step.overwrites
                tops = layer.checked_setup([shapes[slot] for slot in step.bottoms])
                shapes.update(zip(step.tops, tops, strict=True))
                self._install_blobs(layer)
        return shapes

    def _is_left_out(self, step: LayerStep, shapes: Mapping[int, Shape]) -> bool:
        """Return whether the step's layer, a layer below it, or the owner of one of its blobs is
        left out.
        """
        param = self.definition.param.layer[step.layer]
        names = {spec.name for spec in param.param if spec.name}
        known = all(slot in shapes for slot in step.bottoms) and names.isdisjoint(
            self.unknown_params
        )
        if known and not self.leave_out(layer_class(param.type)):
            return False
        self.unknown_params |= names
        self.left_out += 1
        return True

    def _create(self, index: int) -> Layer:
        param = self.definition.param.layer[index]
        phase = param.phase if param.HasField("phase") else self.context.phase
        layer = create(param, replace(self.context, phase=phase))
        self.layers.append(layer)
        if layer.IS_RANDOM and self.context.device != META:
            layer.generator = torch.Generator(self.context.device)
            # pycaffe's nets have Split layers, a job's nets do not
            place = sum(param.type != "Split" for param in self.definition.param.layer[:index])
            layer.generator.manual_seed(
                derive_seed(self.context.seed, "draw", self.context.rank, place)
            )
        return layer

    def _install_blobs(self, layer: Layer) -> None:
        key, entries = self.table.add_layer(
            layer.param,
            layer.blob_specs,
            factors=layer.offers_factors,
            statistics=layer.updates_statistics,
        )
        self.keys.append(key)
        given = first_values(layer)
        donated = [] if key is None else self._donated(key, layer)
        for index, entry in enumerate(entries):
            if entry.parameter is None:
                entry.parameter = donated[index] if donated else self._new(layer, index, given)
            layer.install(index, entry.parameter)
        self.blobs_seen += len(entries)

    def _new(self, layer: Layer, index: int, given: Sequence[Tensor]) -> nn.Parameter:
        if self.context.device == META:
            return nn.Parameter(torch.empty(layer.blob_specs[index].shape, device=META))
        if given:
            return nn.Parameter(given[index].to(self.context.device))
        seed = derive_seed(self.context.seed, "blob", self.blobs_seen + index)
        return nn.Parameter(new_blob(layer.blob_specs[index], seed).to(self.context.device))

    def _donated(self, key: str, layer: Layer) -> list[nn.Parameter]:
        """Return the blobs of the layer of this name in the donor net; an empty list if it has
        none.
        """
        donor = self.donors.get(key)
        if donor is None or not donor.blob_specs:
            return []
        expected, found = (tuple(spec.shape for spec in of.blob_specs) for of in (donor, layer))
        if expected != found:
            raise LayerError(
                f"has blobs of shape {', '.join(map(times, found)) or 'none'}, expected "
                f"{', '.join(map(times, expected))} as in the net it shares them with"
            )
        return donor.sources()

    def _choose_gradients(self) -> None:
        """Disable gradients of blobs with lr_mult 0, unless force_backward is set, and of
        statistics.
        """
        if self.donors:
            return
        forced = self.definition.param.force_backward
        learns = self.table.learns()
        for info in self.table.infos():
            info.parameter.requires_grad_(learns[info.name] and (info.lr_mult != 0 or forced))

    @contextmanager
    def _located(self, index: int) -> Iterator[None]:
        """Add file, line and layer name to the errors of a layer."""
        try:
            yield
        except LayerError as error:
            raise self.definition.error(index, str(error)) from error
        except DataError as error:
            raise DataError(str(self.definition.error(index, str(error)))) from error


def layer_context(document: WorkerDocument, *, phase: int, seed: int) -> LayerContext:
    return LayerContext(
        phase=phase,
        seed=seed,
        rank=document.rank,
        workers=document.workers,
        seat=document.member.seat,
        device=torch.device(document.device),
        autocast=TYPES.get(document.precision),
        channels_last=document.channels_last,
    )
