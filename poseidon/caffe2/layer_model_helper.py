"""Models of layers: each is described once; nets are made by `layer_model_instantiator`.

    model = LayerModelHelper("m", schema.Struct(("x", schema.Scalar((np.float32, (4,))))),
                             schema.Struct(("label", schema.Scalar(np.float32))))
    logit = model.FC(model.input_feature_schema.x, 1)
    model.add_loss(model.BatchLRLoss(schema.Struct(
        ("label", model.trainer_extra_schema.label), ("logit", logit))))

A name is a layer of `poseidon.caffe2.layers`, or an operator: `model.Relu(h)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from poseidon.caffe2 import core, schema
from poseidon.caffe2.layers import dense as _dense  # noqa: F401 - registers its layers
from poseidon.caffe2.layers import layers
from poseidon.caffe2.model_helper import ModelHelper
from poseidon.caffe2.modeling.parameter_sharing import parameter_sharing_context
from poseidon.caffe2.optimizer import get_param_device

_FUNCTIONAL = "FunctionalLayer"
"""The prefix of an operator that has the name of a layer: `model.FunctionalLayerSplit`."""


class LayerModelHelper(ModelHelper):
    """A model of layers under construction.

    Attributes:
        input_feature_schema, trainer_extra_schema: the columns of its input, with blobs; those of
            the second are there in training only.
        metrics_schema: what evaluation and training report beside the output.
        default_optimizer: updates the parameters of layers without an optimizer of their own.
        layers: in the order in which they were made.
        param_to_optim: the optimizer of each parameter by name.
    """

    def __init__(
        self,
        name: str,
        input_feature_schema: Any,
        trainer_extra_schema: Any,
        keep_blobs: bool = False,
        **_: Any,
    ) -> None:
        """Make a model without layers.

        Args:
            name: of its net.
            input_feature_schema, trainer_extra_schema: the columns of its input.
            keep_blobs: the columns have blobs, which stay; else new ones are made.
        """
        super().__init__(name=name)
        self.layers: list[layers.ModelLayer] = []
        self.default_optimizer: Any = None
        self.param_to_optim: dict[str, Any] = {}
        self.metrics_schema = schema.Struct()
        self._layer_names: set[str] = set()
        self._param_to_shape: dict[str, Any] = {}
        self._output_schema: Any = None
        self._loss: Any = None
        given = (input_feature_schema, trainer_extra_schema)
        self.input_feature_schema, self.trainer_extra_schema = (
            record.clone() if keep_blobs else schema.NewRecord(self.net, record) for record in given
        )
        self.param_init_net = self.create_init_net("param_init_net")

    def create_init_net(self, name: str) -> Any:
        """Return a new net for fillers of parameters."""
        return core.Net(name)

    # Layers and parameters.

    def next_layer_name(self, prefix: str) -> str:
        """Return a name in the current scope that no layer has."""
        base = name = str(core.ScopedName(prefix))
        count = 0
        while name in self._layer_names:
            name = f"{base}_auto_{count}"
            count += 1
        self._layer_names.add(name)
        return name

    def create_param(  # type: ignore[override]
        self, param_name: Any, shape: Any, initializer: Any, optimizer: Any = None, **_: Any
    ) -> layers.LayerParameter:
        """Return a parameter; a shared one (`ParameterSharing`) has one shape.

        Args:
            param_name: its name in the current scope, or a reference.
            shape: its shape; None: the filler has it.
            initializer: a filler, or (filler, arguments).
            optimizer: what updates it; None: the model's default.

        Raises:
            ValueError: it exists with a different shape.
        """
        if isinstance(param_name, core.BlobReference):
            name = str(param_name)
        else:
            name = parameter_sharing_context.get_parameter_name(param_name)
        if self._param_to_shape.setdefault(name, shape) != shape:
            raise ValueError(
                f"the parameter {name} has the shape {self._param_to_shape[name]}, not {shape}"
            )
        kind, arguments = (
            (initializer, {}) if isinstance(initializer, str) else (*initializer, {})[:2]
        )
        if shape is not None:
            arguments = {**arguments, "shape": shape}
        blob = core.BlobReference(name)
        filler = core.CreateOperator(kind, [], blob, **arguments) if self.init_params else None
        return layers.LayerParameter(blob, optimizer, filler)

    def add_layer(self, layer: layers.ModelLayer) -> Any:
        """Add a layer, and return its output."""
        self.layers.append(layer)
        for param in layer.params:
            name = str(param.parameter)
            if name not in self.param_to_optim:
                self.params.append(param.parameter)
            self.param_to_optim[name] = param.optimizer or self.default_optimizer
        layer.add_operators(self.net, self.param_init_net)
        return layer.output_schema

    def NoOptim(self, *_: Any, **__: Any) -> None:
        """Leave a parameter as it is: an optimizer."""

    def __getattr__(self, layer: str) -> Callable[..., Any]:
        if layer.startswith("_") or layer in ("net", "param_init_net"):
            raise AttributeError(layer)
        operator = layer.removeprefix(_FUNCTIONAL)
        if layers.layer_exists(layer):
            return lambda *args, **kwargs: self._added(layer, *args, **kwargs)
        if not core.IsOperator(operator):
            raise AttributeError(
                f"there is no layer {layer}; use an operator, or one of the layers "
                f"{', '.join(layers.layer_names())}"
            )

        def apply(net: Any, inputs: Any, outputs: Any, **arguments: Any) -> None:
            getattr(net, operator)(inputs.field_blobs(), outputs.field_blobs(), **arguments)

        return lambda *args, **kwargs: self._added(
            "Functional", *args, function=apply, **{"name": operator, **kwargs}
        )

    def _added(self, kind: str, *args: Any, **kwargs: Any) -> Any:
        return self.add_layer(layers.create_layer(kind, self, *args, **kwargs))

    # What the model gives.

    @property
    def output_schema(self) -> Any:
        """The output of a prediction; set once."""
        assert self._output_schema is not None, "the model has no output_schema"
        return self._output_schema

    @output_schema.setter
    def output_schema(self, record: Any) -> None:
        assert self._output_schema is None, "the model has an output_schema already"
        self._output_schema = record

    @property
    def loss(self) -> Any:
        """The losses; set once, or added."""
        assert self._loss is not None, "the model has no loss"
        return self._loss

    @loss.setter
    def loss(self, loss: Any) -> None:
        assert self._loss is None, "the model has a loss already"
        self._loss = loss

    def add_loss(self, loss: Any, name: str = "unnamed") -> None:
        """Add a loss. The net computes the gradient of the sum of all losses."""
        if isinstance(self._loss, schema.Scalar):
            self._loss = schema.Struct(("unnamed", self._loss))
        present, prefix, count = self._loss or schema.Struct(), name, 0
        while prefix in present:
            prefix, count = f"{name}_auto_{count}", count + 1
        self._loss = present + schema.Struct((prefix, loss))

    def add_metric_field(self, name: str, value: Any) -> None:
        """Add a column to the metrics.

        Raises:
            AssertionError: there is one of this name.
        """
        assert name not in self.metrics_schema, f"there is a metric {name} already"
        self.metrics_schema = self.metrics_schema + schema.Struct((name, value))

    # Nets.

    def apply_optimizers(
        self, train_net: Any, train_init_net: Any, grad_map: Any, blob_to_device: Any = None
    ) -> None:
        """Add the updates of all parameters.

        Raises:
            ValueError: a parameter has no optimizer, or no gradient.
        """
        for param, optimizer in self.param_to_optim.items():
            optimizer = optimizer or self.default_optimizer
            if optimizer == self.NoOptim:
                continue
            grad = grad_map.get(param)
            if optimizer is None:
                raise ValueError(f"{param} has no optimizer; set model.default_optimizer")
            if grad is None:
                raise ValueError(f"{param} has no gradient; give it the optimizer model.NoOptim")
            with core.DeviceScope(get_param_device(param, grad, blob_to_device)):
                optimizer(train_net, train_init_net, param, grad)
