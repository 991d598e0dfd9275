"""Optimizers with a step of their own for each parameter: Adagrad, Adam and their kin."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.optimizer.base import Optimizer


class _Adaptive(Optimizer):
    """An optimizer with a base learning rate `alpha` and a policy."""

    def __init__(self, alpha: float, policy: str, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.alpha = alpha
        self.policy = policy
        self.init_kwargs = kwargs

    def _rate(self, net: Any, init_net: Any, sign: int = -1) -> tuple[Any, Any]:
        return self.build_lr(
            net, init_net, base_learning_rate=sign * self.alpha, policy=self.policy, **self.init_kwargs
        )

    def scale_learning_rate(self, scale: float) -> None:
        """Multiply the base learning rate."""
        self.alpha *= scale

    def _rows(self, init_net: Any, param: Any, suffix: str) -> Any:
        """Return a blob of zeros with one entry for each row of the parameter."""
        name = f"{param}_{suffix}"
        shapes, _ = workspace.InferShapesAndTypes([init_net])
        if shapes.get(str(param)):
            blob = init_net.ConstantFill([], name, shape=[shapes[str(param)][0]], value=0.0)
        else:
            shape = init_net.Shape(param, f"{param}_shape")
            rows = init_net.Slice([shape], f"{shape}_numrows", starts=[0], ends=[1])
            blob = init_net.ConstantFill(rows, name, input_as_shape=1, value=0.0)
        self._aux_params.local.append(blob)
        return blob


class AdagradOptimizer(_Adaptive):
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
        **kwargs: Any,
    ) -> None:
        """Take the settings.

        Args:
            alpha: the base learning rate.
            epsilon: added to the root.
            decay: of the sum of squares at each step.
            weight_decay: of the parameters, in sparse updates.
            policy: see the operator `LearningRate`; its arguments are `kwargs`.
            sparse_dedup_aggregator: `sum` or `mean` of the values of one index of a sparse gradient.
            rowWise: whether a row of a sparse parameter has one sum.
            engine: of the operators.
            lars: the offset of LARS, None for none.
            output_effective_lr: whether the effective learning rate becomes a blob.
            output_effective_lr_and_update: whether the update becomes one too.
        """
        super().__init__(alpha, policy, kwargs)
        self.epsilon = epsilon
        self.decay = decay
        self.weight_decay = float(weight_decay)
        self.sparse_dedup_aggregator = sparse_dedup_aggregator
        self.rowWise = rowWise
        self.engine = engine
        self.lars = lars
        self.output_effective_lr = output_effective_lr
        self.output_effective_lr_and_update = output_effective_lr_and_update

    def _run(self, net: Any, param_init_net: Any, param_info: Any) -> None:
        param, grad = param_info.blob, param_info.grad
        if self.alpha <= 0:
            return
        self._add_lars(net, param_init_net, param_info, self.lars, self.weight_decay)
        rate, _ = self._rate(net, param_init_net)
        if self.rowWise:
            total = self._rows(param_init_net, param, "avg_squared_sum")
        else:
            total = self._state(param_init_net, param, "squared_sum")
        if isinstance(grad, core.GradientSlice):
            assert self.decay == 1.0, "Decay is not implemented for SparseAdagrad and must be set to 1"
            grad = self.dedup(net, self.sparse_dedup_aggregator, grad)
            operator = net.RowWiseSparseAdagrad if self.rowWise else net.SparseAdagrad
            extra = {"weight_decay": self.weight_decay} if self.rowWise and self.weight_decay else {}
            operator(
                [param, total, grad.indices, grad.values, rate],
                [param, total],
                epsilon=self.epsilon,
                engine=self.engine,
                **extra,
            )
            return
        assert not self.rowWise, "rowWise Adagrad needs a sparse gradient"
        outputs = [param, total]
        if self.output_effective_lr or self.output_effective_lr_and_update:
            outputs.append(f"{param}_effective_lr")
        if self.output_effective_lr_and_update:
            outputs.append(f"{param}_update")
        net.Adagrad(
            [param, total, grad, rate],
            outputs,
            epsilon=self.epsilon,
            decay=float(self.decay),
            engine=self.engine,
        )


class WngradOptimizer(_Adaptive):
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
        """Take the settings; `moment_init` is the first value of the moment, see `AdagradOptimizer` for the others."""
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
        moment = param_init_net.ConstantFill([], f"{param}_moment", shape=[1], value=self.moment_init)
        self._aux_params.local.append(moment)
        settings = {"epsilon": self.epsilon, "engine": self.engine}
        if isinstance(grad, core.GradientSlice):
            grad = self.dedup(net, self.sparse_dedup_aggregator, grad)
            net.SparseWngrad([param, moment, grad.indices, grad.values, rate], [param, moment], **settings)
            return
        outputs = [param, moment]
        if self.output_effective_lr or self.output_effective_lr_and_update:
            outputs.append(f"{param}_effective_lr")
        if self.output_effective_lr_and_update:
            outputs.append(f"{param}_update")
        net.Wngrad([param, moment, grad, rate], outputs, **settings)


class StormOptimizer(_Adaptive):
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
        total = param_init_net.ConstantFill(
            [], f"{param}_grad_sq_sum", shape=[1], value=self.grad_sq_sum_init
        )
        self._aux_params.local.append(total)
        state = [param, moment, total]
        settings = {"momentum": self.momentum, "beta": self.beta}
        if isinstance(grad, core.GradientSlice):
            grad = self.dedup(net, self.sparse_dedup_aggregator, grad)
            net.SparseStorm([*state, grad.values, grad.indices, rate], state, **settings)
        else:
            net.Storm([*state, grad, rate], state, **settings)


class AdadeltaOptimizer(_Adaptive):
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


class AdamOptimizer(_Adaptive):
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
            use_lr_adaption: whether the learning rate follows the gradients (Baydin et al., 2018), by `lr_alpha`,
                normalized or not.
            sparse_dedup_aggregator: `sum` or `mean` of the values of one index of a sparse gradient.
            rowWise: whether a row of a sparse parameter has one second moment.
            engine: of the operators.
            enableRAdam: whether sparse updates are those of RAdam (Liu et al., 2020).
            use_smart_decay: whether sparse updates decay the moments by the steps that a row was left out.
        """
        super().__init__(alpha, policy, kwargs)
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
        first = self._state(param_init_net, param, "first_moment")
        if self.rowWise:
            second = self._rows(param_init_net, param, "second_moment")
        else:
            second = self._state(param_init_net, param, "second_moment")
        outputs: list[Any] = [param, first, second]
        effective = f"{param}_effective_grad"
        if self.use_lr_adaption:
            outputs.append(effective)
        settings = {"beta1": self.beta1, "beta2": self.beta2, "epsilon": self.epsilon}
        if isinstance(grad, core.GradientSlice):
            self._run_sparse(net, param_init_net, grad, (rate, iteration), outputs, settings)
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

    def _run_sparse(
        self,
        net: Any,
        init_net: Any,
        grad: Any,
        rate_and_iteration: tuple[Any, Any],
        outputs: list[Any],
        settings: dict[str, Any],
    ) -> None:
        grad = self.dedup(net, self.sparse_dedup_aggregator, grad)
        inputs = [*outputs[:3], grad.indices, grad.values, *rate_and_iteration]
        if self.rowWise:
            net.RowWiseSparseAdam(inputs, outputs, **settings)
        elif self.use_smart_decay:
            seen = self._state(init_net, outputs[0], "last_seen")
            net.SmartDecaySparseAdam([*inputs[:3], seen, *inputs[3:]], [*outputs[:3], seen], **settings)
        elif self.enableRAdam:
            net.SparseAdam(inputs, outputs, enableRAdam=True, **settings)
        else:
            net.SparseAdam(inputs, outputs, **settings)


class DecayAdagradOptimizer(_Adaptive):
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
        """Take the settings; `bias_correction_first` says whether the first moment's bias is corrected."""
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
        assert not isinstance(grad, core.GradientSlice), "DecayAdagrad does not support sparse gradients"
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
