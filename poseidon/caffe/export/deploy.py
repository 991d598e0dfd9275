"""The deploy net of a net that trains: its data comes from the caller, and it returns scores.

Law: with the same weights and data, the deploy net computes what the phase TEST computes. A layer
that reads data becomes an Input. A softmax loss becomes its Softmax, a sigmoid loss its Sigmoid.
Other losses, accuracies and what only they need are left out; so is an auxiliary classifier, a
softmax loss with the labels of one that weighs more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from google.protobuf.message import Message

from poseidon.caffe.export.graph import Shape
from poseidon.caffe.export.net import inference_definition, needs_labels, reads_data
from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.net.compile import compile_net, filter_phase
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TEST, LayerParameter, NetState
from poseidon.caffe.proto.definition import NetDefinition
from poseidon.errors import DataError, DefinitionError, UsageError

SCORES: Mapping[str, str] = {
    "SoftmaxWithLoss": "Softmax",
    "SoftmaxWithLossOHEM": "Softmax",
    "SigmoidCrossEntropyLoss": "Sigmoid",
}
"""The losses whose scores a deploy net returns, with the layers that compute them."""
_OF_TRAINING = ("include", "exclude", "phase", "loss_weight", "propagate_down")
_FILLERS = ("weight_filler", "bias_filler")


def deploy_net(
    definition: NetDefinition,
    shapes: Mapping[str, Shape],
    *,
    batch: int = 1,
    stages: Sequence[str] = (),
) -> Net:
    """Return the deploy net of a definition with data layers and losses.

    Args:
        definition: of all phases.
        shapes: of tops of layers that read data, by name; others are taken from the data.
        batch: images of a pass, 1 or more.
        stages: for rules of the definition.

    Raises:
        DefinitionError: a mistake in the definition, or it computes nothing but losses.
        UsageError: the shape of the data is not known.
    """
    state = definition.state(TEST, stages=stages)
    test = filter_phase(definition, state)
    layers = test.param.layer
    needed = _needed(layers)
    if not needed:
        raise DefinitionError("the net has no output to deploy", source=test.source)
    given = {
        top: shape
        for index, layer in enumerate(layers)
        if reads_data(layer) and needed.intersection(layer.top)
        for top, shape in _shapes_of(test, index, state, shapes, batch)
        if top in needed
    }
    kept = [
        index
        for index, layer in enumerate(layers)
        if needed.intersection(layer.top) or (layer.type in SCORES and layer.bottom[0] in needed)
    ]
    plain = test.with_layers(kept)
    _return_scores(plain.param.layer)
    deployed = inference_definition(plain, given)
    for layer in deployed.param.layer:
        _forget_training(layer)
    deployed.param.ClearField("state")
    return compile_net(deployed, LayerContext(phase=TEST, seed=1), state=state)


def _needed(layers: Sequence[LayerParameter]) -> set[str]:
    """Return the blobs that the outputs of the deploy net need, the outputs among them."""
    losses = [layer for layer in layers if needs_labels(layer) and layer.bottom]
    main = [layer for layer in losses if not _is_auxiliary(layer, losses)]
    weighed = [layer for layer in main if "Loss" in layer.type]
    read = {bottom for layer in layers for bottom in layer.bottom}
    needed = {layer.bottom[0] for layer in weighed or main}
    needed |= {
        top
        for layer in layers
        if layer.bottom and not needs_labels(layer)
        for top in layer.top
        if top not in read
    }
    for layer in reversed(layers):
        if not needs_labels(layer) and needed.intersection(layer.top):
            needed.update(layer.bottom)
    return needed


def _is_auxiliary(loss: LayerParameter, losses: Sequence[LayerParameter]) -> bool:
    return any(
        loss.type == other.type
        and list(loss.bottom[1:]) == list(other.bottom[1:])
        and _weight(loss) < _weight(other)
        for other in losses
    )


def _weight(loss: LayerParameter) -> float:
    return loss.loss_weight[0] if loss.loss_weight else 1.0


def _shapes_of(
    test: NetDefinition, index: int, state: NetState, shapes: Mapping[str, Shape], batch: int
) -> Iterator[tuple[str, Shape]]:
    """Return the shapes of the tops of a layer that reads data, for this batch."""
    layer = test.param.layer[index]
    missing = [top for top in layer.top if top not in shapes]
    yield from ((top, shapes[top]) for top in layer.top if top in shapes)
    if not missing or layer.top[0] in shapes:
        return
    try:
        net = compile_net(test.with_layers([index]), LayerContext(phase=TEST, seed=1), state=state)
    except DataError as error:
        known = _cropped(layer)
        if known is None:
            raise UsageError(
                f"the shape of '{layer.top[0]}' is in data that cannot be read ({error}); state it "
                f"as it is after cropping: --input={layer.top[0]}:{batch},C,H,W"
            ) from error
        yield layer.top[0], (batch, *known)
        return
    found = net.blob_shapes
    net.close()
    yield from ((top, (batch, *found[top][1:])) for top in missing)


def _cropped(layer: LayerParameter) -> Shape | None:
    """Return the shape C x H x W that a layer's crop says, of pictures in color unless the layer
    says otherwise; None: it does not crop.
    """
    transform = layer.transform_param
    height = transform.crop_h or transform.crop_size or layer.window_data_param.crop_size
    width = transform.crop_w or transform.crop_size or layer.window_data_param.crop_size
    if not (height and width):
        return None
    gray = transform.force_gray or not layer.image_data_param.is_color
    return (1 if gray else 3, height, width)


def _return_scores(layers: Sequence[LayerParameter]) -> None:
    """Turn the losses of `SCORES` into the layers that compute their scores."""
    taken = {name for layer in layers for name in (layer.name, *layer.top)}
    for layer in layers:
        if layer.type not in SCORES:
            continue
        scores, bottom, softmax = SCORES[layer.type], layer.bottom[0], layer.softmax_param
        name = "prob" if "prob" not in taken else f"{layer.name}_prob"
        taken.add(name)
        twin = LayerParameter(name=name, type=scores, bottom=[bottom], top=[name])
        if layer.HasField("softmax_param") and scores == "Softmax":
            twin.softmax_param.CopyFrom(softmax)
        layer.CopyFrom(twin)


def _forget_training(layer: LayerParameter) -> None:
    """Remove what a layer has for training alone; names of shared parameters stay."""
    for name in _OF_TRAINING:
        layer.ClearField(name)
    for param in layer.param:
        param.ClearField("lr_mult")
        param.ClearField("decay_mult")
    if not any(param.ListFields() for param in layer.param):
        layer.ClearField("param")
    for _, block in layer.ListFields():
        if isinstance(block, Message):
            for name in _FILLERS:
                if name in block.DESCRIPTOR.fields_by_name:
                    block.ClearField(name)
