"""Python: a layer that its user wrote in Python, as Caffe's `python_param` names it.

Law: the user's class is called as Caffe calls it: `setup` once, `reshape` before every `forward`, `backward` with
`propagate_down`; bottoms and tops are `Blob`s, live numpy arrays. What the user's code raises leaves here as one
sentence that says where in that code it was raised, and carries the exception itself for whoever wants it.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from poseidon.errors import DataError
from poseidon.layers.base import BlobSpec, Layer, LayerContext, LayerError, Shape
from poseidon.layers.blob import Blob, Blobs
from poseidon.layers.registry import register
from poseidon.layers.user_modules import look_here_too
from poseidon.proto.caffe_pb2 import FillerParameter, LayerParameter

# Where `import caffe` of the users' modules leads. By name, because that room is above this one.
FRONT_END = "poseidon.pycaffe"


class PythonLayerError(LayerError, DataError):
    """A user's layer raised an exception, which is the cause of this one."""


class CaffeLayer:
    """What a user's layer derives from: `caffe.Layer`.

    Args:
        param: the layer's definition.

    Attributes:
        blobs: learnable blobs; `setup` adds them with `self.blobs.add_blob(*shape)` and fills them.
        param_str: `python_param.param_str`.
        phase: `caffe.TRAIN` or `caffe.TEST`.
        rank: this worker among `workers`.
        workers: processes that train together; 1 in pycaffe unless `set_solver_count` said more.
    """

    type: ClassVar[str] = "Python"
    blobs: Blobs
    param_str: str
    param_str_: str
    phase: int
    rank: int
    workers: int

    def __init__(self, param: LayerParameter) -> None:
        self.layer_param = param

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """Read `param_str`, check the bottoms, add blobs. Called once."""

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """Give the tops their shapes. Called after `setup` and before every `forward`."""
        raise NotImplementedError(f"{type(self).__name__} has no reshape")

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """Write the tops' data."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def backward(self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]) -> None:
        """Write the diff of each bottom that `propagate_down` says, and of the blobs."""
        raise NotImplementedError(f"{type(self).__name__} has no backward")


@register("Python")
class Python(Layer):
    """y = what the user's class computes.

    Bottoms and tops: any number, none too (a data layer, a sink). In place where a bottom and a top have one name.

    Fields (python_param): module, found as `import` finds it; layer, a class in it that derives from `caffe.Layer`;
    param_str, handed to it; share_in_parallel changes nothing, since every worker is a process with its own layer.
    """

    MIN_BOTTOMS: ClassVar[int] = 0
    MAX_BOTTOMS: ClassVar[int | None] = None
    MIN_TOPS: ClassVar[int] = 0
    MAX_TOPS: ClassVar[int | None] = None
    TOPS_MAY_CHANGE_SHAPE: ClassVar[bool] = True

    def __init__(self, param: LayerParameter, context: LayerContext) -> None:
        super().__init__(param, context)
        self.instance: CaffeLayer | None = None
        device = context.device
        self.bottom_blobs = [Blob(0, device=device) for _ in param.bottom]
        self.top_blobs = [
            self.bottom_blobs[place]
            if place < len(param.bottom) and param.bottom[place] == name
            else Blob(0, device=device)
            for place, name in enumerate(param.top)
        ]

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        for blob, shape in zip(self.bottom_blobs, bottoms, strict=True):
            blob.reshape(*shape)
        if self.instance is None:
            self.instance = self._create()
            with self._user_code("setup"):
                self.instance.setup(self.bottom_blobs, self.top_blobs)
            self.declare(*(_spec(index, blob) for index, blob in enumerate(self.instance.blobs)))
        self.reshape_tops()
        return [blob.shape for blob in self.top_blobs]

    def forward(self, *bottoms: Tensor) -> Tensor | tuple[Tensor, ...]:
        run: Callable[..., tuple[Tensor, ...]] = _Run.apply
        tops = run(self, len(bottoms), *bottoms, *self.sources())
        return tops[0] if len(tops) == 1 else tops

    def install(self, index: int, parameter: nn.Parameter) -> None:
        super().install(index, parameter)
        assert self.instance is not None
        self.instance.blobs[index].bind(parameter.data.view(self.blob_specs[index].shape))

    def adopt(self, bottoms: list[Blob], tops: list[Blob]) -> None:
        """Work on these blobs from now on, those of a net that keeps its own."""
        self.bottom_blobs, self.top_blobs = bottoms, tops

    def reshape_tops(self) -> None:
        """The user's `reshape`."""
        assert self.instance is not None
        with self._user_code("reshape"):
            self.instance.reshape(self.bottom_blobs, self.top_blobs)

    def run_forward(self) -> None:
        """The user's `reshape` and `forward`, on the blobs as they are."""
        assert self.instance is not None
        self.reshape_tops()
        with self._user_code("forward"):
            self.instance.forward(self.bottom_blobs, self.top_blobs)

    def run_backward(self, propagate_down: list[bool]) -> None:
        """The user's `backward`, on the blobs as they are."""
        assert self.instance is not None
        with self._user_code("backward"):
            self.instance.backward(self.top_blobs, propagate_down, self.bottom_blobs)

    def _create(self) -> CaffeLayer:
        """Return a new object of the user's class."""
        param = self.param.python_param
        offer_front_end(self.context)
        look_here_too()
        with self._user_code("import"):
            module = importlib.import_module(param.module)
        kind = getattr(module, param.layer, None)
        if kind is None:
            error = AttributeError(f"module '{param.module}' has no class '{param.layer}'")
            raise PythonLayerError(f"{error}, as python_param names it") from error
        if not (isinstance(kind, type) and issubclass(kind, CaffeLayer)):
            raise LayerError(f"'{param.layer}' of module '{param.module}' does not derive from caffe.Layer")
        with self._user_code("__init__"):
            instance = kind(self.param)
        instance.blobs = Blobs()
        instance.param_str = instance.param_str_ = param.param_str
        instance.phase = self.context.phase
        instance.rank, instance.workers = self.context.rank, self.context.workers
        return instance

    @contextmanager
    def _user_code(self, method: str) -> Iterator[None]:
        """Turn what the user's code raises into a sentence with its place."""
        try:
            yield
        except Exception as error:
            param = self.param.python_param
            place = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error}".removesuffix(": ")
            text = (
                f"{param.module}.{param.layer}, {method}: {what} (raised at {place.filename}:{place.lineno})"
            )
            # Only here does nobody above know the layer.
            text = f"layer '{self.param.name}' (Python): {text}" if method == "backward" else text
            raise PythonLayerError(text) from error


