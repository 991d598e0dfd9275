"""Steps of a plan that run as one, so that a definition costs no more than the same net written by hand.

Law: a fused net computes what the plan says, up to the rounding of a single value, and moves the same statistics. What
is fused away is a blob that nobody else reads: not an output, no part of the loss, no gradient asked for. The choice is
pure; it sees the plan and the layers' definitions and classes.

* BatchNorm and the Scale along axis 1 that alone reads it: one pass over the memory in place of three.
* A sum (Eltwise) writes into a bottom that nobody else needs, as `x += y` does by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from poseidon.layers.base import Layer
from poseidon.layers.common.combine import Eltwise
from poseidon.layers.neuron.affine import Scale
from poseidon.layers.neuron.batch_norm import BatchNorm
from poseidon.net.plan import NetPlan, Step

Run = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class FusedStep:
    """A step of the plan, or two that became one.

    Attributes:
        step: slots read and written; its layer is the first of the two.
        run: computes the tops from the bottoms.
    """

    step: Step
    run: Run


def fuse(
    plan: NetPlan,
    layers: Sequence[Layer],
    runs: Sequence[Run] | None = None,
    *,
    apart: frozenset[int] = frozenset(),
) -> tuple[FusedStep, ...]:
    """Return the plan's steps in order, with the pairs joined.

    Args:
        plan: how the layers are joined.
        layers: one a step, set up.
        runs: what runs each step that stays by itself; None: its layer.
        apart: places of steps that must stay so.
    """
    pairs = norm_scale_pairs(plan, layers).items()
    scales = {norm: scale for norm, scale in pairs if apart.isdisjoint((norm, scale))}
    sums = {place: index for place, index in sums_in_place(plan, layers).items() if place not in apart}
    runs = layers if runs is None else runs
    joined = set(scales.values())
    fused = []
    for place, (step, layer) in enumerate(zip(plan.steps, layers, strict=True)):
        if place in scales:
            fused.append(_joined(step, plan.steps[scales[place]], layer, layers[scales[place]]))
        elif place in sums:
            assert isinstance(layer, Eltwise)
            fused.append(FusedStep(step, partial(_add_into, layer, sums[place])))
        elif place not in joined:
            fused.append(FusedStep(step, runs[place]))
    return tuple(fused)


def norm_scale_pairs(plan: NetPlan, layers: Sequence[Layer]) -> dict[int, int]:
    """Place of each BatchNorm whose top only a learned Scale of its channels reads, with the place of that Scale."""
    private = _private_slots(plan)
    norms = {
        step.tops[0]: place
        for place, step in enumerate(plan.steps)
        if isinstance(layers[place], BatchNorm) and step.tops[0] in private
    }
    return {
        norms[step.bottoms[0]]: place
        for place, step in enumerate(plan.steps)
        if _scales_channels(layers[place], step) and step.bottoms[0] in norms
    }


def sums_in_place(plan: NetPlan, layers: Sequence[Layer]) -> dict[int, int]:
    """Place of each plain sum that may overwrite a bottom, with the index of that bottom."""
    private = _private_slots(plan)
    free = {
        slot
        for step, layer in zip(plan.steps, layers, strict=True)
        if layer.TOPS_MAY_BE_OVERWRITTEN and step.bottoms
        for slot in step.tops
        if slot in private
    }
    return {
        place: index
        for place, (step, layer) in enumerate(zip(plan.steps, layers, strict=True))
        if isinstance(layer, Eltwise) and layer.is_plain_sum and not any(step.cut)
        for index in [next((i for i, slot in enumerate(step.bottoms) if slot in free), None)]
        if index is not None
    }


def _private_slots(plan: NetPlan) -> set[int]:
    """Slots that one layer reads, once, and nobody else sees."""
    uses = Counter(slot for step in plan.steps for slot in step.bottoms)
    seen = {slot for _, slot in plan.outputs} | {slot for slot, _ in plan.losses} | plan.wants_gradient
    return {slot for slot, count in uses.items() if count == 1} - seen


def _scales_channels(layer: Layer, step: Step) -> bool:
    param = layer.param.scale_param
    return (
        isinstance(layer, Scale)
        and len(step.bottoms) == 1
        and (param.axis, param.num_axes) == (1, 1)
        and not any(step.cut)
    )


def _joined(first: Step, second: Step, norm: Layer, scale: Layer) -> FusedStep:
    assert isinstance(norm, BatchNorm) and isinstance(scale, Scale)
    between = first.tops[0]
    dead = tuple(slot for slot in (*first.dead, *second.dead) if slot != between)
    return FusedStep(replace(first, tops=second.tops, dead=dead), partial(normalize_and_scale, norm, scale))


def normalize_and_scale(norm: BatchNorm, scale: Scale, bottom: Tensor) -> Tensor:
    """What `scale` makes of what `norm` makes of the bottom."""
    norm.run_pre_hooks()
    scale.run_pre_hooks()
    weight, *bias = scale.blobs()
    top = norm.normalize(bottom, weight, bias[0] if bias else None)
    scale.run_hooks((top,), top)
    norm.run_hooks((bottom,), top)  # after that of the layer that began later: one lies within the other
    return top


def _add_into(layer: Eltwise, index: int, *bottoms: Tensor) -> Tensor:
    layer.run_pre_hooks()
    top = layer.add_into(index, *bottoms)
    layer.run_hooks(bottoms, top)
    return top
