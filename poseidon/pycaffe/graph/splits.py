"""Insertion of Split layers, so that every blob has one reader, as Caffe's InsertSplits.

Law: no I/O; a function from definition to definition. A top that n > 1 bottoms read gets a Split
layer with n tops, one for each reader, which adds up the gradients. A loss weight of a top counts
as a reader and moves to the first top of the Split. The names are Caffe's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from poseidon.caffe.proto.caffe_pb2 import LayerParameter, NetParameter
from poseidon.caffe.proto.definition import NetDefinition

Top = tuple[int, int]
"""The index of a layer, and the index of a top of it."""


def split_name(layer: str, blob: str, index: int) -> str:
    """Return the name of the Split layer for top `index` of a layer."""
    return f"{blob}_{layer}_{index}_split"


def insert_splits(definition: NetDefinition) -> NetDefinition:
    """Return the net with Split layers. It must have been filtered for its phase.

    An unknown bottom is ignored here; `plan_net` reports it.

    Raises:
        DefinitionError: a layer runs in place on a blob that other layers read.
    """
    sources, readers, weights = _readers(definition.param)
    param = NetParameter()
    param.CopyFrom(definition.param)
    del param.layer[:]
    lines: list[int] = []
    used: Counter[Top] = Counter({top: 1 for top, weight in weights.items() if weight})
    for index, old in enumerate(definition.param.layer):
        layer = param.layer.add()
        layer.CopyFrom(old)
        for position, blob in enumerate(old.bottom):
            top = sources.get((index, position))
            if top is not None and readers[top] > 1:
                if position < len(old.top) and old.top[position] == blob:
                    raise definition.error(
                        index,
                        f"runs in place on '{blob}', which other layers read; name its top "
                        "differently",
                    )
                writer = definition.param.layer[top[0]].name
                layer.bottom[position] = f"{split_name(writer, blob, top[1])}_{used[top]}"
                used[top] += 1
        splits = [
            top
            for top in ((index, position) for position in range(len(old.top)))
            if readers[top] > 1
        ]
        for top in splits:
            weight = weights.get(top, 0.0)
            param.layer.append(_split(old.name, old.top[top[1]], top[1], readers[top], weight))
            if weight:
                del layer.loss_weight[:]
        if definition.layer_lines:
            lines += [definition.layer_lines[index]] * (1 + len(splits))
    return replace(definition, param=param, layer_lines=tuple(lines))


def _readers(net: NetParameter) -> tuple[dict[Top, Top], Counter[Top], dict[Top, float]]:
    """Return the top of each bottom, the number of readers of each top, and the loss weights in
    the definition.
    """
    latest: dict[str, Top] = {}
    sources: dict[Top, Top] = {}
    readers: Counter[Top] = Counter()
    weights: dict[Top, float] = {}
    for index, layer in enumerate(net.layer):
        for position, blob in enumerate(layer.bottom):
            if blob in latest:
                sources[index, position] = latest[blob]
                readers[latest[blob]] += 1
        latest |= {blob: (index, position) for position, blob in enumerate(layer.top)}
        for top, weight in _weights(index, layer):
            weights[top] = weight
            readers[top] += bool(weight)
    return sources, readers, weights


def _weights(index: int, layer: LayerParameter) -> Iterator[tuple[Top, float]]:
    return (
        ((index, position), weight)
        for position, weight in enumerate(layer.loss_weight[: len(layer.top)])
    )


def _split(layer: str, blob: str, position: int, count: int, weight: float) -> LayerParameter:
    name = split_name(layer, blob, position)
    split = LayerParameter(name=name, type="Split", bottom=[blob])
    split.top.extend(f"{name}_{number}" for number in range(count))
    if weight:
        split.loss_weight.extend([weight] + [0.0] * (count - 1))
    return split
