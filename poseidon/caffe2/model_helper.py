"""Models: a net, the net that fills its parameters, and what is known about the parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from poseidon.caffe2 import core, scope, workspace
from poseidon.caffe2.helpers.train import add_weight_decay
from poseidon.caffe2.modeling.initializers import ExternalInitializer
from poseidon.caffe2.modeling.parameter_info import ParameterInfo, ParameterTags
from poseidon.caffe2.modeling.parameter_sharing import parameter_sharing_context
from poseidon.caffe2.optimizer_context import DEFAULT_OPTIM, OptimizerContext
from poseidon.caffe2.predictor.predictor_py_utils import ExtractPredictorNet

__all__ = ["ExtractPredictorNet", "ModelHelper"]

DEFAULT_ARG_SCOPE = {"order": "NCHW", "use_cudnn": True, "cudnn_exhaustive_search": False}
FILLER = "/param_init_net"
"""The end of `debug_info` of the fillers of a complete net."""


class ModelHelper:
    """A model under construction: `net`, `param_init_net` and the parameters.

    `model.Relu(x, y)` adds an operator to `net`, as `model.net.Relu` does.
    """

    def __init__(
        self,
        name: str | None = None,
        init_params: bool = True,
        allow_not_known_ops: bool = True,
        skip_sparse_optim: bool = False,
        param_model: ModelHelper | None = None,
        arg_scope: dict[str, Any] | None = None,
    ) -> None:
        """Make an empty model.

        Args:
            name: of the net; the init net is called `<name>_init`. By default `model`.
            init_params: whether parameters get fillers; a test model's exist already.
            allow_not_known_ops: kept for Caffe2's scripts; every operator is known.
            skip_sparse_optim: whether optimizers leave parameters with sparse gradients alone.
            param_model: a model whose parameters and init net this one shares.
            arg_scope: default arguments of the brew helpers, e.g. `{"order": "NHWC"}`.
        """
        self.name = name or "model"
        self.net = core.Net(self.name)
        self.params: list[Any]
        self._computed_params: list[Any]
        if param_model is None:
            self.param_init_net = core.Net(self.name + "_init")
            self.param_to_grad: dict[Any, Any] = {}
            self.params = []
            self._parameters_info: dict[Any, ParameterInfo] = {}
            self._computed_params = []
        else:
            self.param_init_net = param_model.param_init_net
            self.param_to_grad = param_model.param_to_grad
            self.params = param_model.params
            self._parameters_info = param_model._parameters_info
            self._computed_params = param_model._computed_params
        self._devices: list[int] = []
        self.gradient_ops_added = False
        self.init_params = init_params
        self.allow_not_known_ops = allow_not_known_ops
        self.skip_sparse_optim = skip_sparse_optim
        self.weights: list[Any] = []
        self.biases: list[Any] = []
        self.grad_map: dict[Any, Any] = {}
        self._arg_scope = {**DEFAULT_ARG_SCOPE, **(arg_scope or {})}

    @property
    def arg_scope(self) -> dict[str, Any]:
        """The default arguments of the brew helpers."""
        return self._arg_scope

    def get_name(self) -> str:
        return self.name

    # Parameters.

    def _normalize_tags(self, tags: Any) -> set[str]:
        return set() if not tags else {tags} if isinstance(tags, str) else set(tags)

    def create_param(self, param_name: Any, shape: Any, initializer: Any, tags: Any = None) -> Any:
        """Make a parameter, or return the one of this name that exists already.

        Args:
            param_name: a name, which gets the current scope (or the scope that shares parameters
                with it), or a reference, whose name stays.
            shape: its shape.
            initializer: see `poseidon.caffe2.modeling.initializers`.
            tags: one or several of `ParameterTags`.

        Returns:
            the reference to its blob.

        Raises:
            AssertionError: it exists with a different shape.
            TypeError: the name is neither string nor reference, or the initializer is not one.
        """
        if not hasattr(initializer, "create_param"):
            raise TypeError(f"create_param: expected an Initializer, found {initializer!r}")
        if isinstance(param_name, core.BlobReference):
            name = str(param_name)
        elif isinstance(param_name, str):
            name = parameter_sharing_context.get_parameter_name(param_name)
        else:
            raise TypeError(f"Unsupported type for param_name: {type(param_name)}")
        if name in self._parameters_info:
            known = self._parameters_info[name]
            assert known.shape == shape, f"parameter {name} has shape {known.shape}, not {shape}"
            return known.blob
        maker = initializer if self.init_params else ExternalInitializer()
        info = maker.create_param(
            param_name=core.BlobReference(name), init_net=self.param_init_net, shape=shape
        )
        optimizers = OptimizerContext.current()
        for tag in (*sorted(self._normalize_tags(tags)), DEFAULT_OPTIM):
            if info.optimizer is None and optimizers.has_optimizer(tag):
                info.optimizer = optimizers.get_optimizer(tag)
        self._parameters_info[name] = info
        self.AddParameter(info.blob, tags)
        return info.blob

    def get_param_info(self, param: Any) -> ParameterInfo | None:
        """Return what is known about a parameter, None where it is not one."""
        assert isinstance(param, core.BlobReference), f"Param {param} is not a BlobReference"
        return self._parameters_info.get(param)

    def add_param_DEPRECATED(
        self, param: Any, key: Any = None, shape: Any = None, length: Any = None
    ) -> Any:
        """Add a parameter that the caller has made: a reference or a name."""
        if isinstance(param, str):
            param = core.BlobReference(param)
        self.params.append(param)
        if param not in self._parameters_info:
            self._parameters_info[param] = ParameterInfo(
                len(self._parameters_info), param, key=key, shape=shape, length=length
            )
        return self._parameters_info[param]

    def AddParameter(self, param: Any, tags: Any = None) -> None:
        """Add a blob to the parameters, or to the computed ones, by its tags."""
        assert isinstance(param, core.BlobReference), f"expected a BlobReference, got {param!r}"
        tags = self._normalize_tags(tags)
        (self._computed_params if ParameterTags.COMPUTED_PARAM in tags else self.params).append(
            param
        )
        if ParameterTags.WEIGHT in tags:
            self.weights.append(param)
        if ParameterTags.BIAS in tags:
            self.biases.append(param)

    @staticmethod
    def _NormalizeNamescope(namescope: str | None) -> str:
        if namescope is None:
            return scope.CurrentNameScope()
        separator = scope._NAMESCOPE_SEPARATOR
        return (
            namescope if not namescope or namescope.endswith(separator) else namescope + separator
        )

    def _in_scope(self, params: Iterable[Any], namescope: str | None) -> list[Any]:
        prefix = self._NormalizeNamescope(namescope)
        return [p for p in params if not prefix or p.GetNameScope().startswith(prefix)]

    def GetParams(self, namescope: str | None = None, top_scope: bool = False) -> list[Any]:
        """Return the parameters of a scope (default: the current) and those in it; "" is all."""
        return self._in_scope(self.params, namescope)

    def GetComputedParams(self, namescope: str | None = None) -> list[Any]:
        """Return the parameters that the net computes itself, e.g. running means, of a scope."""
        return self._in_scope(self._computed_params, namescope)

    def GetAllParams(self, namescope: str | None = None) -> list[Any]:
        """Return parameters and computed parameters of a scope."""
        return self.GetParams(namescope) + self.GetComputedParams(namescope)

    def GetWeights(self, namescope: str | None = None) -> list[Any]:
        """Return the weights of a scope."""
        return self._in_scope(self.weights, namescope)

    def GetBiases(self, namescope: str | None = None) -> list[Any]:
        """Return the biases of a scope."""
        return self._in_scope(self.biases, namescope)

    def Validate(self) -> None:
        """Raise AssertionError when a parameter was added twice."""
        duplicates = self._Validate()
        assert not duplicates, f"Duplicate params: {duplicates}"

    def _Validate(self) -> list[Any]:
        counts = Counter(str(param) for param in self.params)
        return [name for name, count in counts.items() if count > 1]

    # Gradients.

    def AddGradientOperators(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Append the gradient operators; see `core.Net.AddGradientOperators`.

        Returns:
            the gradient of each blob; the gradients of the parameters are in `param_to_grad`.

        Raises:
            RuntimeError: they were added before.
        """
        if self.gradient_ops_added:
            raise RuntimeError("You cannot run AddGradientOperators twice.")
        self.Validate()
        self.gradient_ops_added = True
        self.grad_map = self.net.AddGradientOperators(*args, **kwargs)
        self.param_to_grad = self.get_param_to_grad(self.params)
        for param, grad in self.param_to_grad.items():
            info = self.get_param_info(param)
            if info is None:
                self._parameters_info[param] = ParameterInfo(param_id=None, param=param, grad=grad)
            else:
                info.grad = grad
        return self.grad_map

    def get_param_to_grad(self, params: Iterable[Any]) -> dict[Any, Any]:
        """Return the gradients of parameters that have one.

        Raises:
            RuntimeError: the gradient operators were not added yet.
        """
        if not self.gradient_ops_added:
            raise RuntimeError("You need to run AddGradientOperators first.")
        return {p: self.grad_map[str(p)] for p in params if str(p) in self.grad_map}

    def AddWeightDecay(self, weight_decay: float) -> None:
        """Add the decay to the gradients, after the gradient operators: `brew.add_weight_decay`."""
        add_weight_decay(self, weight_decay)

    def GetOptimizationParamInfo(self, params: Iterable[Any] | None = None) -> list[Any]:
        """Return the parameters to optimize: those, of all or of `params`, with a gradient."""
        chosen = self.param_to_grad if params is None else self.get_param_to_grad(params)
        return [
            self.get_param_info(param)
            for param, grad in chosen.items()
            if not (self.skip_sparse_optim and isinstance(grad, core.GradientSlice))
        ]

    # Data, devices, nets.

    def TensorProtosDBInput(
        self,
        unused_blob_in: Any,
        blob_out: Any,
        batch_size: int,
        db: str,
        db_type: str,
        **kwargs: Any,
    ) -> Any:
        """Read batches of TensorProtos from a database into `blob_out`."""
        assert len(unused_blob_in) == 0, "You cannot have blob_in for TensorProtosDBInput"
        reader = self.param_init_net.CreateDB([], "dbreader_" + db, db=db, db_type=db_type)
        return self.net.TensorProtosDBInput(reader, blob_out, batch_size=batch_size, **kwargs)

    def CreateDB(self, blob_out: Any, db: str, db_type: str, **kwargs: Any) -> Any:
        """Open a database in the init net; return the reference to its reader."""
        return self.param_init_net.CreateDB([], blob_out, db=db, db_type=db_type, **kwargs)

    def GetDevices(self) -> list[int]:
        """Return the devices of a data-parallel model.

        Raises:
            AssertionError: the model was not parallelized.
        """
        assert self._devices, "Use data_parallel_model to run model on multiple GPUs."
        return self._devices

    def RunAllOnGPU(self, *args: Any, **kwargs: Any) -> None:
        """Place both nets on a GPU."""
        self.param_init_net.RunAllOnGPU(*args, **kwargs)
        self.net.RunAllOnGPU(*args, **kwargs)

    def Proto(self) -> Any:
        return self.net.Proto()

    def InitProto(self) -> Any:
        return self.param_init_net.Proto()

    def GetCompleteNet(self) -> Any:
        """Return one net: the fillers, then this model's operators. It has the model's type.

        `debug_info` of the fillers ends with `FILLER`. The parameters are not external inputs.
        """
        complete = self.param_init_net.Clone(f"{self.name}_complete_net")
        for op in complete.Proto().op:
            op.debug_info += FILLER
        complete.AppendNet(self.net)
        if self.net.Proto().HasField("type"):
            complete.Proto().type = self.net.Proto().type
        return complete

    def ConstructInitTrainNetfromNet(self, net: Any) -> None:
        """Take the init net and the net from one of `GetCompleteNet`; both are of its type."""
        fillers = [op.debug_info.endswith(FILLER) for op in net.Proto().op]

        def part(name: str, chosen: bool) -> Any:
            mask = [index for index, filler in enumerate(fillers) if filler is chosen]
            name = f"{net.Name()}/generated_{name}"
            return net.Clone(name, op_id_mask=mask, update_external_list=True)

        self.param_init_net = part("param_init_net", True)
        self.net = part("net", False)

    def __getattr__(self, op_type: str) -> Any:
        if op_type.startswith("__") or op_type in ("net", "param_init_net"):
            raise AttributeError(op_type)
        return getattr(self.net, op_type)

    def __dir__(self) -> Iterable[str]:
        return sorted({*super().__dir__(), *workspace.RegisteredOperators()})
