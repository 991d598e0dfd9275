"""Layers on dense columns: fully connected, dropout, joining."""

from __future__ import annotations

import math
from typing import Any

from poseidon.caffe2.layers.layers import ModelLayer, registered


@registered
class FC(ModelLayer):
    """x W^T + b.

    Args:
        input_record: a column of examples of known shape.
        output_dims: the number of outputs.
        weight_init, bias_init: (filler, arguments); by default uniform between -1 / sqrt(inputs)
            and 1 / sqrt(inputs).
        weight_optim, bias_optim: see `LayerParameter`.
        axis: the first dimension of the inputs that is multiplied; dimensions before it stay.
    """

    bias = True

    def __init__(
        self,
        model: Any,
        input_record: Any,
        output_dims: int,
        weight_init: Any = None,
        bias_init: Any = None,
        weight_optim: Any = None,
        bias_optim: Any = None,
        name: str = "fc",
        axis: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, name, input_record, **kwargs)
        shape = input_record.field_type().shape
        inputs = math.prod(shape[axis - 1 :])
        assert shape and inputs > 0, f"{self.name}: the shape of an example is {shape}, not known"
        self.axis, scale = axis, math.sqrt(1 / inputs)
        uniform = ("UniformFill", {"min": -scale, "max": scale})
        weights = self.create_param(
            "w", [output_dims, inputs], weight_init or uniform, weight_optim
        )
        self.blobs = [weights]
        if self.bias:
            made = self.create_param("b", [output_dims], bias_init or uniform, bias_optim)
            self.blobs.append(made)
        self.output_schema = self.scalar((*shape[: axis - 1], output_dims))

    def add_ops(self, net: Any) -> None:
        inputs = [*self.input_record.field_blobs(), *self.blobs]
        net.FC(inputs, self.output_schema.field_blobs(), axis=self.axis, **self.kwargs)


@registered
class FCWithoutBias(FC):
    """x W^T; see `FC`."""

    bias = False

    def __init__(
        self,
        model: Any,
        input_record: Any,
        output_dims: int,
        weight_init: Any = None,
        weight_optim: Any = None,
        name: str = "fc_without_bias",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model, input_record, output_dims, weight_init, None, weight_optim, name=name, **kwargs
        )

    def add_ops(self, net: Any) -> None:
        inputs = [*self.input_record.field_blobs(), *self.blobs]
        net.MatMul(inputs, self.output_schema.field_blobs(), trans_b=1, **self.kwargs)


@registered
class Dropout(ModelLayer):
    """Zeros for a part of the values in training; see the operator `Dropout`."""

    def __init__(
        self,
        model: Any,
        input_record: Any,
        name: str = "dropout",
        ratio: float = 0.5,
        dropout_for_eval: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, name, input_record, **kwargs)
        assert 0 <= ratio < 1, f"{self.name}: ratio is {ratio}, expected 0 to below 1"
        self.ratio, self.always = ratio, dropout_for_eval
        self.output_schema = input_record.clone_schema()
        self.output_schema.set_value(self.get_next_blob_reference("output"))

    def _add(self, net: Any, is_test: bool) -> None:
        outputs = [*self.output_schema.field_blobs(), net.NextScopedBlob("d_mask")]
        net.Dropout(self.input_record.field_blobs(), outputs, ratio=self.ratio, is_test=is_test)

    def add_train_ops(self, net: Any) -> None:
        self._add(net, False)

    def add_eval_ops(self, net: Any) -> None:
        self._add(net, not self.always)

    def add_ops(self, net: Any) -> None:
        self._add(net, True)


@registered
class Concat(ModelLayer):
    """Columns of a structure, joined along an axis; axis 0 is the batch."""

    def __init__(
        self,
        model: Any,
        input_record: Any,
        axis: int = 1,
        add_axis: int = 0,
        name: str = "concat",
        **kwargs: Any,
    ) -> None:
        super().__init__(model, name, input_record, **kwargs)
        assert not (axis == 0 and add_axis), f"{self.name}: a new axis cannot be the batch"
        self.axis, self.add_axis = axis, add_axis
        shapes = [list(scalar.field_type().shape) for scalar in input_record.all_scalars()]
        if axis == 0:
            self.output_schema = self.scalar(shapes[0])
            return
        for shape in shapes:
            if add_axis:
                shape.insert(axis - 1, 1)
            assert len(shape) >= axis, f"{self.name}: an input has no axis {axis}"
        rest = [[*shape[: axis - 1], *shape[axis:]] for shape in shapes]
        assert all(each == rest[0] for each in rest), f"{self.name}: the shapes {shapes} differ"
        made = list(shapes[0])
        made[axis - 1] = sum(shape[axis - 1] for shape in shapes)
        self.output_schema = self.scalar(made)

    def add_ops(self, net: Any) -> None:
        (output,) = self.output_schema.field_blobs()
        outputs = [output, f"{output}_concat_dims"]
        net.Concat(self.input_record.field_blobs(), outputs, axis=self.axis, add_axis=self.add_axis)
