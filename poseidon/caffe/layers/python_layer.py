"""Python: a layer that the user has written in Python (`python_param`).

Law: the user's class is called as by Caffe: `setup` once, `reshape` before every `forward`,
`backward` with `propagate_down`. Bottoms and tops are `Blob`s, views of the memory. An exception of
the user's code becomes an error that names the line, with the exception as its cause.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from poseidon.binding import bind
from poseidon.caffe.layers.base import BlobSpec, Layer, LayerContext, LayerError, Shape
from poseidon.caffe.layers.blob import Blob, BlobVec, BoolVec, RawBlobVec
from poseidon.caffe.layers.registry import add_working_directory, register
from poseidon.caffe.proto.caffe_pb2 import FillerParameter, LayerParameter
from poseidon.errors import DataError, PoseidonError

# The module that users import as `caffe`. By name, because that package imports this one.
PYCAFFE = "poseidon.pycaffe"
_PACKAGE = str(Path(__file__).parents[2])


class PythonLayerError(LayerError, DataError):
    """A user's layer raised an exception, which is `__cause__`."""


class CaffeLayer:
    """The base class of users' layers: `caffe.Layer`.

    Attributes:
        blobs: the learnable blobs; `setup` adds them with `self.blobs.add_blob(*shape)` and fills
            them.
        param_str: `python_param.param_str`.
        phase: `caffe.TRAIN` or `caffe.TEST`.
        rank: the rank of this worker among `workers`; of a virtual worker its number.
        workers: the number of workers that train together; 1 in pycaffe unless set by
            `set_solver_count`.
    """

    type: ClassVar[str] = "Python"
    blobs: BlobVec
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
        """Set the shapes of the tops. Called after `setup` and before every `forward`."""
        raise NotImplementedError(f"{type(self).__name__} has no reshape")

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """Compute the data of the tops."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def backward(
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        """Compute the diffs of the blobs, and of each bottom whose `propagate_down` is True."""
        raise NotImplementedError(f"{type(self).__name__} has no backward")


@register("Python")
class Python(Layer):
    """A layer whose tops the user's class computes.

    Bottoms and tops: any number, including none. In place if a bottom and a top have the same name.

    Fields (python_param): module, a module on Python's path; layer, a class in it that derives from
    `caffe.Layer`; param_str, an attribute of its instance. share_in_parallel has no effect: every
    worker is a process.
    """

    BOTTOMS = (0, None)
    TOPS = (0, None)
    TOPS_MAY_CHANGE_SHAPE = True
    KEEPS_STATE = True

    def __init__(self, param: LayerParameter, context: LayerContext) -> None:
        super().__init__(param, context)
        self.instance: CaffeLayer | None = None
        device = context.device
        self.bottom_blobs = RawBlobVec(Blob(0, device=device) for _ in param.bottom)
        self.top_blobs = RawBlobVec(
            self.bottom_blobs[index]
            if index < len(param.bottom) and param.bottom[index] == name
            else Blob(0, device=device)
            for index, name in enumerate(param.top)
        )

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
        run: Callable[..., tuple[Tensor, ...]] = _UserPasses.apply
        tops = run(self, len(bottoms), *bottoms, *self.sources())
        return tops[0] if len(tops) == 1 else tops

    def install(self, index: int, parameter: nn.Parameter) -> None:
        super().install(index, parameter)
        assert self.instance is not None
        self.instance.blobs[index].bind(parameter.data.view(self.blob_specs[index].shape))

    def use_blobs(self, bottoms: RawBlobVec, tops: RawBlobVec) -> None:
        """Use these blobs from now on, which belong to a pycaffe net."""
        self.bottom_blobs, self.top_blobs = bottoms, tops

    def reshape_tops(self) -> None:
        """Call the user's `reshape`."""
        assert self.instance is not None
        with self._user_code("reshape"):
            self.instance.reshape(self.bottom_blobs, self.top_blobs)

    def run_forward(self) -> None:
        """Call the user's `reshape` and `forward` on the current blobs."""
        assert self.instance is not None
        self.reshape_tops()
        with self._user_code("forward"):
            self.instance.forward(self.bottom_blobs, self.top_blobs)

    def run_backward(self, propagate_down: list[bool]) -> None:
        """Call the user's `backward` on the current blobs."""
        assert self.instance is not None
        with self._user_code("backward"):
            self.instance.backward(self.top_blobs, BoolVec(propagate_down), self.bottom_blobs)

    def _create(self) -> CaffeLayer:
        """Create an instance of the user's class."""
        param = self.param.python_param
        for name in ("module", "layer"):
            if not getattr(param, name):
                raise LayerError(f"has no {name} in python_param")
        install_pycaffe(self.context)
        add_working_directory()
        with self._user_code("import"):
            module = importlib.import_module(param.module)
        kind = getattr(module, param.layer, None)
        if kind is None:
            error = AttributeError(f"module '{param.module}' has no class '{param.layer}'")
            raise PythonLayerError(f"{error}, which python_param names") from error
        if not (isinstance(kind, type) and issubclass(kind, CaffeLayer)):
            raise LayerError(
                f"'{param.layer}' of module '{param.module}' does not derive from caffe.Layer"
            )
        with self._user_code("__init__"):
            instance = kind(self.param)
        instance.blobs = BlobVec()
        instance.param_str = instance.param_str_ = param.param_str
        instance.phase = self.context.phase
        instance.rank, instance.workers = self.context.rank, self.context.workers
        return instance

    @contextmanager
    def _user_code(self, method: str) -> Iterator[None]:
        """Run the user's code with the rank of its worker, as a process may compute for several;
        translate an exception to an error that names the line.
        """
        try:
            with _acting_as(self.context):
                yield
        except (Exception, SystemExit) as error:
            param = self.param.python_param
            frames = traceback.extract_tb(error.__traceback__)
            own = (_PACKAGE, "importlib")
            frame = next(
                (f for f in reversed(frames) if not any(name in f.filename for name in own)),
                frames[-1],
            )
            what = f"{type(error).__name__}: {error}".removesuffix(": ")
            what = str(error) if isinstance(error, PoseidonError) else what
            text = f"{param.module}.{param.layer}, {method}: {what} (raised at {frame.filename}:{frame.lineno})"
            if isinstance(error, ModuleNotFoundError) and f"{param.module}.".startswith(
                f"{error.name}."
            ):
                text = f"{param.module}.{param.layer}, {method}: {what}; put its folder on PYTHONPATH, or start in its folder"
            # In the backward pass no caller adds the layer's name.
            text = f"layer '{self.param.name}' (Python): {text}" if method == "backward" else text
            raise PythonLayerError(text) from error


