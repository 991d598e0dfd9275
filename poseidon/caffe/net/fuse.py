"""The functions of a net's layers as they run: fused, so that a definition is as fast as a
hand-written torch module, and in the chosen precision.

Law: a fused net computes the same results up to rounding, and updates the same statistics. Only
blobs that no other layer reads disappear: no outputs, no losses, no blobs whose gradient is wanted.
The decision depends only on the plan and on the definitions and classes of the layers.

* BatchNorm and the Scale along axis 1 that is its only reader: one pass over the memory instead of
  three.
* A sum (Eltwise) overwrites a bottom that no other layer reads, like `x += y`.

`in_form` brings the bottoms of a layer to their form: type, and order in memory. Law: products, and
the layers between them that keep a type, may run in 16 bits and with channels last. Every other
layer gets contiguous float32: losses, softmax, LRN, sums of many values, indices, and layers of
users. Parameters, statistics, their gradients, the loss and the outputs of a net are float32
throughout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from poseidon.caffe.layers.base import Layer, LayerContext
from poseidon.caffe.layers.batch_norm import BatchNorm
from poseidon.caffe.layers.combine import Eltwise
from poseidon.caffe.layers.convolution import BaseConvolution
from poseidon.caffe.layers.pointwise import Scale
from poseidon.caffe.net.net_plan import LayerStep, NetPlan

Run = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class FusedStep:
    """A step of the plan, or two fused ones.

    Attributes:
        step: the slots read and written; its layer is the first of the two.
        run: the function from bottoms to tops.
    """

    step: LayerStep
    run: Run


def fuse(
    plan: NetPlan,
    layers: Sequence[Layer],
    runs: Sequence[Run] | None = None,
    *,
    apart: frozenset[int] = frozenset(),
) -> tuple[FusedStep, ...]:
    """Return the plan's steps in order, with pairs fused.

    Args:
        layers: the layers, one for each step, set up.
        runs: the function of each step that is not fused; None: its layer.
        apart: the indices of steps that must not be fused.
    """
    pairs = norm_scale_pairs(plan, layers).items()
    scales = {norm: scale for norm, scale in pairs if apart.isdisjoint((norm, scale))}
    sums = {
        position: index
        for position, index in sums_in_place(plan, layers).items()
        if position not in apart
    }
    runs = layers if runs is None else runs
    fused_scales = set(scales.values())
    fused = []
    for position, (step, layer) in enumerate(zip(plan.steps, layers, strict=True)):
        if position in scales:
            fused.append(
                _fuse_pair(step, plan.steps[scales[position]], layer, layers[scales[position]])
            )
        elif position in sums:
            assert isinstance(layer, Eltwise)
            fused.append(FusedStep(step, partial(_add_into, layer, sums[position])))
        elif position not in fused_scales:
            fused.append(FusedStep(step, runs[position]))
    return tuple(fused)


def norm_scale_pairs(plan: NetPlan, layers: Sequence[Layer]) -> dict[int, int]:
    """Map the index of each BatchNorm whose only reader is a learned Scale of
    its channels to the index of that Scale.
    """
    private = _private_slots(plan)
    norms = {
        step.tops[0]: position
        for position, step in enumerate(plan.steps)
        if isinstance(layers[position], BatchNorm) and step.tops[0] in private
    }
    return {
        norms[step.bottoms[0]]: position
        for position, step in enumerate(plan.steps)
        if _scales_channels(layers[position], step) and step.bottoms[0] in norms
    }


def sums_in_place(plan: NetPlan, layers: Sequence[Layer]) -> dict[int, int]:
    """Map the index of each plain sum that may overwrite a bottom to the index of that bottom."""
    private = _private_slots(plan)
    free = {
        slot
        for step, layer in zip(plan.steps, layers, strict=True)
        if layer.TOPS_MAY_BE_OVERWRITTEN and step.bottoms
        for slot in step.tops
        if slot in private
    }
    return {
        position: index
        for position, (step, layer) in enumerate(zip(plan.steps, layers, strict=True))
        if isinstance(layer, Eltwise) and layer.is_plain_sum and not any(step.cut)
        for index in [next((i for i, slot in enumerate(step.bottoms) if slot in free), None)]
        if index is not None
    }


def _private_slots(plan: NetPlan) -> set[int]:
    """Return the slots that exactly one bottom reads, that are neither outputs nor losses, and that
    need no gradient.
    """
    uses = Counter(slot for step in plan.steps for slot in step.bottoms)
    seen = (
        {slot for _, slot in plan.outputs} | {slot for slot, _ in plan.losses} | plan.wants_gradient
    )
    return {slot for slot, count in uses.items() if count == 1} - seen


def _scales_channels(layer: Layer, step: LayerStep) -> bool:
    param = layer.param.scale_param
    return (
        isinstance(layer, Scale)
        and len(step.bottoms) == 1
        and (param.axis, param.num_axes) == (1, 1)
        and not any(step.cut)
    )


def _fuse_pair(first: LayerStep, second: LayerStep, norm: Layer, scale: Layer) -> FusedStep:
    assert isinstance(norm, BatchNorm) and isinstance(scale, Scale)
    between = first.tops[0]
    dead = tuple(slot for slot in (*first.dead, *second.dead) if slot != between)
    return FusedStep(
        replace(first, tops=second.tops, dead=dead), partial(normalize_and_scale, norm, scale)
    )


def normalize_and_scale(norm: BatchNorm, scale: Scale, bottom: Tensor) -> Tensor:
    """Compute `scale` of `norm` of the bottom in one operation."""
    norm.run_pre_hooks()
    scale.run_pre_hooks()
    weight, *bias = scale.blobs()
    top = norm.normalize(bottom, weight, bias[0] if bias else None)
    scale.run_hooks((top,), top)
    norm.run_hooks((bottom,), top)  # in reverse order, because the calls are nested
    return top


def _add_into(layer: Eltwise, index: int, *bottoms: Tensor) -> Tensor:
    layer.run_pre_hooks()
    top = layer.add_into(index, *bottoms)
    layer.run_hooks(bottoms, top)
    return top


def in_form(layer: Layer, run: Run) -> Run:
    """Return the function of a layer that brings its bottoms to their form first."""
    context = layer.context
    if context.autocast is None and not context.channels_last:
        return run
    if not layer.takes_any_form:
        return lambda *bottoms: run(*map(plain, bottoms))
    moves = context.channels_last and isinstance(layer, BaseConvolution)

    def compute(*bottoms: Tensor) -> Tensor | tuple[Tensor, ...]:
        if moves:
            bottoms = tuple(map(_channels_last, bottoms))
        with _autocast(context):
            return run(*bottoms)

    return compute


def plain(value: Tensor) -> Tensor:
    """Return a blob in contiguous memory; floating-point numbers become float32."""
    return (value.float() if value.is_floating_point() else value).contiguous()


def _channels_last(image: Tensor) -> Tensor:
    if image.dim() != 4:
        return image
    return image.contiguous(memory_format=torch.channels_last)


def _autocast(context: LayerContext) -> torch.autocast:
    kind, of_16_bits = context.device.type, context.autocast
    return torch.autocast(kind, of_16_bits or torch.bfloat16, enabled=of_16_bits is not None)
