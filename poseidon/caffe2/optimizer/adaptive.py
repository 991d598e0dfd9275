"""Optimizers with a step of their own for each parameter: WNGrad, STORM, Adadelta, Adam, RMSProp,
FTRL, YellowFin.
"""

from __future__ import annotations

from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.optimizer.base import AlphaOptimizer, Optimizer, iteration_of


class WngradOptimizer(AlphaOptimizer):
    """WNGrad (Wu et al., 2018): one step size for the whole parameter."""

    operator, arguments = "Wngrad", ("epsilon", "engine")

    def __init__(
        self,
        alpha: float = 1.0,
        epsilon: float = 1e-9,
        policy: str = "fixed",
        sparse_dedup_aggregator: str | None = None,
        engine: str | None = "",
        moment_init: float = 100.0,
        lars: float | None = None,
        output_effective_lr: bool = False,
        output_effective_lr_and_update: bool = False,
        **kwargs: Any,
    ) -> None:
        """Take the settings; `moment_init` is the moment's start; see `AdagradOptimizer`."""
        super().__init__(alpha, policy, kwargs)
        self.epsilon, self.moment_init, self.engine = epsilon, moment_init, engine
        self.sparse_dedup_aggregator, self.lars = sparse_dedup_aggregator, lars
        self.output_effective_lr = output_effective_lr
        self.output_effective_lr_and_update = output_effective_lr_and_update

    def _states(self, init_net: Any, param: Any) -> list[Any]:
        return [self._constant(init_net, param, "moment", 1, self.moment_init)]


