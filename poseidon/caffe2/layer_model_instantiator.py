"""The nets of a model of layers: for training, evaluation and prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poseidon.caffe2 import core, schema
from poseidon.caffe2.layers.layers import InstantiationContext
from poseidon.caffe2.layers.tags import Tags


def _net(
    model: Any, name: str, context: str, excluded: str, tags: Sequence[str] | None, init: Any = None
) -> Any:
    """Return a net of the layers that have one of the tags, where some are given."""
    net = core.Net(name)
    for layer in model.layers:
        if excluded not in layer.tags and (tags is None or not layer.tags.isdisjoint(tags)):
            layer.add_operators(net, init, context=context)
    return net


def shrink_output_schema(net: Any, out_schema: Any) -> Any:
    """Return the columns of a record whose blobs a net has."""
    columns = zip(
        out_schema.field_names(),
        out_schema.field_types(),
        out_schema.field_blobs(),
        out_schema.field_metadata(),
        strict=True,
    )
    kept = [column for column in columns if net.BlobIsDefined(column[2])]
    return schema.from_column_list(*map(list, zip(*kept, strict=True))) if kept else schema.Struct()


def generate_predict_net(model: Any, include_tags: Sequence[str] | None = None) -> Any:
    """Return the net that predicts.

    Args:
        model: a `LayerModelHelper`.
        include_tags: take the layers that have one of these; None: all.
    """
    net = _net(
        model,
        "predict_net",
        InstantiationContext.PREDICTION,
        Tags.EXCLUDE_FROM_PREDICTION,
        include_tags,
    )
    net.set_input_record(model.input_feature_schema.clone())
    net.set_output_record(shrink_output_schema(net, model.output_schema.clone()))
    return net


def generate_eval_net(model: Any, include_tags: Sequence[str] | None = None) -> Any:
    """Return the net that evaluates: its output has the metrics too."""
    net = _net(model, "eval_net", InstantiationContext.EVAL, Tags.EXCLUDE_FROM_EVAL, include_tags)
    return _with_records(model, net)


def _with_records(model: Any, net: Any) -> Any:
    net.set_input_record(model.input_feature_schema + model.trainer_extra_schema)
    output = model.output_schema + model.metrics_schema
    net.set_output_record(shrink_output_schema(net, output))
    return net


def generate_training_nets_forward_only(
    model: Any, include_tags: Sequence[str] | None = None
) -> tuple[Any, Any]:
    """Return the net that fills the parameters, and the training net without its backward part."""
    init_net = model.create_init_net("train_init_net")
    net = _net(
        model,
        "train_net",
        InstantiationContext.TRAINING,
        Tags.EXCLUDE_FROM_TRAIN,
        include_tags,
        init_net,
    )
    return init_net, _with_records(model, net)


def generate_training_nets(
    model: Any, include_tags: Sequence[str] | None = None
) -> tuple[Any, Any]:
    """Return the net that fills the parameters, and the net that trains.

    Raises:
        ValueError: a parameter has no optimizer, or no gradient.
    """
    init_net, net = generate_training_nets_forward_only(model, include_tags)
    gradients = net.AddGradientOperators(model.loss.field_blobs())
    model.apply_optimizers(net, init_net, gradients)
    return init_net, net
