"""The contract of a layer, and the layers by name.

A layer has an input record, an output record and parameters. It adds its operators to any net:
`add_train_ops` to a net that trains, `add_eval_ops` to one that evaluates, `add_ops` to one that
predicts; each is the next one by default. `register_layer` makes `model.<Name>(...)` of a class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from poseidon.caffe2 import schema, scope
from poseidon.caffe2.layers.tags import TagContext
from poseidon.caffe2.proto.caffe2_pb2 import OperatorDef

_registry: dict[str, type[ModelLayer]] = {}


class InstantiationContext:
    """What the operators of a layer are for."""

    EVAL = "eval"
    PREDICTION = "prediction"
    TRAINING = "training"


def register_layer(name: str, layer: type[ModelLayer]) -> None:
    """Add a layer.

    Raises:
        AssertionError: there is one of this name.
    """
    assert name not in _registry, f"the layer {name} exists already"
    _registry[name] = layer


def registered(layer: type[ModelLayer]) -> type[ModelLayer]:
    """Register a class by its name, as a decorator."""
    register_layer(layer.__name__, layer)
    return layer


def layer_exists(name: str) -> bool:
    return name in _registry


def layer_names() -> list[str]:
    return sorted(_registry)


def create_layer(layer_name: str, *args: Any, **kwargs: Any) -> ModelLayer:
    return _registry[layer_name](*args, **kwargs)


@dataclass(slots=True)
class LayerParameter:
    """A parameter of a layer.

    Attributes:
        parameter: the reference to its blob.
        optimizer: what updates it; None: the model's default.
        initializer: the operator that fills it; None: it exists.
    """

    parameter: Any
    optimizer: Any = None
    initializer: OperatorDef | None = None


class ModelLayer:
    """The base class of layers.

    Attributes:
        name: the scope of its blobs.
        input_record, output_schema: its columns.
        tags: see `Tags`.
        params: its parameters.
    """

    def __init__(
        self,
        model: Any,
        prefix: str,
        input_record: Any,
        tags: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Name the layer.

        Args:
            model: a `LayerModelHelper`.
            prefix: its name, which gets a number where it is taken.
            input_record: its input.
            tags: added to the tags of the context.
            kwargs: further arguments of its operators.
        """
        self.name = model.next_layer_name(prefix)
        self.model, self.kwargs = model, kwargs
        self.input_record = input_record
        self.output_schema: Any = None
        self.tags = {*(tags or ()), *TagContext.current().tags}
        self.params: list[LayerParameter] = []

    def create_param(
        self, param_name: str, shape: Any, initializer: Any, optimizer: Any = None, **_: Any
    ) -> Any:
        """Make a parameter in the scope of this layer, and return the reference to its blob.

        Args:
            param_name: its name.
            shape: its shape.
            initializer: the type of a filler, or a filler and its arguments.
            optimizer: see `LayerParameter`.
        """
        with scope.NameScope(self.name, reset=True):
            made = self.model.create_param(param_name, shape, initializer, optimizer=optimizer)
        assert all(made.parameter != other.parameter for other in self.params)
        self.params.append(made)
        return made.parameter

    def get_next_blob_reference(self, name: str) -> Any:
        """Return a new blob in the scope of this layer."""
        with scope.NameScope(self.name, reset=True):
            return self.model.net.NextScopedBlob(name)

    def scalar(self, shape: Sequence[int], name: str = "output", dtype: Any = np.float32) -> Any:
        """Return a column with a new blob: `shape` is that of one example."""
        return schema.Scalar((dtype, tuple(shape)), self.get_next_blob_reference(name))

    def add_init_params(self, init_net: Any) -> None:
        """Add the fillers of the parameters that a net does not fill yet."""
        filled = {name for op in init_net.Proto().op for name in op.output}
        for param in self.params:
            if param.initializer is not None and str(param.parameter) not in filled:
                made = init_net.Proto().op.add()
                made.CopyFrom(param.initializer)

    def add_operators(
        self, net: Any, init_net: Any = None, context: str = InstantiationContext.TRAINING
    ) -> None:
        """Add the operators to a net, and the fillers of the parameters to an init net.

        Args:
            net: the net.
            init_net: needed for training.
            context: one of `InstantiationContext`.
        """
        with scope.NameScope(self.name, reset=True):
            if init_net is not None:
                self.add_init_params(init_net)
            if context == InstantiationContext.TRAINING:
                assert init_net is not None, "a net that trains needs an init net"
                self.add_train_ops(net)
            elif context == InstantiationContext.EVAL:
                self.add_eval_ops(net)
            else:
                self.add_ops(net)

    def add_ops(self, net: Any) -> None:
        """Add the operators of a prediction."""
        raise NotImplementedError

    def add_eval_ops(self, net: Any) -> None:
        self.add_ops(net)

    def add_train_ops(self, net: Any) -> None:
        self.add_eval_ops(net)
