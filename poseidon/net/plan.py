"""Which layer reads and writes what, settled before anything runs.

Law: pure; it sees names and the facts of layer classes, no shapes and no tensors. Layers run in the order of the file,
and a bottom must be the top of an earlier layer. Each top of each layer is a slot of its own, also when it runs in
place: the name then means the newer slot, and the older value lives on only while the backward pass needs it. So a
blob used twice needs no Split, and running in place is a matter of memory, never of numbers.

Source for the rules: Caffe's Net::Init, AppendTop, AppendBottom and Layer::SetLossWeights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from poseidon.errors import unknown
from poseidon.layers.base import Layer, LayerError, counted
from poseidon.proto.caffe_pb2 import LayerParameter
from poseidon.proto.definition import NetDefinition

ClassOf = Callable[[str], type[Layer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One layer's part of the plan.

    Attributes:
        layer: index in the definition.
        bottoms: slots read.
        tops: slots written.
        cut: for each bottom, True where `propagate_down: false` stops the gradient.
        overwrites: the layer may put its top in its bottom's memory.
        dead: slots that nobody needs once this layer has run.
    """

    layer: int
    bottoms: tuple[int, ...]
    tops: tuple[int, ...]
    cut: tuple[bool, ...]
    overwrites: bool = False
    dead: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NetPlan:
    """How the layers of a net are joined.

    Attributes:
        steps: one a layer, in order.
        slots: how many there are.
        names: each blob's name with the slot that holds its last value.
        outputs: blobs that no layer uses up, as (name, slot), by name as Caffe lists them.
        losses: (slot, weight) of each top that weighs in the loss.
        loss_weights: weight of each named blob that is an output or weighs in the loss.
        wants_gradient: slots of source layers whose gradient is asked for, by force_backward or propagate_down.
    """

    steps: tuple[Step, ...]
    slots: int
    names: dict[str, int]
    outputs: tuple[tuple[str, int], ...]
    losses: tuple[tuple[int, float], ...]
    loss_weights: dict[str, float]
    wants_gradient: frozenset[int]


def plan_net(definition: NetDefinition, class_of: ClassOf) -> NetPlan:
    """Plan a net whose definition has already been filtered for its phase.

    Args:
        definition: the net.
        class_of: layer type -> class; raises `LayerError` for an unknown one.

    Raises:
        DefinitionError: a type or a bottom is unknown, a top is made twice, or loss_weight or propagate_down is given
            a wrong number of times.
    """
    planner = _Planner(definition=definition, class_of=class_of)
    for index in range(len(definition.param.layer)):
        try:
            planner.add(index)
        except LayerError as error:
            raise definition.error(index, str(error)) from error
    return planner.finish()