def offer_front_end(context: LayerContext) -> None:
    """Let the users' modules say `import caffe`, and ask it for their rank."""
    front: Any = importlib.import_module(FRONT_END)
    if "caffe" not in sys.modules:
        front.install()
    if context.workers > 1:
        front.set_solver_count(context.workers)
        front.set_solver_rank(context.rank)


def _spec(index: int, blob: Blob) -> BlobSpec:
    return BlobSpec(
        name=f"blob{index}",
        shape=blob.shape,
        filler=FillerParameter(type="constant"),
        given=blob.read_data().cpu().clone(),
    )


class _Run(torch.autograd.Function):
    """The user's forward and backward as one node of torch's graph."""

    @staticmethod
    def forward(ctx: Any, layer: Python, bottoms: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        assert layer.instance is not None
        ctx.layer, ctx.bottoms = layer, bottoms
        for blob, tensor in zip(layer.bottom_blobs, tensors[:bottoms], strict=True):
            blob.bind(tensor.data.clone() if blob in layer.top_blobs else tensor)
        for blob in layer.instance.blobs:
            blob.write_data()  # the device's copy is the newer one: an update may have come
        layer.run_forward()
        for blob in layer.instance.blobs:
            blob.read_data()
        return tuple(blob.read_data().clone() for blob in layer.top_blobs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        layer: Python = ctx.layer
        assert layer.instance is not None
        wanted = ctx.needs_input_grad[2:]
        for blob in (*layer.bottom_blobs, *layer.instance.blobs):
            blob.write_diff().zero_()
        for blob, gradient in zip(layer.top_blobs, gradients, strict=True):
            blob.write_diff().copy_(gradient)
        layer.run_backward(list(wanted[: ctx.bottoms]))
        blobs = (*layer.bottom_blobs, *layer.instance.blobs)
        return (
            None,
            None,
            *(blob.read_diff().clone() if want else None for blob, want in zip(blobs, wanted, strict=True)),
        )