class StormOptimizer(AlphaOptimizer):
    """STORM (Cutkosky and Orabona, 2019): momentum with variance reduction."""

    operator, arguments = "Storm", ("momentum", "beta")
    sparse = ("values", "indices")

    def __init__(
        self,
        lr: float = 0.1,
        momentum: float = 10.0,
        beta: float = 0.1,
        grad_sq_init: float = 0.01,
        policy: str = "fixed",
        sparse_dedup_aggregator: str | None = None,
        lars: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the settings; `grad_sq_init` is the first sum of squared gradients."""
        super().__init__(lr, policy, kwargs)
        self.momentum, self.beta, self.grad_sq_init = momentum, beta, grad_sq_init
        self.sparse_dedup_aggregator, self.lars = sparse_dedup_aggregator, lars

    def _states(self, init_net: Any, param: Any) -> list[Any]:
        total = self.grad_sq_init
        moment = self._state(init_net, param, "moment")
        return [moment, self._constant(init_net, param, "grad_sq_sum", 1, total)]


class AdadeltaOptimizer(AlphaOptimizer):
    """Adadelta (Zeiler, 2012)."""

    operator, arguments = "Adadelta", ("epsilon", "decay", "engine")
    suffixes = ("squared_moment", "squared_moment_update")

    def __init__(
        self,
        alpha: float = 0.01,
        epsilon: float = 1e-4,
        decay: float = 0.95,
        policy: str = "fixed",
        sparse_dedup_aggregator: str | None = None,
        engine: str | None = "",
        **kwargs: Any,
    ) -> None:
        """Take the settings; see `AdagradOptimizer`."""
        super().__init__(alpha, policy, kwargs)
        self.epsilon, self.decay, self.engine = epsilon, decay, engine
        self.sparse_dedup_aggregator = sparse_dedup_aggregator


class AdamOptimizer(AlphaOptimizer):
    """Adam (Kingma and Ba, 2015). Caffe2 corrects the bias with the iteration + 1."""

    def __init__(
        self,
        alpha: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        policy: str = "fixed",
        use_lr_adaption: bool = False,
        lr_alpha: float = 0.01,
        normalized_lr_adaption: bool = True,
        sparse_dedup_aggregator: str | None = None,
        rowWise: bool = False,
        engine: str | None = "",
        enableRAdam: bool = False,
        use_smart_decay: bool = False,
        **kwargs: Any,
    ) -> None:
        """Take the settings.

        Args:
            alpha: the base learning rate.
            beta1, beta2: the decay of the two moments.
            epsilon: added to the root of the second moment.
            policy: see the operator `LearningRate`; its arguments are `kwargs`.
            use_lr_adaption: whether the learning rate follows the gradients (Baydin et al., 2018),
                by `lr_alpha`, normalized or not.
            sparse_dedup_aggregator: `sum` or `mean` of a sparse gradient's values of one index.
            rowWise: whether a row of a sparse parameter has one second moment.
            engine: of the operators.
            enableRAdam: whether sparse updates follow RAdam (Liu et al., 2020).
            use_smart_decay: whether sparse updates decay the moments by a row's missed steps.
        """
        super().__init__(alpha, policy, kwargs)
        for name, value in (
            ("rowWise", rowWise),
            ("enableRAdam", enableRAdam),
            ("use_lr_adaption", use_lr_adaption),
        ):
            if use_smart_decay and value:
                raise NotImplementedError(f"Smart decay is not implemented with {name}")
        self.beta1, self.beta2, self.epsilon, self.engine = beta1, beta2, epsilon, engine
        self.use_lr_adaption, self.lr_alpha = use_lr_adaption, lr_alpha
        self.normalized_lr_adaption = normalized_lr_adaption
        self.sparse_dedup_aggregator = sparse_dedup_aggregator
        self.rowWise, self.enableRAdam = rowWise, enableRAdam
        self.use_smart_decay = use_smart_decay

    def _run(self, net: Any, param_init_net: Any, param_info: Any) -> None:
        param, grad = param_info.blob, param_info.grad
        if self.alpha <= 0:
            return
        rate, iteration = self._rate(net, param_init_net)
        self._aux_params.shared.append(iteration)
        seen = []
        if self.use_smart_decay:
            fill = {"value": 0, "dtype": core.DataType.INT64}
            seen = [self._rows(param_init_net, param, "last_seen", **fill)]
        first = self._state(param_init_net, param, "first_moment")
        if self.rowWise:
            second = self._rows(param_init_net, param, "avg_second_moment")
        else:
            second = self._state(param_init_net, param, "second_moment")
        effective = f"{param}_effective_grad"
        # As in Caffe2 the dense operator, too, writes to the blob of smart decay: its step.
        outputs = [param, first, second, *seen, *([effective] if self.use_lr_adaption else [])]
        settings = {"beta1": self.beta1, "beta2": self.beta2, "epsilon": self.epsilon}
        if isinstance(grad, core.GradientSlice):
            grad = self.dedup(net, self.sparse_dedup_aggregator, grad)
            inputs = [param, first, second, *seen, grad.indices, grad.values, rate, iteration]
            getattr(net, self._sparse_operator())(inputs, outputs, **self._rectified(settings))
            grad = grad.values
        else:
            assert not self.rowWise, "rowWise Adam needs a sparse gradient"
            net.Adam([param, first, second, grad, rate, iteration], outputs, **settings)
        if self.use_lr_adaption:
            net.LearningRateAdaption(
                [rate, grad, effective],
                [rate],
                lr_alpha=self.lr_alpha,
                normalized_lr_adaption=self.normalized_lr_adaption,
            )

    def _sparse_operator(self) -> str:
        if self.rowWise:
            assert not self.enableRAdam, "RAdam is not implemented for rowWise Adam"
            return "RowWiseSparseAdam"
        return "SmartDecaySparseAdam" if self.use_smart_decay else "SparseAdam"

    def _rectified(self, settings: dict[str, Any]) -> dict[str, Any]:
        plain = self.rowWise or self.use_smart_decay
        return settings if plain else {**settings, "enableRAdam": self.enableRAdam}


class DecayAdagradOptimizer(AlphaOptimizer):
    """Adagrad with a decaying sum of squares and, with `beta1`, momentum."""

    operator = "DecayAdagrad"
    arguments = ("beta1", "beta2", "epsilon", "weight_decay", "bias_correction_first")
    suffixes = ("first_mo1ment", "second_moment")  # Caffe2's spelling
    counts = True

    def __init__(
        self,
        alpha: float = 0.01,
        beta1: float = 0.0,
        beta2: float = 0.999,
        epsilon: float = 0.1,
        weight_decay: float = 0.0,
        bias_correction_first: bool = True,
        policy: str = "fixed",
        engine: str | None = "",
        **kwargs: Any,
    ) -> None:
        """Take the settings; `bias_correction_first` corrects the first moment's bias."""
        super().__init__(alpha, policy, kwargs)
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.weight_decay, self.bias_correction_first = weight_decay, bias_correction_first
        self.engine = engine

    def _run(self, net: Any, param_init_net: Any, param_info: Any) -> None:
        """Add `DecayAdagrad`; a sparse gradient gets Adagrad without decay, as in Caffe2."""
        param, grad = param_info.blob, param_info.grad
        if not isinstance(grad, core.GradientSlice) or self.alpha <= 0:
            super()._run(net, param_init_net, param_info)
            return
        rate, _ = self._rate(net, param_init_net)
        state = [param, self._state(param_init_net, param, "squared_sum")]
        inputs = [*state, grad.indices, grad.values, rate]
        net.SparseAdagrad(inputs, state, epsilon=self.epsilon)


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
        self.alpha, self.beta, self.lambda1, self.lambda2 = alpha, beta, lambda1, lambda2
        self.sparse_dedup_aggregator, self.engine = sparse_dedup_aggregator, engine

    def _run(self, net: Any, param_init_net: Any, param_info: Any) -> None:
        param, grad = param_info.blob, param_info.grad
        if self.alpha <= 0:
            return
        state = self._state(param_init_net, param, self.suffix, extra_shape=[2], value=0.0)
        names = ("engine", "alpha", "beta", "lambda1", "lambda2")
        settings = {name: getattr(self, name) for name in names}
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
        self.mu, self.beta, self.epsilon = mu, beta, epsilon
        self.curv_win_width, self.zero_debias = curv_win_width, zero_debias
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
        self.decay, self.momentum = decay, momentum
        self.epsilon, self.engine = epsilon, engine

    def _run(self, net: Any, param_init_net: Any, param_info: Any) -> None:
        param, grad = param_info.blob, param_info.grad
        if self.alpha <= 0:
            return
        assert not isinstance(grad, core.GradientSlice), "RmsProp does not support sparse gradients"
        one = self._one(param_init_net)
        rate, _ = self._rate(net, param_init_net, 1)
        # Caffe2 passes `values`, which ConstantFill does not know: they are zeros anyway.
        step = param_init_net.ConstantFill([param], f"{param}_grad_o", values=0.0)
        squares, buffer = (
            self._state(param_init_net, param, suffix, values=0.0)
            for suffix in ("mean_squares", "momentum")
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
