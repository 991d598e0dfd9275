"""Stochastic gradient descent, AdaGrad, and the decay of weights."""

from __future__ import annotations

import logging
from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.optimizer.base import AlphaOptimizer, Optimizer, shape_of


class SgdOptimizer(Optimizer):
    """SGD with momentum (times the learning rate), Nesterov's form and LARS."""

    def __init__(
        self,
        base_learning_rate: float = 0.01,
        policy: str = "fixed",
        momentum: float = 0.0,
        nesterov: Any = True,
        sparse_dedup_aggregator: str | None = None,
        lars: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the settings.

        Args:
            base_learning_rate: 0 leaves the parameters alone.
            policy: see the operator `LearningRate`; its arguments are `kwargs`.
            momentum: 0 for none.
            nesterov: whether the momentum is Nesterov's.
            sparse_dedup_aggregator: `sum` or `mean` of a sparse gradient's values of one index.
            lars: the offset of LARS, None for none.
        """
        super().__init__()
        self.base_learning_rate, self.policy = base_learning_rate, policy
        self.momentum, self.nesterov, self.lars = momentum, nesterov, lars
        self.sparse_dedup_aggregator, self.init_kwargs = sparse_dedup_aggregator, kwargs

    def _rate(self, net: Any, init_net: Any, sign: int) -> Any:
        assert self.base_learning_rate > 0, "Expect positive base learning rate"
        base = self.base_learning_rate * sign
        return self.build_lr(net, init_net, base, policy=self.policy, **self.init_kwargs)[0]

    def _run(self, net: Any, param_init_net: Any, param_info: Any) -> None:
        param, grad = param_info.blob, param_info.grad
        if self.base_learning_rate == 0:
            return
        self._add_lars(net, param_init_net, param_info, self.lars)
        # The update with momentum subtracts, a weighted sum adds.
        rate = self._rate(net, param_init_net, 1 if self.momentum else -1)
        one = self._one(param_init_net)
        self._aux_params.shared.append(one)
        sparse = isinstance(grad, core.GradientSlice)
        if sparse:
            grad = self.dedup(net, self.sparse_dedup_aggregator, grad)
        if self.momentum > 0.0:
            buffer = self._state(param_init_net, param, "momentum")
            settings = {"momentum": self.momentum, "nesterov": self.nesterov}
            if sparse:
                net.SparseMomentumSGDUpdate(
                    [grad.values, buffer, rate, param, grad.indices],
                    [grad.values, buffer, param],
                    **settings,
                )
            else:
                state = [grad, buffer, param]
                net.MomentumSGDUpdate([grad, buffer, rate, param], state, **settings)
        elif sparse:
            net.ScatterWeightedSum([param, one, grad.indices, grad.values, rate], param)
        else:
            net.WeightedSum([param, one, grad, rate], param)

    def scale_learning_rate(self, scale: float) -> None:
        self.base_learning_rate *= scale


class MultiPrecisionSgdOptimizer(SgdOptimizer):
    """SGD on the float32 copies of float16 parameters; else as `SgdOptimizer`."""

    def __init__(
        self,
        base_learning_rate: float = 0.1,
        momentum: float = 0.0,
        policy: str = "fixed",
        nesterov: Any = True,
        sparse_dedup_aggregator: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the settings; see `SgdOptimizer`."""
        super().__init__(
            base_learning_rate, policy, momentum, nesterov, sparse_dedup_aggregator, **kwargs
        )

    def _run(self, net: Any, param_init_net: Any, param_info: Any) -> None:
        copies = param_info.blob_copy
        if copies is None:
            super()._run(net, param_init_net, param_info)
            return
        if self.base_learning_rate == 0:
            return
        param, grad, copy = param_info.blob, param_info.grad, copies[core.DataType.FLOAT]
        rate = self._rate(net, param_init_net, 1)
        buffer = param_init_net.ConstantFill([copy], f"{param}_momentum", value=0.0)
        self._aux_params.local.append(buffer)
        assert not isinstance(grad, core.GradientSlice), "MultiPrecisionSgd needs dense gradients"
        grad = net.HalfToFloat(grad, grad + "_fp32")
        net.MomentumSGDUpdate(
            [grad, buffer, rate, copy],
            [grad, buffer, copy],
            momentum=self.momentum,
            nesterov=self.nesterov,
        )
        net.FloatToHalf(copy, param)


class FP16SgdOptimizer(SgdOptimizer):
    """SGD in float16 with weight decay; batch normalization's parameters stay float32."""

    def __init__(
        self,
        base_learning_rate: float = 0.1,
        momentum: float = 0.0,
        policy: str = "fixed",
        nesterov: Any = True,
        weight_decay: float = 0.0001,
        sparse_dedup_aggregator: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the settings; see `SgdOptimizer`."""
        super().__init__(
            base_learning_rate, policy, momentum, nesterov, sparse_dedup_aggregator, **kwargs
        )
        self.weight_decay = weight_decay

    def _run(
        self, net: Any, param_init_net: Any, param_info: Any, fp32_update: bool = False
    ) -> None:
        param, grad = param_info.blob, param_info.grad
        fp32_update = fp32_update or "spatbn" in str(param)
        if self.base_learning_rate == 0:
            return
        rate = self._rate(net, param_init_net, 1)
        assert not isinstance(grad, core.GradientSlice), "FP16Sgd does not support sparse gradients"
        settings = {
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "weight_decay": self.weight_decay,
        }
        if fp32_update:
            update = net.FP32MomentumSGDUpdate
            buffer = self._state(param_init_net, param, "momentum")
        else:
            update = net.FP16MomentumSGDUpdate
            buffer = param_init_net.Float16ConstantFill(
                [], f"{param}_momentum", shape=param_info.shape, value=0.0
            )
            self._aux_params.local.append(buffer)
        update([grad, buffer, rate, param], [grad, buffer, param], **settings)


class WeightDecayBuilder(Optimizer):
    """Adds `weight_decay * parameter` to the gradient."""

    def __init__(self, weight_decay: float) -> None:
        super().__init__()
        self.weight_decay = weight_decay

    def _run(self, net: Any, param_init_net: Any, param_info: Any) -> None:
        one = self._one(param_init_net)
        decay = self._one(param_init_net, "wd", self.weight_decay)
        grad = param_info.grad
        if isinstance(grad, core.GradientSlice):
            raise ValueError("Weight decay does not yet support sparse gradients")
        net.WeightedSum([grad, one, param_info.blob, decay], grad)


log = logging.getLogger(__name__)


class AdagradOptimizer(AlphaOptimizer):
    """Adagrad (Duchi et al., 2011): steps divided by the root of the sum of squared gradients."""

    def __init__(
        self,
        alpha: float = 0.01,
        epsilon: float = 1e-4,
        decay: float = 1,
        weight_decay: float = 0.0,
        policy: str = "fixed",
        sparse_dedup_aggregator: str | None = None,
        rowWise: bool = False,
        engine: str | None = "",
        lars: float | None = None,
        output_effective_lr: bool = False,
        output_effective_lr_and_update: bool = False,
        weight_scale: Any = None,
        counter_halflife: int = -1,
        **kwargs: Any,
    ) -> None:
        """Take the settings.

        Args:
            alpha: the base learning rate.
            epsilon: added to the root.
            decay: of the sum of squares at each step.
            weight_decay: of the parameters that have more than one dimension.
            policy: see the operator `LearningRate`; its arguments are `kwargs`.
            sparse_dedup_aggregator: `sum` or `mean` of a sparse gradient's values of one index.
            rowWise: whether a row of a sparse parameter has one sum.
            engine: of the operators.
            lars: the offset of LARS, None for none.
            output_effective_lr: whether the effective learning rate becomes a blob.
            output_effective_lr_and_update: whether the update becomes one too.
            weight_scale: scales the parameters in some iterations: an object with the arguments of
                the operator `WeightScale` and `to_aux`, which says whether the sums are scaled too.
            counter_halflife: the iterations in which the count of updates of a row falls to one
                half; the weight decay of sparse updates, with `rowWise`, falls with the count. -1
                counts nothing.
        """
        super().__init__(alpha, policy, kwargs)
        self.epsilon, self.decay, self.engine = epsilon, decay, engine
        self.weight_decay, self.lars = float(weight_decay), lars
        self.sparse_dedup_aggregator, self.rowWise = sparse_dedup_aggregator, rowWise
        self.output_effective_lr = output_effective_lr
        self.output_effective_lr_and_update = output_effective_lr_and_update
        self.weight_scale, self.counter_halflife = weight_scale, counter_halflife

    def _run(self, net: Any, param_init_net: Any, param_info: Any) -> None:
        param, grad = param_info.blob, param_info.grad
        if self.alpha <= 0:
            return
        self._add_lars(net, param_init_net, param_info, self.lars, self.weight_decay)
        rate, iteration = self._rate(net, param_init_net)
        if self.rowWise:
            total = self._rows(param_init_net, param, "avg_squared_sum")
        else:
            total = self._state(param_init_net, param, "squared_sum")
        settings = {"epsilon": self.epsilon, "engine": self.engine}
        if self.weight_decay and len(shape_of(param_init_net, param)) == 1:
            log.warning("weight decay is not applied to %s: it has one dimension", param)
        elif self.weight_decay:
            settings["weight_decay"] = self.weight_decay
        if isinstance(grad, core.GradientSlice):
            assert self.decay == 1.0, "Decay is not implemented for SparseAdagrad: set it to 1"
            grad = self.dedup(net, self.sparse_dedup_aggregator, grad)
            inputs = [param, total, grad.indices, grad.values, rate]
            self._run_sparse(net, param_init_net, inputs, iteration, settings)
        else:
            assert not self.rowWise, "rowWise Adagrad needs a sparse gradient"
            outputs = [param, total, *self._effective(param)]
            net.Adagrad([param, total, grad, rate], outputs, decay=float(self.decay), **settings)
        if self.weight_scale:
            self._add_weight_scale(net, [param, total], iteration)

    def _run_sparse(
        self, net: Any, init_net: Any, inputs: list[Any], iteration: Any, settings: dict[str, Any]
    ) -> None:
        param, total, indices = inputs[:3]
        if self.counter_halflife <= 0:
            operator = net.RowWiseSparseAdagrad if self.rowWise else net.SparseAdagrad
            operator(inputs, [param, total], **settings)
            return
        self._aux_params.shared.append(iteration)
        count = self._rows(init_net, param, "update_counter", value=0.0, dtype=core.DataType.DOUBLE)
        last = self._rows(init_net, param, "prev_update_iter", value=0, dtype=core.DataType.INT64)
        halflife = {"counter_halflife": self.counter_halflife}
        if self.rowWise:
            more = halflife if "weight_decay" in settings else {}
            net.RowWiseSparseAdagrad([*inputs, count], [param, total], **settings, **more)
        else:
            net.SparseAdagrad(inputs, [param, total], **settings)
        net.RowWiseCounter([last, count, indices, iteration], [last, count], **halflife)

    def _add_weight_scale(self, net: Any, blobs: list[Any], iteration: Any) -> None:
        chosen = self.weight_scale
        for blob in blobs if chosen.to_aux else blobs[:1]:
            net.WeightScale(
                [blob, iteration],
                [blob],
                stepsize=chosen.stepsize,
                upper_bound_iter=chosen.upper_bound_iter,
                scale=float(chosen.scale),
            )
