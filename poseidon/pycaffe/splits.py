"""A net in which every blob has one reader: Caffe's InsertSplits.

Law: pure; a definition in, a definition out. A top that n > 1 bottoms read goes through a Split layer with n tops, one
a reader, so that the gradients of the readers meet in that layer's backward pass. A top that weighs in the loss counts
as a reader of itself, and the weight moves to the split's first top. Names are Caffe's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from poseidon.proto.caffe_pb2 import LayerParameter, NetParameter
from poseidon.proto.definition import NetDefinition

Top = tuple[int, int]
"""Index of a layer, and which of its tops."""


def split_name(layer: str, blob: str, place: int) -> str:
    """Return the name of the Split layer behind top `place` of a layer."""
    return f"{blob}_{layer}_{place}_split"


def insert_splits(definition: NetDefinition) -> NetDefinition:
    """Return the net with its Split layers; it has been filtered for its phase.

    A bottom that nobody makes is left for the planner to complain about.

    Raises:
        DefinitionError: a layer runs in place on a blob that others read too.
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
        for place, blob in enumerate(old.bottom):
            top = sources.get((index, place))
            if top is not None and readers[top] > 1:
                if place < len(old.top) and old.top[place] == blob:
                    raise definition.error(
                        index,
                        f"runs in place on '{blob}', which others read too; expected a top of another name",
                    )
                maker = definition.param.layer[top[0]].name
                layer.bottom[place] = f"{split_name(maker, blob, top[1])}_{used[top]}"
                used[top] += 1
        splits = [top for top in ((index, place) for place in range(len(old.top))) if readers[top] > 1]
        for top in splits:
            weight = weights.get(top, 0.0)
            param.layer.append(_split(old.name, old.top[top[1]], top[1], readers[top], weight))
            if weight:
                del layer.loss_weight[:]
        if definition.layer_lines:
            lines += [definition.layer_lines[index]] * (1 + len(splits))
    return replace(definition, param=param, layer_lines=tuple(lines))


def _readers(net: NetParameter) -> tuple[dict[Top, Top], Counter[Top], dict[Top, float]]:
    """For each bottom the top it reads; for each top how many read it; the weights that were given."""
    latest: dict[str, Top] = {}
    sources: dict[Top, Top] = {}
    readers: Counter[Top] = Counter()
    weights: dict[Top, float] = {}
    for index, layer in enumerate(net.layer):
        for place, blob in enumerate(layer.bottom):
            if blob in latest:
                sources[index, place] = latest[blob]
                readers[latest[blob]] += 1
        latest |= {blob: (index, place) for place, blob in enumerate(layer.top)}
        for top, weight in _weights(index, layer):
            weights[top] = weight
            readers[top] += bool(weight)
    return sources, readers, weights


def _weights(index: int, layer: LayerParameter) -> Iterator[tuple[Top, float]]:
    return (((index, place), weight) for place, weight in enumerate(layer.loss_weight[: len(layer.top)]))


def _split(layer: str, blob: str, place: int, count: int, weight: float) -> LayerParameter:
    name = split_name(layer, blob, place)
    split = LayerParameter(name=name, type="Split", bottom=[blob])
    split.top.extend(f"{name}_{number}" for number in range(count))
    if weight:
        split.loss_weight.extend([weight] + [0.0] * (count - 1))
    return split
