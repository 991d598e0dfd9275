"""Construction of a pycaffe net's graph, its nodes and blobs, from a definition.

Law: names, order and flags are as in Caffe's Net::Init, including Split layers.

Insertion of Split layers, so that every blob has one reader, as Caffe's InsertSplits.

Law: no I/O; a function from definition to definition. A top that n > 1 bottoms read gets a Split
layer with n tops, one for each reader, which adds up the gradients. A loss weight of a top counts
as a reader and moves to the first top of the Split. The names are Caffe's.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from poseidon.caffe.layers.base import Layer, LayerContext
from poseidon.caffe.layers.blob import Blob, BlobVec, RawBlobVec
from poseidon.caffe.layers.python_layer import Python
from poseidon.caffe.net.compile import compile_net, filter_phase
from poseidon.caffe.net.net import Net as Compiled
from poseidon.caffe.net.net_plan import LayerStep
from poseidon.caffe.net.params import ParamInfo
from poseidon.caffe.proto.caffe_pb2 import LayerParameter, NetParameter, NetState
from poseidon.caffe.proto.definition import NetDefinition
from poseidon.pycaffe.nodes import NODES, LayerInfo, LayerNode, backward_flags

Top = tuple[int, int]
"""The index of a layer, and the index of a top of it."""


def split_name(layer: str, blob: str, index: int) -> str:
    """Return the name of the Split layer for top `index` of a layer."""
    return f"{blob}_{layer}_{index}_split"


def insert_splits(definition: NetDefinition) -> NetDefinition:
    """Return the net with Split layers. It must have been filtered for its phase.

    Mistakes are ignored here, and `plan_net` reports them: an unknown bottom, a layer that runs in
    place on a blob that other layers read.
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
            in_place = position < len(old.top) and old.top[position] == blob
            if top is not None and readers[top] > 1 and not in_place:
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
        for position, weight in enumerate(layer.loss_weight[: len(layer.top)]):
            weights[index, position] = weight
            readers[index, position] += bool(weight)
    return sources, readers, weights


def _split(layer: str, blob: str, position: int, count: int, weight: float) -> LayerParameter:
    name = split_name(layer, blob, position)
    split = LayerParameter(name=name, type="Split", bottom=[blob])
    split.top.extend(f"{name}_{number}" for number in range(count))
    if weight:
        split.loss_weight.extend([weight] + [0.0] * (count - 1))
    return split


# Caffe's name for an unnamed top of a loss.
AUTOMATIC = "(automatic)"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetGraph:
    """The graph of a net.

    Attributes:
        compiled: the torch net that owns the layers. Its own `forward` is not used.
        nodes: the nodes, one for each layer in order.
        bottoms: the names of the bottoms of each layer.
        tops: the names of the tops of each layer.
        loss_weights: the loss weight of each blob.
    """

    compiled: Compiled
    nodes: list[LayerNode]
    blobs: OrderedDict[str, Blob]
    bottoms: list[list[str]]
    tops: list[list[str]]
    loss_weights: OrderedDict[str, float]

    def learned_blobs(self) -> list[tuple[ParamInfo, Blob]]:
        """Return each learnable tensor with its blob, shared ones once."""
        indices = {name: index for index, (name, _) in enumerate(self.compiled.layer_modules)}
        return [
            # The name is `<layer>.<index of the blob>`.
            (info, self.nodes[indices[info.layer]].blobs[int(info.name.rpartition(".")[2])])
            for info in self.compiled.parameters_info
        ]


def build(definition: NetDefinition, context: LayerContext, state: NetState) -> NetGraph:
    """Build the graph of a net.

    Raises:
        DefinitionError: a mistake in the definition.
        DataError: a database or a mean file is missing or broken.
    """
    definition = insert_splits(filter_phase(definition, state))
    compiled = compile_net(definition, context, state=state)
    try:
        return _connect(compiled)
    except BaseException:
        compiled.close()
        raise


def _connect(compiled: Compiled) -> NetGraph:
    params = compiled.definition.param.layer
    layers = [layer for _, layer in compiled.layer_modules]
    tops = [
        (*param.top, *[AUTOMATIC] * (len(step.tops) - len(param.top)))
        for param, step in zip(params, compiled.plan.steps, strict=True)
    ]
    weights = _weights(compiled.plan.steps, dict(compiled.plan.losses))
    infos = [
        LayerInfo(
            kind=param.type,
            bottoms=tuple(param.bottom),
            tops=names,
            propagate_down=tuple(param.propagate_down),
            learns=any(parameter.requires_grad for parameter in layer.sources()),
            in_loss=tuple(map(bool, weights_of_tops)),
        )
        for param, names, layer, weights_of_tops in zip(params, tops, layers, weights, strict=True)
    ]
    blobs = _blobs(compiled, layers, tops)
    learned = _learned(layers)
    nodes = [
        NODES.get(type(layer), LayerNode)(
            layer=layer,
            bottoms=RawBlobVec(blobs[name] for name in info.bottoms),
            tops=RawBlobVec(blobs[name] for name in info.tops),
            blobs=own,
            flags=flags,
            weights=weights_of_tops,
        )
        for layer, info, own, flags, weights_of_tops in zip(
            layers,
            infos,
            learned,
            backward_flags(infos, force=compiled.definition.param.force_backward),
            weights,
            strict=True,
        )
    ]
    losses = OrderedDict.fromkeys(blobs, 0.0)
    for names, weights_of_tops in zip(tops, weights, strict=True):
        losses.update(
            (name, weight) for name, weight in zip(names, weights_of_tops, strict=True) if weight
        )
    return NetGraph(
        compiled=compiled,
        nodes=nodes,
        blobs=blobs,
        bottoms=[list(param.bottom) for param in params],
        tops=[list(names) for names in tops],
        loss_weights=losses,
    )


def _weights(steps: Sequence[LayerStep], losses: dict[int, float]) -> list[tuple[float, ...]]:
    return [tuple(losses.get(slot, 0.0) for slot in step.tops) for step in steps]


def _blobs(
    compiled: Compiled, layers: Sequence[Layer], tops: Sequence[tuple[str, ...]]
) -> OrderedDict[str, Blob]:
    """Return a blob for each name.

    For the top of a Python layer it is the layer's own, with what its setup wrote.
    """
    blobs: OrderedDict[str, Blob] = OrderedDict()
    for layer, names in zip(layers, tops, strict=True):
        for index, name in enumerate(names):
            if name in blobs:
                continue
            if isinstance(layer, Python):
                blobs[name] = layer.top_blobs[index]
            else:
                shape = compiled.blob_shapes.get(name, ())
                blobs[name] = Blob(*shape, device=compiled.context.device)
    return blobs


def _learned(layers: Sequence[Layer]) -> list[BlobVec]:
    """Return the learnable blobs of each layer. Blobs of the same parameter share data and diff."""
    owners: dict[nn.Parameter, Blob] = {}
    found = []
    for layer in layers:
        own = BlobVec()
        python_blobs = (
            layer.instance.blobs if isinstance(layer, Python) and layer.instance else None
        )
        for index, (parameter, view) in enumerate(zip(layer.sources(), layer.blobs(), strict=True)):
            blob = (
                python_blobs[index]
                if python_blobs is not None
                else Blob(*view.shape, device=parameter.device)
            )
            if parameter in owners:
                blob.share_data(owners[parameter])
                blob.share_diff(owners[parameter])
            elif python_blobs is None:
                blob.bind(parameter.data.view(view.shape))
            owners.setdefault(parameter, blob)
            own.append(blob)
        found.append(python_blobs if python_blobs is not None else own)
    return found
