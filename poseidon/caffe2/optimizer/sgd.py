"""Stochastic gradient descent, and the decay of weights."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.optimizer.base import Optimizer


class SgdOptimizer(Optimizer):
    """SGD with momentum (the learning rate is part of the momentum buffer), Nesterov's form and
    LARS.
    """

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
            sparse_dedup_aggregator: `sum` or `mean` of the values of one index of a sparse
                gradient.
            lars: the offset of LARS, None for none.
        """
        super().__init__()
        self.base_learning_rate = base_learning_rate
        self.policy = policy
        self.momentum = momentum
        self.nesterov = nesterov
        self.sparse_dedup_aggregator = sparse_dedup_aggregator
        self.lars = lars
        self.init_kwargs = kwargs

    def _rate(self, net: Any, init_net: Any, sign: int) -> Any:
        assert self.base_learning_rate > 0, (
            f"Expect positive base learning rate, got {self.base_learning_rate}"
        )
        rate, _ = self.build_lr(
            net,
            init_net,
            base_learning_rate=self.base_learning_rate * sign,
            policy=self.policy,
            **self.init_kwargs,
        )
        return rate

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
                net.MomentumSGDUpdate(
                    [grad, buffer, rate, param], [grad, buffer, param], **settings
                )
        elif sparse:
            net.ScatterWeightedSum([param, one, grad.indices, grad.values, rate], param)
        else:
            net.WeightedSum([param, one, grad, rate], param)

    def scale_learning_rate(self, scale: float) -> None:
        self.base_learning_rate *= scale


class MultiPrecisionSgdOptimizer(SgdOptimizer):
    """SGD that updates the float32 copy of a float16 parameter; float32 parameters as
    `SgdOptimizer`.
    """

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
            base_learning_rate=base_learning_rate,
            policy=policy,
            momentum=momentum,
            nesterov=nesterov,
            sparse_dedup_aggregator=sparse_dedup_aggregator,
            **kwargs,
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
        assert not isinstance(grad, core.GradientSlice), (
            "MultiPrecisionSgd does not support sparse gradients"
        )
        grad = net.HalfToFloat(grad, grad + "_fp32")
        net.MomentumSGDUpdate(
            [grad, buffer, rate, copy],
            [grad, buffer, copy],
            momentum=self.momentum,
            nesterov=self.nesterov,
        )
        net.FloatToHalf(copy, param)


class FP16SgdOptimizer(SgdOptimizer):
    """SGD in float16, with the decay of weights in the update; parameters of batch normalization
    stay float32.
    """

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
            base_learning_rate=base_learning_rate,
            policy=policy,
            momentum=momentum,
            nesterov=nesterov,
            sparse_dedup_aggregator=sparse_dedup_aggregator,
            **kwargs,
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
            buffer = self._state(param_init_net, param, "momentum")
            net.FP32MomentumSGDUpdate(
                [grad, buffer, rate, param], [grad, buffer, param], **settings
            )
        else:
            buffer = param_init_net.Float16ConstantFill(
                [], f"{param}_momentum", shape=param_info.shape, value=0.0
            )
            self._aux_params.local.append(buffer)
            net.FP16MomentumSGDUpdate(
                [grad, buffer, rate, param], [grad, buffer, param], **settings
            )


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
