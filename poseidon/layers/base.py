"""What a Caffe layer type is here: facts, `setup`, `forward`.

Law: a layer checks everything the definition says in `setup`, before any data moves, and raises `LayerError` with one
clause that the net completes with file, line and layer name. `forward` trusts `setup`, reads no definition, and keeps
nothing between calls but its blobs and its random generator (recurrent layers say what more they keep). The leading
axis of a bottom may differ from call to call (the last batch of a file is smaller); every other extent is what `setup`
was told last: it may be called again with other shapes, computes everything that depends on them anew, and opens files
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from poseidon.errors import PoseidonError
from poseidon.layers.fillers import FillerError, check, fill
from poseidon.layers.naming import counted
from poseidon.proto.caffe_pb2 import FillerParameter, LayerParameter

Shape = tuple[int, ...]
# Caffe counts the values of a blob in an int.
LARGEST_BLOB = 2**31 - 1
CPU = torch.device("cpu")


class LayerError(PoseidonError):
    """One layer's definition is wrong; the text is a clause, and the net adds file, line and layer name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """Where a layer lives: which phase, which worker of which job, which device.

    Attributes:
        phase: `caffe_pb2.TRAIN` or `caffe_pb2.TEST`.
        seed: the job's random seed; first weights depend on it alone.
        rank: this worker among `workers`.
        client: this machine among `clients`.
        local_rank: this worker among the `local_workers` of its machine.
        device: where parameters and blobs live.
        resolve: turns a path of the definition into a file's path.
    """

    phase: int
    seed: int
    rank: int = 0
    workers: int = 1
    client: int = 0
    clients: int = 1
    local_rank: int = 0
    local_workers: int = 1
    device: torch.device = CPU
    resolve: Callable[[str], Path] = field(default=Path)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobSpec:
    """One blob that `setup` asks for, in the order Caffe saves them.

    Attributes:
        name: the layer's attribute.
        shape: its shape.
        filler: its first values.
        learns: False where `forward` moves it and the solver must not: its lr_mult is 0.
        given: first values in place of the filler's.
    """

    name: str
    shape: Shape
    filler: FillerParameter
    learns: bool = True
    given: Tensor | None = field(default=None, compare=False)


class Layer(nn.Module):
    """One layer of a net.

    A subclass states its facts, and defines `setup` and `forward`. `forward` takes one tensor for each bottom and
    returns one tensor when the layer has one top, else a tuple of them in order.

    Args:
        param: the layer's definition.
        context: where it lives.
    """

    MIN_BOTTOMS: ClassVar[int] = 1
    MAX_BOTTOMS: ClassVar[int | None] = 1
    MIN_TOPS: ClassVar[int] = 1
    MAX_TOPS: ClassVar[int | None] = 1
    # Each bottom has its own top, whatever their number (Convolution on several bottoms).
    EQUAL_BOTTOMS_AND_TOPS: ClassVar[bool] = False
    # The first top weighs 1 in the loss unless the definition says otherwise, and need not be named.
    IS_LOSS: ClassVar[bool] = False
    # The backward pass does not read the tops, so the layer above may overwrite them.
    TOPS_MAY_BE_OVERWRITTEN: ClassVar[bool] = False
    # Draws random numbers in `forward` and is given a generator of its own.
    IS_RANDOM: ClassVar[bool] = False
    # `forward` moves the blobs itself in training; workers keep the mean of theirs.
    STATISTICS: ClassVar[bool] = False
    # `setup` opens files that the definition names, or looks for a folder to write to.
    OPENS_FILES: ClassVar[bool] = False
    # `forward` may give tops of other shapes than `setup` said; the layers above are then set up again.
    TOPS_MAY_CHANGE_SHAPE: ClassVar[bool] = False

    def __init__(self, param: LayerParameter, context: LayerContext) -> None:
        super().__init__()
        self.param = param
        self.context = context
        self.blob_specs: tuple[BlobSpec, ...] = ()
        # Set by the net where nobody else reads the bottom, so that `forward` may put the top in its memory.
        self.overwrites_bottom = False
        # Set by `setup` where the first blob is an outputs x inputs matrix whose gradient is u^T v, with v the bottom
        # and u the gradient at the top.
        self.offers_factors = False
        # Cleared by `setup` where a layer that has statistics leaves them as they are.
        self.moves_statistics = self.STATISTICS
        self.generator: torch.Generator | None = None
        # Set by `setup` where the definition rules out what the class allows.
        self.tops_may_change_shape = self.TOPS_MAY_CHANGE_SHAPE
        self._views: dict[str, nn.Parameter] = {}

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        """Check the definition against the bottoms' shapes and declare the blobs.

        Args:
            bottoms: shape of each bottom.

        Returns:
            shape of each top.

        Raises:
            LayerError: what is wrong and what was expected.
        """
        raise NotImplementedError

    def blobs(self) -> list[Tensor]:
        """Return the learnable blobs in the order Caffe saves them; writing into one writes into the parameter."""
        return [
            self._views[spec.name].view(spec.shape)
            if spec.name in self._views
            else self.get_parameter(spec.name)
            for spec in self.blob_specs
        ]

    def sources(self) -> list[nn.Parameter]:
        """Return the parameter behind each blob, whatever the shape under which it is shared."""
        return [
            self._views[spec.name] if spec.name in self._views else self.get_parameter(spec.name)
            for spec in self.blob_specs
        ]

    def install(self, index: int, parameter: nn.Parameter) -> None:
        """Make `parameter` the blob of that index: its own new one, or one that another layer owns.

        Args:
            index: which blob.
            parameter: of the blob's shape; or, shared permissively, of another shape with as many values.
        """
        spec = self.blob_specs[index]
        if parameter.shape == spec.shape:
            # A blob declared absent at first keeps its early place in torch's order unless it is taken out.
            self._parameters.pop(spec.name, None)
            self.register_parameter(spec.name, parameter)
            return
        if not self._views:
            self.register_forward_pre_hook(Layer._refresh_views)
        self._views[spec.name] = parameter

    def _refresh_views(self, _: object = None) -> None:
        """Show each blob that is shared under another shape; anew in each pass, as part of its graph."""
        shapes = {spec.name: spec.shape for spec in self.blob_specs}
        for name, parameter in self._views.items():
            self.__dict__[name] = parameter.view(shapes[name])

    def close(self) -> None:
        """Let go of files and threads. Layers that hold none need not define it."""

    def declare(self, *specs: BlobSpec) -> None:
        """State the learnable blobs, from `setup`. Blobs that are declared stay; a later call only compares.

        Raises:
            LayerError: a filler is unknown or does not fit its blob, a blob is too large, or would change its shape.
        """
        if self.blob_specs:
            self._compare(specs)
            return
        for spec in specs:
            check_size(spec.name, spec.shape)
            try:
                check(spec.filler, spec.shape)
            except FillerError as error:
                raise LayerError(f"{spec.name}: {error}") from error
        self.blob_specs = specs

    def allow_absent(self, name: str) -> None:
        """Let the attribute of a blob that the definition may leave out be None until it is installed."""
        if name not in self._parameters:
            self.register_parameter(name, None)

    def _compare(self, specs: Sequence[BlobSpec]) -> None:
        if len(specs) != len(self.blob_specs):
            raise LayerError(
                f"would have {counted(len(specs), 'blob')} for bottoms of this shape, expected {len(self.blob_specs)} as before"
            )
        for spec, old in zip(specs, self.blob_specs, strict=True):
            if spec.shape != old.shape:
                raise LayerError(
                    f"{spec.name} would have shape {times(spec.shape)} for bottoms of this shape, expected "
                    f"{times(old.shape)}: blobs keep their shapes"
                )

    def announce(self) -> None:
        """Do what a call does before `forward` (wait for the blobs, say): for a layer that runs as part of a pair."""
        for hook in tuple(self._forward_pre_hooks.values()):
            hook(self, ())

    def conclude(self, bottoms: tuple[Tensor, ...], tops: Tensor | tuple[Tensor, ...]) -> None:
        """Do what a call does after `forward` (write a trace, say): for a layer that runs as part of a pair."""
        for hook in tuple(self._forward_hooks.values()):
            hook(self, bottoms, tops)

    def top_count(self) -> int:
        """How many tops the layer has, counting those Caffe would add by itself."""
        return max(len(self.param.top), self.MIN_TOPS if self.IS_LOSS else 0)

    def check_counts(self) -> None:
        """Raise `LayerError` unless the numbers of bottoms and tops are legal for this type."""
        bottoms, tops = len(self.param.bottom), self.top_count()
        check_count("bottom", bottoms, self.MIN_BOTTOMS, self.MAX_BOTTOMS)
        check_count("top", tops, self.MIN_TOPS, self.MAX_TOPS)
        if self.EQUAL_BOTTOMS_AND_TOPS and bottoms != tops:
            raise LayerError(
                f"has {counted(bottoms, 'bottom')} and {counted(tops, 'top')}, expected as many tops as bottoms"
            )


def new_blob(spec: BlobSpec, seed: int) -> Tensor:
    """Return a filled CPU tensor for one blob. Drawn on the CPU so that every device and rank starts equal."""
    if spec.given is not None:
        return spec.given.clone()
    blob = torch.empty(spec.shape)
    fill(blob, spec.filler, torch.Generator().manual_seed(seed))
    return blob


def check_count(kind: str, count: int, least: int, most: int | None) -> None:
    """Raise `LayerError` unless least <= count <= most."""
    if count >= least and (most is None or count <= most):
        return
    if least == most:
        expected = f"exactly {least}" if least else "none"
    elif most is None:
        expected = f"at least {least}"
    else:
        expected = f"{least} to {most}"
    raise LayerError(f"has {counted(count, kind)}, expected {expected}")


def check_size(name: str, shape: Shape) -> None:
    """Raise `LayerError` if a blob of this shape has more values than Caffe can count."""
    if math.prod(shape) > LARGEST_BLOB:
        raise LayerError(
            f"{name} would be {times(shape)} = {math.prod(shape)} values, more than the {LARGEST_BLOB} that a blob can have"
        )


def canonical_axis(axis: int, shape: Shape, *, name: str = "axis") -> int:
    """`axis` counted from the front; Caffe lets negative ones count from the end.

    Raises:
        LayerError: the shape has no such axis.
    """
    if not -len(shape) <= axis < len(shape):
        raise LayerError(
            f"{name} {axis} is outside the {len(shape)} axes of a bottom of shape {times(shape)}"
        )
    return axis % len(shape)


def times(shape: Sequence[int]) -> str:
    """Return a shape as people write it: `100x3x32x32`; a scalar is `scalar`."""
    return "x".join(str(extent) for extent in shape) or "scalar"
