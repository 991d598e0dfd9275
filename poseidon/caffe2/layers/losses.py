"""Losses of a batch of labels, predictions or logits, and weights if there are any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from poseidon.caffe2 import schema
from poseidon.caffe2.layers.layers import ModelLayer, registered
from poseidon.caffe2.layers.tags import Tags


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
