"""A Caffe net as an ONNX model.

Law: the model computes what the net computes in the phase TEST. Layers that read data become
inputs; losses, accuracies and whatever needs labels are left out, and so are blobs that only they
read. The first axis of inputs is the dynamic batch where every blob allows it. A layer that ONNX
has no form of is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from poseidon.caffe.export import detection as _detection  # noqa: F401 - registers its emitters
from poseidon.caffe.export import shaping as _shaping  # noqa: F401 - registers its emitters
from poseidon.caffe.export import vision as _vision  # noqa: F401 - registers its emitters
from poseidon.caffe.export.graph import LAYERS, Exported, Graph, GraphBlob, Shape
from poseidon.caffe.layers.base import Layer, LayerContext, LayerError
from poseidon.caffe.layers.registry import replaced
from poseidon.caffe.layers.sources import Input, Source, dummy_shapes
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TEST, LayerParameter
from poseidon.caffe.proto.definition import NetDefinition
from poseidon.errors import DefinitionError, UsageError

NEEDS_LABELS = frozenset(
    {
        *("Accuracy", "SoftmaxWithLoss", "SigmoidCrossEntropyLoss", "HingeLoss", "InfogainLoss"),
        *(
            "MultinomialLogisticLoss",
            "EuclideanLoss",
            "ContrastiveLoss",
            "SmoothL1Loss",
            "MultiBoxLoss",
        ),
        *("SmoothL1LossOHEM", "SoftmaxWithLossOHEM", "BoxAnnotatorOHEM", "DetectionEvaluate"),
        *("AnchorTarget", "ProposalTarget", "HDF5Output"),
    }
)
"""The layer types that are left out: they need labels, or make or write them."""


def inference_definition(definition: NetDefinition, shapes: Mapping[str, Shape]) -> NetDefinition:
    """Return a net of the phase TEST whose data comes from its caller, without the
    layers that need labels and without labels.

    Args:
        definition: filtered for the phase.
        shapes: of tops of layers that read data, by name. The first such top needs one; a top
            without a shape is left out with the layers that need it.

    Raises:
        UsageError: a name is not such a top, or no shape is given for the first one.
    """
    layers = definition.param.layer
    readers = [i for i, layer in enumerate(layers) if not layer.bottom and not _is_constant(layer)]
    known = [top for i in readers if reads_data(layers[i]) for top in layers[i].top]
    unknown = [name for name in shapes if name not in known]
    if unknown:
        raise UsageError(
            f"there is no data '{unknown[0]}' in this net; expected "
            f"{', '.join(known) or 'no --input: the net has Input layers'}"
        )
    if known and known[0] not in shapes:
        raise UsageError(
            f"the net reads data: add --input={known[0]}:1,C,H,W with the shape that it has after "
            "cropping, or export the deploy definition"
        )
    absent, kept = {name for name in known if name not in shapes}, []
    for index, layer in enumerate(layers):
        needs = set(layer.bottom) & absent
        if needs_labels(layer) or needs or (index in readers and set(layer.top) <= absent):
            absent |= set(layer.top) - set(layer.bottom)
        else:
            kept.append(index)
    read = {bottom for index in kept for bottom in layers[index].bottom}
    kept = [i for i in kept if i not in readers or read & set(layers[i].top)]
    changed = definition.with_layers(kept)
    for layer in changed.param.layer:
        if not layer.bottom and not _is_constant(layer):
            _become_input(layer, read, shapes)
    return changed


def _become_input(layer: LayerParameter, read: Set[str], shapes: Mapping[str, Shape]) -> None:
    """Turn a layer that reads data into an Input layer with the tops that are read."""
    given = [list(shape.dim) for shape in layer.input_param.shape]
    known: dict[str, Sequence[int]] = dict(shapes)
    if layer.type == "Input":
        known = dict(
            zip(layer.top, given * (len(layer.top) if len(given) == 1 else 1), strict=True)
        )
    elif layer.type == "DummyData":
        known = (
            dict(zip(layer.top, dummy_shapes(layer.dummy_data_param, len(layer.top)), strict=True))
            | known
        )
    tops, name = [top for top in layer.top if top in known and top in read], layer.name
    layer.Clear()
    layer.name, layer.type = name, "Input"
    layer.top.extend(tops)
    for top in tops:
        layer.input_param.shape.add(dim=known[top])


_SHAPED = ("Input", "DummyData")
"""The layers without bottoms whose definition has the shapes of the tops."""


def reads_data(layer: LayerParameter) -> bool:
    """Return whether a layer reads data, whose shape its definition need not have."""
    return not (layer.bottom or _is_constant(layer) or layer.type in _SHAPED)


def _is_constant(layer: LayerParameter) -> bool:
    """Return whether a layer without bottoms gives the same in every pass."""
    random = any(filler.type != "constant" for filler in layer.dummy_data_param.data_filler)
    return layer.type == "Parameter" or (layer.type == "DummyData" and not random)


def needs_labels(layer: LayerParameter) -> bool:
    """Return whether a layer is left out; a Python layer with a loss weight is a loss."""
    kind = replaced(layer, LayerContext(phase=TEST, seed=1)).type
    return kind in NEEDS_LABELS or (kind == "Python" and any(layer.loss_weight))


def export_net(net: Net, *, name: str = "") -> Exported:
    """Return the ONNX model of a net of the phase TEST whose data comes by Input layers.

    Raises:
        DefinitionError: a layer has no form in ONNX.
        UsageError: `onnx` is not installed, or the net has no inputs.
    """
    inputs = net.input_shapes
    if not inputs:
        raise UsageError("the net has no inputs, expected Input layers")
    dynamic, fixed = _dynamic_slots(net)
    changing = net.changing_slots
    dynamic |= changing
    shapes = net.slot_shapes
    graph = Graph()
    values: dict[int, str] = {}
    given: list[GraphBlob] = []
    for step, (name_of_layer, layer) in zip(net.plan.steps, net.layer_modules, strict=True):
        if isinstance(layer, Input):
            for top, slot in zip(layer.param.top, step.tops, strict=True):
                values[slot] = graph.input(top, shapes[slot], dynamic=slot in dynamic)
                given.append(GraphBlob(name=top, shape=shapes[slot], dynamic=slot in dynamic))
            continue
        bottoms = [
            GraphBlob(name=values[s], shape=shapes[s], dynamic=s in dynamic) for s in step.bottoms
        ]
        tops = [GraphBlob(shape=shapes[s], dynamic=s in dynamic) for s in step.tops]
        graph.scope = name_of_layer
        for slot, top, value in zip(
            step.tops, layer.param.top, _emit(net, graph, layer, bottoms, tops), strict=True
        ):
            last = net.plan.names[top] == slot  # in place, the last value has the name
            values[slot] = graph.rename(value, top) if last else value
    outputs: list[GraphBlob] = []
    for top, slot in net.plan.outputs:
        value = values[slot]
        if value in inputs or value in (blob.name for blob in outputs):
            graph.scope = top
            value = graph.op("Identity", value)
        known = slot not in changing
        outputs.append(
            GraphBlob(
                name=graph.rename(value, top),
                shape=shapes[slot],
                dynamic=slot in dynamic,
                known=known,
            )
        )
    return Exported(
        model=graph.model(name, outputs), inputs=tuple(given), outputs=tuple(outputs), fixed=fixed
    )


def _emit(
    net: Net, graph: Graph, layer: Layer, bottoms: list[GraphBlob], tops: list[GraphBlob]
) -> list[str]:
    emitter = LAYERS.get(layer.param.type)
    try:
        if emitter is None:
            raise LayerError(f"of type {layer.param.type} has no form in ONNX")
        return list(emitter(graph, layer, bottoms, tops))
    except LayerError as error:
        raise DefinitionError(
            f"layer '{layer.param.name}' {error}", source=net.definition.source
        ) from error


def _dynamic_slots(net: Net) -> tuple[frozenset[int], str]:
    """Return the slots whose first extent is the batch, by setting the net up for
    another batch; and why there are none.
    """
    before, first = net.slot_shapes, net.input_shapes
    batches = {shape[0] for shape in first.values() if shape}
    if any(
        isinstance(layer, Source) and not isinstance(layer, Input) for _, layer in net.layer_modules
    ):
        return frozenset(), "the net has layers of constants"
    types = {layer.param.type for _, layer in net.layer_modules}
    if types & {"LSTM", "RNN", "LSTMUnit"}:
        return frozenset(), "the steps of its recurrent layers are unrolled"
    if types & {"Proposal", "PSROIPooling"}:
        return frozenset(), "its regions belong to one image"
    if len(batches) != 1 or not all(first.values()):
        return frozenset(), "its inputs have different first extents"
    (batch,) = batches
    try:
        net.reshape({name: (batch + 1, *shape[1:]) for name, shape in first.items()})
        after = net.slot_shapes
    except (DefinitionError, LayerError):
        return frozenset(), f"its layers allow a batch of {batch} only"
    finally:
        net.reshape(first)
    found = set()
    for slot, shape in enumerate(before):
        if after[slot] == shape or slot in net.changing_slots:
            continue
        if after[slot] != (batch + 1, *shape[1:]) or shape[0] != batch:
            return frozenset(), "a layer moves the batch to a different axis"
        found.add(slot)
    return frozenset(found), ""
