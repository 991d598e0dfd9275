"""From a definition to the nodes and blobs of a net that keeps its blobs.

Law: names, order and flags are those of Caffe's Net::Init, Split layers included.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from poseidon.layers.base import Layer, LayerContext
from poseidon.layers.blob import Blob, Blobs
from poseidon.layers.python_layer import Python
from poseidon.net.compile import compile_net, filter_phase
from poseidon.net.net import Net as Compiled
from poseidon.net.plan import Step
from poseidon.proto.caffe_pb2 import LayerParameter, NetState
from poseidon.proto.definition import NetDefinition
from poseidon.pycaffe.need import Facts, needs
from poseidon.pycaffe.nodes import Joined, Node, make_node
from poseidon.pycaffe.splits import insert_splits

# The name that Caffe gives the top of a loss that the definition does not name.
AUTOMATIC = "(automatic)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A net's parts.

    Attributes:
        compiled: the torch net whose layers run; itself never run.
        nodes: one a layer, in order.
        blobs: by name, in the order they are made.
        bottoms: each layer's bottoms, by name.
        tops: each layer's tops, by name.
        loss_weights: of each blob.
    """

    compiled: Compiled
    nodes: list[Node]
    blobs: OrderedDict[str, Blob]
    bottoms: OrderedDict[str, list[str]]
    tops: OrderedDict[str, list[str]]
    loss_weights: OrderedDict[str, float]


def build(definition: NetDefinition, context: LayerContext, state: NetState) -> Built:
    """Build a net.

    Raises:
        DefinitionError: a mistake in the definition.
        DataError: a database or a mean file is missing or broken.
    """
    definition = insert_splits(filter_phase(definition, state))
    compiled = compile_net(definition, context, state=state)
    try:
        return _join(compiled)
    except BaseException:
        compiled.close()
        raise


def _join(compiled: Compiled) -> Built:
    params = compiled.definition.param.layer
    layers = [layer for _, layer in compiled.layer_modules]
    tops = [_top_names(param, step) for param, step in zip(params, compiled.plan.steps, strict=True)]
    weights = _weights(compiled.plan.steps, dict(compiled.plan.losses))
    facts = [
        Facts(
            kind=param.type,
            bottoms=tuple(param.bottom),
            tops=names,
            propagate_down=tuple(param.propagate_down),
            learns=any(parameter.requires_grad for parameter in layer.sources()),
            weighs=tuple(map(bool, weighs)),
        )
        for param, names, layer, weighs in zip(params, tops, layers, weights, strict=True)
    ]
    blobs = _blobs(compiled, layers, tops)
    learned = _learned(layers)
    nodes = [
        make_node(
            Joined(
                layer=layer,
                bottoms=[blobs[name] for name in fact.bottoms],
                tops=[blobs[name] for name in fact.tops],
                blobs=own,
                need=need,
                weights=weighs,
            )
        )
        for layer, fact, own, need, weighs in zip(
            layers,
            facts,
            learned,
            needs(facts, force=compiled.definition.param.force_backward),
            weights,
            strict=True,
        )
    ]
    losses = OrderedDict.fromkeys(blobs, 0.0)
    for names, weighs in zip(tops, weights, strict=True):
        losses.update((name, weight) for name, weight in zip(names, weighs, strict=True) if weight)
    return Built(
        compiled=compiled,
        nodes=nodes,
        blobs=blobs,
        bottoms=OrderedDict((param.name, list(param.bottom)) for param in params),
        tops=OrderedDict((param.name, list(names)) for param, names in zip(params, tops, strict=True)),
        loss_weights=losses,
    )


def _top_names(param: LayerParameter, step: Step) -> tuple[str, ...]:
    return (*param.top, *[AUTOMATIC] * (len(step.tops) - len(param.top)))


def _weights(steps: Sequence[Step], losses: dict[int, float]) -> list[tuple[float, ...]]:
    return [tuple(losses.get(slot, 0.0) for slot in step.tops) for step in steps]


def _blobs(
    compiled: Compiled, layers: Sequence[Layer], tops: Sequence[tuple[str, ...]]
) -> OrderedDict[str, Blob]:
    """Return a blob for each name; where a Python layer made its top, that one, with what its setup wrote."""
    blobs: OrderedDict[str, Blob] = OrderedDict()
    for layer, names in zip(layers, tops, strict=True):
        for place, name in enumerate(names):
            if name in blobs:
                continue
            if isinstance(layer, Python):
                blobs[name] = layer.top_blobs[place]
            else:
                shape = compiled.blob_shapes.get(name, ())
                blobs[name] = Blob(*shape, device=compiled.context.device)
    return blobs


def _learned(layers: Sequence[Layer]) -> list[Blobs]:
    """Return each layer's learnable blobs; those behind which one parameter is share data and diff."""
    owners: dict[nn.Parameter, Blob] = {}
    found = []
    for layer in layers:
        own = Blobs()
        mine = layer.instance.blobs if isinstance(layer, Python) and layer.instance else None
        for index, (parameter, shown) in enumerate(zip(layer.sources(), layer.blobs(), strict=True)):
            blob = mine[index] if mine is not None else Blob(*shown.shape, device=parameter.device)
            if parameter in owners:
                blob.share_data(owners[parameter])
                blob.share_diff(owners[parameter])
            elif mine is None:
                blob.bind(parameter.data.view(shown.shape))
            owners.setdefault(parameter, blob)
            own.append(blob)
        found.append(mine if mine is not None else own)
    return found
