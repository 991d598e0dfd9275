"""Optimizers with a step of their own for each parameter: WNGrad, STORM, Adadelta, Adam."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.optimizer.base import AlphaOptimizer


class WngradOptimizer(AlphaOptimizer):
    """WNGrad (Wu et al., 2018): one step size for the whole parameter."""

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
        self.epsilon = epsilon
        self.sparse_dedup_aggregator = sparse_dedup_aggregator
        self.engine = engine
        self.moment_init = moment_init
        self.lars = lars
        self.output_effective_lr = output_effective_lr
        self.output_effective_lr_and_update = output_effective_lr_and_update

    def _run(self, net: Any, param_init_net: Any, param_info: Any) -> None:
        param, grad = param_info.blob, param_info.grad
        if self.alpha <= 0:
            return
        self._add_lars(net, param_init_net, param_info, self.lars)
        rate, _ = self._rate(net, param_init_net)
        moment = self._constant(param_init_net, param, "moment", 1, self.moment_init)
        settings = {"epsilon": self.epsilon, "engine": self.engine}
        if isinstance(grad, core.GradientSlice):
            grad = self.dedup(net, self.sparse_dedup_aggregator, grad)
            net.SparseWngrad(
                [param, moment, grad.indices, grad.values, rate], [param, moment], **settings
            )
            return
        outputs = [param, moment, *self._effective(param)]
        net.Wngrad([param, moment, grad, rate], outputs, **settings)


class StormOptimizer(AlphaOptimizer):
    """STORM (Cutkosky and Orabona, 2019): momentum with variance reduction."""

    def __init__(
        self,
        lr: float = 0.1,
        momentum: float = 10.0,
        beta: float = 0.1,
        grad_sq_sum_init: float = 0.01,
        policy: str = "fixed",
        sparse_dedup_aggregator: str | None = None,
        lars: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the settings; `grad_sq_sum_init` is the first sum of squared gradients."""
        super().__init__(lr, policy, kwargs)
        self.momentum = momentum
        self.beta = beta
        self.grad_sq_sum_init = grad_sq_sum_init
        self.sparse_dedup_aggregator = sparse_dedup_aggregator
        self.lars = lars

    def _run(self, net: Any, param_init_net: Any, param_info: Any) -> None:
        param, grad = param_info.blob, param_info.grad
        if self.alpha <= 0:
            return
        self._add_lars(net, param_init_net, param_info, self.lars)
        rate, _ = self._rate(net, param_init_net)
        moment = self._state(param_init_net, param, "moment")
        total = self._constant(param_init_net, param, "grad_sq_sum", 1, self.grad_sq_sum_init)
        state = [param, moment, total]
        settings = {"momentum": self.momentum, "beta": self.beta}
        if isinstance(grad, core.GradientSlice):
            grad = self.dedup(net, self.sparse_dedup_aggregator, grad)
            net.SparseStorm([*state, grad.values, grad.indices, rate], state, **settings)
        else:
            net.Storm([*state, grad, rate], state, **settings)


class AdadeltaOptimizer(AlphaOptimizer):
    """Adadelta (Zeiler, 2012)."""

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
        self.epsilon = epsilon
        self.decay = decay
        self.sparse_dedup_aggregator = sparse_dedup_aggregator
        self.engine = engine

    def _run(self, net: Any, param_init_net: Any, param_info: Any) -> None:
        param, grad = param_info.blob, param_info.grad
        if self.alpha <= 0:
            return
        rate, _ = self._rate(net, param_init_net)
        state = [
            param,
            self._state(param_init_net, param, "squared_moment"),
            self._state(param_init_net, param, "squared_moment_update"),
        ]
        settings = {"epsilon": self.epsilon, "decay": self.decay, "engine": self.engine}
        if isinstance(grad, core.GradientSlice):
            grad = self.dedup(net, self.sparse_dedup_aggregator, grad)
            net.SparseAdadelta([*state, grad.indices, grad.values, rate], state, **settings)
        else:
            net.Adadelta([*state, grad, rate], state, **settings)


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
        self.beta1 = beta1
        self.beta2 = beta2
        self.epsilon = epsilon
        self.use_lr_adaption = use_lr_adaption
        self.lr_alpha = lr_alpha
        self.normalized_lr_adaption = normalized_lr_adaption
        self.sparse_dedup_aggregator = sparse_dedup_aggregator
        self.rowWise = rowWise
        self.engine = engine
        self.enableRAdam = enableRAdam
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
        self.beta1 = beta1
        self.beta2 = beta2
        self.epsilon = epsilon
        self.weight_decay = weight_decay
        self.bias_correction_first = bias_correction_first
        self.engine = engine

    def _run(self, net: Any, param_init_net: Any, param_info: Any) -> None:
        param, grad = param_info.blob, param_info.grad
        if self.alpha <= 0:
            return
        assert not isinstance(grad, core.GradientSlice), "DecayAdagrad needs dense gradients"
        rate, iteration = self._rate(net, param_init_net)
        self._aux_params.shared.append(iteration)
        state = [
            param,
            self._state(param_init_net, param, "first_mo1ment"),  # Caffe2's spelling
            self._state(param_init_net, param, "second_moment"),
        ]
        net.DecayAdagrad(
            [*state, grad, rate, iteration],
            state,
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
            weight_decay=self.weight_decay,
            bias_correction_first=self.bias_correction_first,
        )
