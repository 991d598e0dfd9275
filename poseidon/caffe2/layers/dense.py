"""Layers on columns: fully connected, dropout and joining of dense ones, rows of a table by the ids of
each example, and `Functional`, which makes a layer of any function of nets and records; and losses of a batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from poseidon.caffe2 import core, schema, scope, workspace
from poseidon.caffe2.layers.layers import ModelLayer, registered
from poseidon.caffe2.layers.tags import Tags


@registered
class FC(ModelLayer):
    """x W^T + b.

    Args:
        input_record: a column of examples of known shape.
        output_dims: the number of outputs.
        weight_init, bias_init: (filler, arguments); by default uniform within 1 / sqrt(inputs).
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
        fill = weight_init or uniform
        weights = self.create_param("w", [output_dims, inputs], fill, weight_optim)
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


IdList = schema.List(np.int64)
"""Lists of ids, one for each example."""
IdScoreList = schema.Map(np.int64, np.float32)
"""Lists of ids with scores."""


@registered
class SparseLookup(ModelLayer):
    """Looks up a row for each id, and reduces the rows of each example.

    Args:
        input_record: an `IdList` or an `IdScoreList`; the metadata of its ids has the
            `categorical_limit`, the number of rows.
        inner_shape: the shape of a row.
        reducer: Sum, Mean, Max or Sqrt (the sum over the root of the number of ids);
            WeightedSum, by the scores; None: rows stay, one for each id.
        weight_init: (filler, arguments); by default uniform within 1 / sqrt(rows) of 0.
        weight_optim: see `LayerParameter`.
    """

    def __init__(
        self,
        model: Any,
        input_record: Any,
        inner_shape: int | Sequence[int],
        reducer: str,
        weight_init: Any = None,
        weight_optim: Any = None,
        name: str = "sparse_lookup",
        **kwargs: Any,
    ) -> None:
        super().__init__(model, name, input_record, **kwargs)
        shape = [inner_shape] if isinstance(inner_shape, int) else list(inner_shape)
        legal = ["Sum", "Mean", "Max", "Sqrt", "None"]
        self.ids = "values"
        if not schema.equal_schemas(input_record, IdList):
            assert schema.equal_schemas(input_record, IdScoreList, check_field_types=False)
            self.ids = "values:keys"
            legal.append("WeightedSum")
        assert reducer in legal, f"{self.name}: reducer is {reducer}, expected {', '.join(legal)}"
        metadata = input_record[self.ids].metadata
        assert metadata is not None, f"{self.name}: the ids have no metadata with categorical_limit"
        rows = metadata.categorical_limit
        scale = math.sqrt(1 / rows)
        self.reducer = reducer
        uniform = ("UniformFill", {"min": -scale, "max": scale})
        self.w = self.create_param("w", [rows, *shape], weight_init or uniform, weight_optim)
        self.output_schema = self.scalar(shape)

    def add_ops(self, net: Any) -> None:
        ids, lengths = self.input_record[self.ids](), self.input_record["lengths"]()
        outputs = self.output_schema.field_blobs()
        if self.reducer == "None":
            net.Gather([self.w, ids], outputs)
        elif self.reducer in ("Sum", "Mean", "Max"):
            getattr(net, f"SparseLengths{self.reducer}")([self.w, ids, lengths], outputs)
        else:
            if self.reducer == "Sqrt":
                weights = net.LengthsToWeights(lengths, net.NextScopedBlob("weights"), power=0.5)
            else:
                weights = self.input_record["values:values"]()
            net.SparseLengthsWeightedSum([self.w, weights, ids, lengths], outputs)


log = logging.getLogger("poseidon.caffe2.layers")


@registered
class Functional(ModelLayer):
    """Calls `function(net, input_record, output_record, **kwargs)`.

    Args:
        input_record: a record, or a list of columns.
        output_names_or_num: names or the number of the outputs; a list, or a number other than 1,
            gives a structure. A record stands for itself.
        function: adds the operators.
        output_dtypes: the types of the outputs; by default they are inferred.
    """

    def __init__(
        self,
        model: Any,
        input_record: Any,
        output_names_or_num: Any = 1,
        function: Callable[..., Any] | None = None,
        name: str = "functional",
        output_dtypes: Any = None,
        tags: Any = None,
        **kwargs: Any,
    ) -> None:
        assert function is not None, "a Functional layer needs a function"
        super().__init__(model, name, schema.as_record(input_record), tags=tags, **kwargs)
        self._function = function
        if isinstance(output_names_or_num, schema.Field):
            self.output_schema = output_names_or_num.clone(keep_blobs=True)
            return
        several = isinstance(output_names_or_num, list) or (
            isinstance(output_names_or_num, int) and output_names_or_num != 1
        )
        if isinstance(output_names_or_num, int):
            wanted = schema.RawTuple(output_names_or_num)
        else:
            names = output_names_or_num if several else [output_names_or_num]
            wanted = schema.Struct(*[(each, np.void) for each in names])
        with scope.NameScope(self.name, reset=True):
            made = schema.NewRecord(model.net, wanted)
        self.output_schema = made if several else made[0]
        scalars = self.output_schema.all_scalars()
        if output_dtypes is None:
            self._infer(scalars)
            return
        given = output_dtypes if isinstance(output_dtypes, list) else [output_dtypes] * len(scalars)
        for scalar, dtype in zip(scalars, given, strict=True):
            scalar.set_type(dtype)

    def _infer(self, scalars: list[Any]) -> None:
        """Set the types of outputs as the operators make them of no examples."""
        net, unknown = core.Net("_type_inference"), []
        try:
            schema.InitEmptyRecord(net, self.input_record, enforce_types=True)
            self._function(net, self.input_record, self.output_schema, **self.kwargs)
            shapes, types = workspace.InferShapesAndTypes([net], {})
        except TypeError as error:
            log.warning("%s: types of outputs are not known: %s", self.name, error)
            return
        for scalar in scalars:
            blob = str(scalar())
            extents = shapes.get(blob)
            if extents is None or blob not in types or (extents and extents[0] != 0):
                unknown.append(blob)
            else:
                scalar.set_type((schema.dtype_for_core_type(types[blob]), tuple(extents[1:])))
        if unknown:
            log.warning("the types of %s are not known; give output_dtypes", ", ".join(unknown))

    def add_ops(self, net: Any) -> None:
        self._function(net, self.input_record, self.output_schema, **self.kwargs)