def _acting_as(context: LayerContext) -> AbstractContextManager[None]:
    """Let `caffe.solver_rank` and `caffe.solver_count` return the layer's worker and the number of
    workers, if there are several.
    """
    if context.workers == 1:
        return nullcontext()
    mode: Any = importlib.import_module(f"{PYCAFFE}.mode")
    acting: AbstractContextManager[None] = mode.acting_as(context.rank, context.workers)
    return acting


def install_pycaffe(context: LayerContext) -> None:
    """Make `import caffe` work in users' modules, with the worker's rank."""
    pycaffe: Any = importlib.import_module(PYCAFFE)
    if "caffe" not in sys.modules:
        bind()
    if context.workers > 1:
        pycaffe.set_solver_count(context.workers)
        pycaffe.set_solver_rank(context.rank)


def _spec(index: int, blob: Blob) -> BlobSpec:
    return BlobSpec(
        name=f"blob{index}",
        shape=blob.shape,
        filler=FillerParameter(type="constant"),
        initial=blob.read_data().cpu().clone(),
    )


class _UserPasses(torch.autograd.Function):
    """The autograd function of the user's forward and backward."""

    @staticmethod
    def forward(ctx: Any, layer: Python, bottoms: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        assert layer.instance is not None
        ctx.layer, ctx.bottoms = layer, bottoms
        for blob, tensor in zip(layer.bottom_blobs, tensors[:bottoms], strict=True):
            blob.bind(tensor.data.clone() if blob in layer.top_blobs else tensor)
        for blob in layer.instance.blobs:
            # marks the device's copy as newer, because an update may have changed it
            blob.write_data()
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
            *(
                blob.read_diff().clone() if want else None
                for blob, want in zip(blobs, wanted, strict=True)
            ),
        )