@dataclass(slots=True, kw_only=True)
class _Planner:
    """What is known after the layers seen so far."""

    definition: NetDefinition
    class_of: ClassOf
    steps: list[Step] = field(default_factory=list)
    classes: list[type[Layer]] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    maker: list[int] = field(default_factory=list)  # slot -> index of the layer that writes it
    uses: list[int] = field(default_factory=list)  # slot -> how many bottoms read it
    available: set[str] = field(default_factory=set)
    losses: list[tuple[int, float]] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    wanted: set[int] = field(default_factory=set)

    def add(self, index: int) -> None:
        """Take the next layer in.

        Raises:
            LayerError: the layer does not fit those before it.
        """
        param = self.definition.param.layer[index]
        kind = self.class_of(param.type)
        self.classes.append(kind)
        bottoms = tuple(self._bottom(param, name) for name in param.bottom)
        down = self._propagate_down(param)
        tops = tuple(self._top(param, index, place) for place in range(self._top_count(param, kind)))
        self._weigh(param, kind, tops)
        is_source = not bottoms
        if self.definition.param.force_backward and is_source:
            self.wanted.update(tops)
        self.wanted.update(
            slot
            for slot, flag in zip(bottoms, down, strict=True)
            if flag and not self.steps[self.maker[slot]].bottoms
        )
        self.steps.append(
            Step(layer=index, bottoms=bottoms, tops=tops, cut=tuple(flag is False for flag in down))
        )

    def finish(self) -> NetPlan:
        """Return the plan, once every layer is in."""
        outputs = tuple((name, self.names[name]) for name in sorted(self.available))
        kept = {slot for _, slot in outputs} | {slot for slot, _ in self.losses}
        return NetPlan(
            steps=tuple(self._with_lifetimes(kept)),
            slots=len(self.maker),
            names=dict(self.names),
            outputs=outputs,
            losses=tuple(self.losses),
            loss_weights={name: 0.0 for name, _ in outputs} | self.weights,
            wants_gradient=frozenset(self.wanted),
        )

    def _bottom(self, param: LayerParameter, name: str) -> int:
        if name not in self.names:
            raise LayerError(unknown("bottom", name, self.names) + self._later(name))
        slot = self.names[name]
        self.available.discard(name)
        self.uses[slot] += 1
        return slot

    def _later(self, name: str) -> str:
        """Says so when a later layer makes the blob: Caffe runs layers in the order of the file."""
        for later in self.definition.param.layer[len(self.steps) + 1 :]:
            if name in later.top:
                return f" (layer '{later.name}', which makes it, comes later in the file; expected before)"
        return ""

    def _top_count(self, param: LayerParameter, kind: type[Layer]) -> int:
        return max(len(param.top), kind.MIN_TOPS if kind.IS_LOSS else 0)

    def _top(self, param: LayerParameter, index: int, place: int) -> int:
        slot = len(self.maker)
        if place < len(param.top):
            name = param.top[place]
            in_place = place < len(param.bottom) and param.bottom[place] == name
            if name in self.names and not in_place:
                first = self.definition.param.layer[self.maker[self.names[name]]].name
                raise LayerError(
                    f"top '{name}' is already made by layer '{first}', expected a new name (or the bottom "
                    "at the same place, to run in place)"
                )
            self.names[name] = slot
            self.available.add(name)
        self.maker.append(index)
        self.uses.append(0)
        return slot

    def _propagate_down(self, param: LayerParameter) -> list[bool | None]:
        """For each bottom: forced, stopped, or None where the definition says nothing."""
        given = list(param.propagate_down)
        if not given:
            return [None] * len(param.bottom)
        if len(given) != len(param.bottom):
            raise LayerError(
                f"propagate_down is given {len(given)} times for {counted(len(param.bottom), 'bottom')}, expected once each"
            )
        return list(given)

    def _weigh(self, param: LayerParameter, kind: type[Layer], tops: tuple[int, ...]) -> None:
        given = list(param.loss_weight)
        if given and len(given) != len(tops):
            raise LayerError(
                f"loss_weight is given {len(given)} times for {counted(len(tops), 'top')}, expected once each"
            )
        if not given and kind.IS_LOSS:
            given = [1.0] + [0.0] * (len(tops) - 1)
        for place, (slot, weight) in enumerate(zip(tops, given, strict=False)):
            if weight:
                self.losses.append((slot, weight))
            if weight and place < len(param.top):
                self.weights[param.top[place]] = weight

    def _with_lifetimes(self, kept: set[int]) -> list[Step]:
        """Say after which step each slot is dead, and which in-place layers may really overwrite."""
        last = {slot: place for place, step in enumerate(self.steps) for slot in (*step.tops, *step.bottoms)}
        steps = []
        for place, step in enumerate(self.steps):
            mine = dict.fromkeys((*step.bottoms, *step.tops))
            dead = tuple(slot for slot in mine if last[slot] == place and slot not in kept)
            steps.append(replace(step, dead=dead, overwrites=self._overwrites(step, kept)))
        return steps

    def _overwrites(self, step: Step, kept: set[int]) -> bool:
        param = self.definition.param.layer[step.layer]
        if not (param.bottom and param.top and param.bottom[0] == param.top[0]):
            return False
        slot = step.bottoms[0]
        return (
            self.uses[slot] == 1
            and slot not in kept
            and self.classes[self.maker[slot]].TOPS_MAY_BE_OVERWRITTEN
        )