class _Loss(ModelLayer):
    """A loss: a scalar, the mean over the examples, or with `average_loss=False` the sum."""

    score = "prediction"
    """The column that is compared with the label."""
    default = ""
    """The prefix of its name."""
    excluded: Sequence[str] = (Tags.EXCLUDE_FROM_PREDICTION,)

    def __init__(
        self,
        model: Any,
        input_record: Any,
        name: str = "",
        average_loss: bool = True,
        tags: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        own = [*(tags or ()), *self.excluded]
        super().__init__(model, name or self.default, input_record, tags=own, **kwargs)
        for column in ("label", self.score):
            assert column in input_record, f"{self.name}: its input has no {column}"
        self.average_loss = average_loss
        self.output_schema = schema.Scalar(np.float32, self.get_next_blob_reference("output"))

    def _as(self, net: Any, column: str, dtype: Any) -> Any:
        """Return the blob of a column in a type."""
        scalar = self.input_record[column]
        if scalar.field_type().base == dtype:
            return scalar()
        blob = net.NextScopedBlob(f"{column}_{np.dtype(dtype)}")
        return net.Cast(scalar(), blob, to=schema.data_type_for_dtype(dtype))

    def _finish(self, net: Any, losses: Any) -> None:
        """Weigh the losses of the examples, and join them."""
        if "weight" in self.input_record:
            weight = net.StopGradient(
                self._as(net, "weight", np.float32), net.NextScopedBlob("weight_stop_gradient")
            )
            losses = net.Mul([losses, weight], net.NextScopedBlob("weighted"))
        join = net.AveragedLoss if self.average_loss else net.ReduceFrontSum
        join(losses, self.output_schema.field_blobs())


@registered
class BatchMSELoss(_Loss):
    """Half the square of prediction less label, of one number for each example."""

    default = "batch_mse_loss"

    def add_ops(self, net: Any) -> None:
        prediction = net.Squeeze(
            self.input_record.prediction(), net.NextScopedBlob("squeezed_prediction"), dims=[1]
        )
        label = net.StopGradient(
            self._as(net, "label", np.float32), net.NextScopedBlob("stopped_label")
        )
        self._finish(net, net.SquaredL2Distance([label, prediction], net.NextScopedBlob("l2")))


@registered
class BatchLRLoss(_Loss):
    """The cross entropy of the sigmoid of a logit (N x 1) and a label of 0 or 1 (N)."""

    score = "logit"
    default = "batch_lr_loss"
    excluded = Tags.TRAIN_ONLY

    def add_ops(self, net: Any) -> None:
        label = self._as(net, "label", np.float32)
        label = net.ExpandDims(label, net.NextScopedBlob("expanded_label"), dims=[1])
        inputs = [self.input_record.logit(), label]
        losses = net.SigmoidCrossEntropyWithLogits(inputs, net.NextScopedBlob("cross_entropy"))
        self._finish(net, losses)


@registered
class BatchSigmoidCrossEntropyLoss(_Loss):
    """The cross entropies of sigmoids of predictions (N x D) and labels (N x D)."""

    default = "batch_sigmoid_cross_entropy_loss"

    def add_ops(self, net: Any) -> None:
        inputs = [self.input_record.prediction(), self._as(net, "label", np.float32)]
        losses = net.SigmoidCrossEntropyWithLogits(inputs, net.NextScopedBlob("cross_entropy"))
        self._finish(net, losses)


@registered
class BatchSoftmaxLoss(_Loss):
    """The structure `softmax` and `loss` of predictions; see the operator `SoftmaxWithLoss`."""

    default = "batch_softmax_loss"
    excluded = ()

    def __init__(
        self,
        model: Any,
        input_record: Any,
        name: str = "",
        label_prob: bool = False,
        scale: float = 1.0,
        average_by_batch_size: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, input_record, name, **kwargs)
        self.label_prob = label_prob
        self.settings = {"scale": scale, "average_by_batch_size": average_by_batch_size}
        dtype = input_record.prediction.field_type()
        self.output_schema = schema.Struct(
            ("softmax", schema.Scalar(dtype, self.get_next_blob_reference("softmax"))),
            ("loss", schema.Scalar(np.float32, self.get_next_blob_reference("loss"))),
        )

    def add_ops(self, net: Any) -> None:
        label = self._as(net, "label", np.float32 if self.label_prob else np.int32)
        inputs = [self.input_record.prediction(), label]
        if "weight" in self.input_record:
            inputs.append(self._as(net, "weight", np.float32))
        outputs = self.output_schema.field_blobs()
        net.SoftmaxWithLoss(inputs, outputs, label_prob=self.label_prob, **self.settings)
