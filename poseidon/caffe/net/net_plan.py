"""The plan of a net: the slots that each layer reads and writes.

Law: a plan depends on names and layer classes only, not on shapes and tensors. Layers run in the
order of the file, and a bottom must be the top of an earlier layer. Each top of each layer has its
own slot, also in place: the name then refers to the newer slot, and the older value is kept only
while the backward pass needs it. So a blob that is used twice needs no Split, and in-place layers
save memory without changing results. A layer runs in place only on a blob that no other layer reads.

Source for the rules: Caffe's Net::Init, AppendTop, AppendBottom and Layer::SetLossWeights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from poseidon.caffe.layers.base import Layer, LayerError
from poseidon.caffe.proto.caffe_pb2 import LayerParameter
from poseidon.caffe.proto.definition import NetDefinition
from poseidon.errors import counted, unknown

ClassOf = Callable[[str], type[Layer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStep:
    """The part of the plan for one layer.

    Attributes:
        layer: the index in the definition.
        bottoms: the slots read.
        tops: the slots written.
        cut: for each bottom, whether `propagate_down: false` stops the gradient.
        overwrites: the layer may overwrite its bottom with its top.
        dead: the slots that are not needed after this layer.
    """

    layer: int
    bottoms: tuple[int, ...]
    tops: tuple[int, ...]
    cut: tuple[bool, ...]
    overwrites: bool = False
    dead: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NetPlan:
    """The plan of a net.

    Attributes:
        steps: the steps, one for each layer in order.
        names: the slot of the last value of each blob, by name.
        outputs: the blobs that no layer reads, as (name, slot) by name in Caffe's order.
        losses: (slot, weight) of each top with a loss weight.
        loss_weights: the loss weight of each named output and loss blob.
        wants_gradient: the slots of source layers that need a gradient because of force_backward or
            propagate_down.
    """

    steps: tuple[LayerStep, ...]
    slots: int
    names: dict[str, int]
    outputs: tuple[tuple[str, int], ...]
    losses: tuple[tuple[int, float], ...]
    loss_weights: dict[str, float]
    wants_gradient: frozenset[int]


def plan_net(definition: NetDefinition, class_of: ClassOf) -> NetPlan:
    """Create the plan of a net whose definition has been filtered for its phase.

    Args:
        class_of: returns the class of a layer type; raises LayerError for an unknown type.

    Raises:
        DefinitionError: a type or a bottom is unknown, two layers have the same top, a layer runs in
            place on a top of a Split or a blob with more readers, or loss_weight or propagate_down
            occurs a wrong number of times.
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
    """The state of the planning after some layers."""

    definition: NetDefinition
    class_of: ClassOf
    steps: list[LayerStep] = field(default_factory=list)
    classes: list[type[Layer]] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    writer: list[int] = field(default_factory=list)  # slot -> index of the layer that writes it
    uses: list[int] = field(default_factory=list)  # slot -> number of bottoms that read it
    available: set[str] = field(default_factory=set)
    losses: list[tuple[int, float]] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    wanted: set[int] = field(default_factory=set)

    def add(self, index: int) -> None:
        """Add the next layer.

        Raises:
            LayerError: the layer does not match the earlier ones.
        """
        param = self.definition.param.layer[index]
        kind = self.class_of(param.type)
        self.classes.append(kind)
        bottoms = tuple(self._bottom(param, name) for name in param.bottom)
        down = self._propagate_down(param)
        tops = tuple(
            self._top(param, index, position) for position in range(self._top_count(param, kind))
        )
        self._add_losses(param, kind, tops)
        is_source = not bottoms
        if self.definition.param.force_backward and is_source:
            self.wanted.update(tops)
        self.wanted.update(
            slot
            for slot, flag in zip(bottoms, down, strict=True)
            if flag and not self.steps[self.writer[slot]].bottoms
        )
        self.steps.append(
            LayerStep(
                layer=index, bottoms=bottoms, tops=tops, cut=tuple(flag is False for flag in down)
            )
        )

    def finish(self) -> NetPlan:
        """Return the plan after all layers have been added."""
        outputs = tuple((name, self.names[name]) for name in sorted(self.available))
        kept = {slot for _, slot in outputs} | {slot for slot, _ in self.losses}
        return NetPlan(
            steps=tuple(self._with_lifetimes(kept)),
            slots=len(self.writer),
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
        """Return a hint if a later layer produces the blob, or one that is left out, else an empty
        string.
        """
        for later in self.definition.param.layer[len(self.steps) + 1 :]:
            if name in later.top:
                return f" (layer '{later.name}', which produces it, is later in the file; expected before)"
        if name in self.definition.left_out:
            return " (a layer produces it in a different phase, stage or level)"
        return ""

    def _top_count(self, param: LayerParameter, kind: type[Layer]) -> int:
        return max(len(param.top), kind.TOPS[0] if kind.IS_LOSS else 0)

    def _top(self, param: LayerParameter, index: int, position: int) -> int:
        slot = len(self.writer)
        if position < len(param.top):
            name = param.top[position]
            in_place = position < len(param.bottom) and param.bottom[position] == name
            if name in self.names:
                first = self.definition.param.layer[self.writer[self.names[name]]]
                if not in_place:
                    raise LayerError(
                        f"top '{name}' is already produced by layer '{first.name}', expected a new "
                        "name (or the bottom with the same index, to run in place)"
                    )
                if self._is_read_elsewhere(self.names[name]):
                    raise LayerError(
                        f"runs in place on '{name}', which other layers read; name its top "
                        "differently"
                    )
                if first.type == "Split":  # in Caffe they share their memory
                    raise LayerError(
                        f"runs in place on '{name}', one of the copies that layer '{first.name}' "
                        "(Split) makes; name its top differently"
                    )
            self.names[name] = slot
            self.available.add(name)
        self.writer.append(index)
        self.uses.append(0)
        return slot

    def _is_read_elsewhere(self, slot: int) -> bool:
        """Return whether a blob has readers beside the layer that is being added. Its Split would
        give that layer's bottom a different name in Caffe. A loss weight counts as a reader.
        """
        return self.uses[slot] > 1 or slot in dict(self.losses)

    def _propagate_down(self, param: LayerParameter) -> list[bool | None]:
        """Return for each bottom True (forced), False (stopped), or None (neither)."""
        values = list(param.propagate_down)
        if not values:
            return [None] * len(param.bottom)
        if len(values) != len(param.bottom):
            raise LayerError(
                f"propagate_down occurs {len(values)} times for "
                f"{counted(len(param.bottom), 'bottom')}, expected once each"
            )
        # As in Caffe, force_backward overrides false.
        forced = self.definition.param.force_backward
        return [flag or None for flag in values] if forced else list(values)

    def _add_losses(self, param: LayerParameter, kind: type[Layer], tops: tuple[int, ...]) -> None:
        values = list(param.loss_weight)
        if values and len(values) != len(tops):
            raise LayerError(
                f"loss_weight occurs {len(values)} times for {counted(len(tops), 'top')}, "
                "expected once each"
            )
        if not values and kind.IS_LOSS:
            values = [1.0] + [0.0] * (len(tops) - 1)
        for position, (slot, weight) in enumerate(zip(tops, values, strict=False)):
            if not math.isfinite(weight):
                raise LayerError(f"loss_weight is {weight}, expected a finite number")
            if weight:
                self.losses.append((slot, weight))
            if weight and position < len(param.top):
                self.weights[param.top[position]] = weight

    def _with_lifetimes(self, kept: set[int]) -> list[LayerStep]:
        """Return the steps with their dead slots, and with `overwrites` for layers that may run
        in place.
        """
        last = {
            slot: position
            for position, step in enumerate(self.steps)
            for slot in (*step.tops, *step.bottoms)
        }
        steps = []
        for position, step in enumerate(self.steps):
            used = dict.fromkeys((*step.bottoms, *step.tops))
            dead = tuple(slot for slot in used if last[slot] == position and slot not in kept)
            steps.append(replace(step, dead=dead, overwrites=self._overwrites(step)))
        return steps

    def _overwrites(self, step: LayerStep) -> bool:
        param = self.definition.param.layer[step.layer]
        in_place = param.bottom and param.top and param.bottom[0] == param.top[0]
        return bool(in_place) and self.classes[self.writer[step.bottoms[0]]].TOPS_MAY_BE_OVERWRITTEN
