"""RMSProp, FTRL, YellowFin."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.optimizer.base import AlphaOptimizer, Optimizer, iteration_of


class FtrlOptimizer(Optimizer):
    """FTRL-Proximal (McMahan et al., 2013)."""

    operator, suffix = "Ftrl", "ftrl_nz"
    sparse = True

    def __init__(
        self,
        alpha: float = 0.01,
        beta: float = 1e-4,
        lambda1: float = 0,
        lambda2: float = 0,
        sparse_dedup_aggregator: str | None = None,
        engine: str | None = "",
    ) -> None:
        """Take the settings; `lambda1` and `lambda2` are the strengths of the two penalties."""
        super().__init__()
        self.alpha = alpha
        self.beta = beta
        self.lambda1 = lambda1
        self.lambda2 = lambda2
        self.sparse_dedup_aggregator = sparse_dedup_aggregator
        self.engine = engine

    def _run(self, net: Any, param_init_net: Any, param_info: Any) -> None:
        param, grad = param_info.blob, param_info.grad
        if self.alpha <= 0:
            return
        state = self._state(param_init_net, param, self.suffix, extra_shape=[2], value=0.0)
        settings = {
            "engine": self.engine,
            "alpha": self.alpha,
            "beta": self.beta,
            "lambda1": self.lambda1,
            "lambda2": self.lambda2,
        }
        if isinstance(grad, core.GradientSlice):
            assert self.sparse, f"{type(self).__name__} does not support sparse gradients"
            grad = self.dedup(net, self.sparse_dedup_aggregator, grad)
            net.SparseFtrl([param, state, grad.indices, grad.values], [param, state], **settings)
        else:
            getattr(net, self.operator)([param, state, grad], [param, state], **settings)

    def scale_learning_rate(self, scale: float) -> None:
        self.alpha *= scale


class GFtrlOptimizer(FtrlOptimizer):
    """FTRL with a penalty for groups (rows) of weights."""

    operator, suffix = "GFtrl", "gftrl_nz"
    sparse = False


class YellowFinOptimizer(AlphaOptimizer):
    """YellowFin (Zhang et al., 2017): SGD with momentum that tunes both of its settings."""

    def __init__(
        self,
        alpha: float = 0.1,
        mu: float = 0.0,
        beta: float = 0.999,
        curv_win_width: int = 20,
        zero_debias: bool = True,
        epsilon: float = 0.1**6,
        policy: str = "fixed",
        sparse_dedup_aggregator: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the settings.

        Args:
            alpha, mu: the first learning rate and momentum.
            beta: the decay of the averages.
            curv_win_width: the iterations of which the range of curvature is taken.
            zero_debias: whether averages are corrected for their start at 0.
            epsilon: the smallest variance.
            policy, sparse_dedup_aggregator: kept for Caffe2's scripts.
        """
        super().__init__(alpha, policy, kwargs)
        self.mu = mu
        self.beta = beta
        self.curv_win_width = curv_win_width
        self.zero_debias = zero_debias
        self.epsilon = epsilon
        self.sparse_dedup_aggregator = sparse_dedup_aggregator

    def _run(self, net: Any, param_init_net: Any, param_info: Any) -> None:
        param, grad = param_info.blob, param_info.grad
        assert not isinstance(grad, core.GradientSlice), "YellowFin needs dense gradients"
        moment = self._state(param_init_net, param, "moment")
        window = self._constant(param_init_net, param, "curv_win", self.curv_win_width, 0.0)
        mean = self._state(param_init_net, param, "g_avg")
        square = self._state(param_init_net, param, "g2_avg")
        rate = self._constant(param_init_net, param, "lr_avg", 1, self.alpha)
        momentum = self._constant(param_init_net, param, "mu_avg", 1, self.mu)
        memory = self._constant(param_init_net, param, "scalars_memory", 5, 0.0)
        iteration = iteration_of(net, param_init_net)
        self._aux_params.shared.append(iteration)
        state = [param, moment, rate, momentum, window, mean, square, memory]
        net.YellowFin(
            [*state, grad, iteration],
            state,
            beta=self.beta,
            epsilon=self.epsilon,
            curv_win_width=self.curv_win_width,
            zero_debias=self.zero_debias,
        )


class RmsPropOptimizer(AlphaOptimizer):
    """RMSProp (Hinton, 2012) with momentum."""

    def __init__(
        self,
        alpha: float = 0.01,
        decay: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-5,
        policy: str = "fixed",
        engine: str | None = "",
        **kwargs: Any,
    ) -> None:
        """Take the settings; `decay` applies to the mean of squares."""
        super().__init__(alpha, policy, kwargs)
        self.decay = decay
        self.momentum = momentum
        self.epsilon = epsilon
        self.engine = engine

    def _run(self, net: Any, param_init_net: Any, param_info: Any) -> None:
        param, grad = param_info.blob, param_info.grad
        if self.alpha <= 0:
            return
        assert not isinstance(grad, core.GradientSlice), "RmsProp does not support sparse gradients"
        one = self._one(param_init_net)
        rate, _ = self._rate(net, param_init_net, 1)
        # Caffe2 passes `values`, which ConstantFill does not know: they are zeros anyway.
        step, squares, buffer = (
            self._state(param_init_net, param, suffix, values=0.0)
            for suffix in ("grad_o", "mean_squares", "momentum")
        )
        net.RmsProp(
            [grad, squares, buffer, one],
            [step, squares, buffer],
            decay=self.decay,
            momentum=self.momentum,
            epsilon=self.epsilon,
            engine=self.engine,
        )
        net.MomentumSGDUpdate([step, buffer, rate, param], [step, buffer, param])
