"""The base class of layers: class attributes, `setup` and `forward`.

Law: `setup` checks the whole definition, before any data moves, and raises `LayerError` with a
clause that the net completes with file, line and layer name. `forward` trusts `setup`, reads no
definition, and keeps no state between calls except the blobs and the random generator, unless its
class says so (`KEEPS_STATE`). The first extent of a bottom may change between calls (the last batch
of a file is smaller); all other extents are as in the last `setup`. `setup` may be called again
with different shapes: it recomputes everything that depends on them, and opens files only once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from google.protobuf.message import Message
from torch import Tensor, nn

from poseidon.caffe.layers.fillers import FillerError, check, fill
from poseidon.caffe.proto.caffe_pb2 import (
    ConvolutionParameter,
    EmbedParameter,
    FillerParameter,
    InnerProductParameter,
    LayerParameter,
)
from poseidon.errors import PoseidonError, counted
from ps_server.protocol.seats import Seat

Shape = tuple[int, ...]
Counts = tuple[int, int | None]
# Caffe counts the values of a blob with an int.
LARGEST_BLOB = 2**31 - 1
ALONE = Seat()
CPU = torch.device("cpu")


class LayerError(PoseidonError):
    """A layer's definition is wrong.

    The text is a clause; the net adds file, line and layer name.
    """


def check_positive(param: Message, *names: str) -> None:
    """Raise LayerError unless fields of a layer's block are set and 1 or more."""
    for name in names:
        if (value := getattr(param, name)) < 1:
            stated = f"{name} is {value}" if param.HasField(name) else f"missing {name}"
            raise LayerError(f"{stated}, expected at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """The environment of a layer: phase, worker and device.

    Attributes:
        seed: the random seed of the job. Initial weights depend on it alone.
        rank: the rank of this worker among `workers`; of a virtual worker its number.
        seat: of this worker among the workers of its host, which is a client.
        autocast: the type of 16 bits in which layers that can compute; None: float32.
        channels_last: whether convolutions get images with channels last in memory.
        resolve: resolves a path of the definition.
    """

    phase: int
    seed: int
    rank: int = 0
    workers: int = 1
    seat: Seat = ALONE
    device: torch.device = CPU
    autocast: torch.dtype | None = None
    channels_last: bool = False
    resolve: Callable[[str], Path] = field(default=Path)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobSpec:
    """A learnable blob that `setup` declares, in the order in which Caffe saves them.

    Attributes:
        name: the name of the layer's attribute.
        learns: False if `forward` updates it and the solver must not (lr_mult 0).
        fixes_rate: for a blob that does not learn, other multipliers of its `param` block are
            ignored, not refused.
        looked_up: few rows of its gradient are not zero: those that a batch looks up.
    """

    name: str
    shape: Shape
    filler: FillerParameter
    learns: bool = True
    initial: Tensor | None = field(default=None, compare=False)
    fixes_rate: bool = False
    looked_up: bool = False


class Layer(nn.Module):
    """The base class of all layers.

    A subclass sets the class attributes and defines `setup` and `forward`. `forward` takes a tensor
    for each bottom and returns a tensor if the layer has one top, else a tuple of tensors in order.
    """

    # The least and the largest number of bottoms and of tops; None: any number.
    BOTTOMS: ClassVar[Counts] = (1, 1)
    TOPS: ClassVar[Counts] = (1, 1)
    # Bottom i belongs to top i (Convolution with several bottoms).
    EQUAL_BOTTOMS_AND_TOPS: ClassVar[bool] = False
    # The first top has loss_weight 1 by default and may be unnamed.
    IS_LOSS: ClassVar[bool] = False
    # The backward pass does not read the tops, so the layer above may overwrite them.
    TOPS_MAY_BE_OVERWRITTEN: ClassVar[bool] = False
    # `forward` draws random numbers; the net sets `generator`.
    IS_RANDOM: ClassVar[bool] = False
    # `forward` updates the blobs in training; workers average theirs.
    STATISTICS: ClassVar[bool] = False
    # `setup` opens files of the definition, or checks a folder to write to.
    OPENS_FILES: ClassVar[bool] = False
    # `forward` may return tops of other shapes than `setup`; the layers above are then set up
    # again.
    TOPS_MAY_CHANGE_SHAPE: ClassVar[bool] = False
    # Bottoms may have 16 bits, and lie in memory with channels last; other layers get float32,
    # contiguous.
    takes_any_form: bool = False
    # `forward` may keep more between calls than blobs, the random generator and `saved_state`.
    KEEPS_STATE: ClassVar[bool] = False

    def __init__(self, param: LayerParameter, context: LayerContext) -> None:
        super().__init__()
        self.param = param
        self.context = context
        self.blob_specs: tuple[BlobSpec, ...] = ()
        # Set by the net if no other layer reads the bottom, so that `forward` may overwrite it with
        # the top.
        self.overwrites_bottom = False
        # Set by `setup` if the first blob is an outputs x inputs matrix whose gradient is u^T v,
        # with v the bottom and u the gradient at the top.
        self.offers_factors = False
        # Cleared by `setup` if the layer does not update its statistics.
        self.updates_statistics = self.STATISTICS
        self.generator: torch.Generator | None = None
        # Cleared by `setup` if this definition rules out a change of shape.
        self.tops_may_change_shape = self.TOPS_MAY_CHANGE_SHAPE
        self._views: dict[str, nn.Parameter] = {}

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        """Check the definition against the bottoms' shapes and declare the blobs.

        Args:
            bottoms: the shape of each bottom.

        Returns:
            the shape of each top.

        Raises:
            LayerError: what is wrong and what was expected.
        """
        raise NotImplementedError

    def saved_state(self) -> tuple[Tensor, ...]:
        """Return the float32 tensors that `forward` keeps between calls; empty: none.

        Snapshots hold them, and they go with their virtual worker.
        """
        return ()

    def restore_state(self, state: Sequence[Tensor]) -> None:
        """Go on from what `saved_state` has returned; empty: from the initial state."""

    def checked_setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        """Call `setup`, and check the shapes of the tops.

        Raises:
            LayerError: also if a top is too large, or in place and of a different shape than its
                bottom.
        """
        tops = self.setup(bottoms)
        for index, shape in enumerate(tops):
            check_size(f"top {index + 1}", shape)
        self.check_in_place(bottoms, tops)
        return tops

    def check_in_place(self, bottoms: Sequence[Shape], tops: Sequence[Shape]) -> None:
        """Raise LayerError unless each top in place has the shape of its bottom.

        Caffe's blob has one shape: BVLC refuses some types in place (Reshape, Flatten), and others
        compute garbage.
        """
        names = zip(self.param.bottom, self.param.top, strict=False)
        for index, (bottom, top) in enumerate(names):
            if bottom == top and bottoms[index] != tops[index]:
                raise LayerError(
                    f"runs in place on '{top}', but its top has shape {times(tops[index])} and "
                    f"its bottom {times(bottoms[index])}; give the top a different name"
                )

    def blobs(self) -> list[Tensor]:
        """Return the learnable blobs in Caffe's saved order, as views of the parameters."""
        return [
            self._views[spec.name].view(spec.shape)
            if spec.name in self._views
            else self.get_parameter(spec.name)
            for spec in self.blob_specs
        ]

    def sources(self) -> list[nn.Parameter]:
        """Return the parameter of each blob, in the owner's shape if it is shared."""
        return [
            self._views[spec.name] if spec.name in self._views else self.get_parameter(spec.name)
            for spec in self.blob_specs
        ]

    def install(self, index: int, parameter: nn.Parameter) -> None:
        """Set a blob to a parameter of this layer, or to one that another layer owns.

        Args:
            parameter: a parameter of the blob's shape; with permissive sharing, of a different
                shape with as many values.
        """
        spec = self.blob_specs[index]
        if parameter.shape == spec.shape:
            # An absent blob would otherwise keep its early position in torch's order.
            self._parameters.pop(spec.name, None)
            self.register_parameter(spec.name, parameter)
            return
        if not self._views:
            self.register_forward_pre_hook(Layer._refresh_views)
        self._views[spec.name] = parameter

    def _refresh_views(self, _: object = None) -> None:
        """Recreate the views of blobs shared with a different shape, in the graph of this pass."""
        shapes = {spec.name: spec.shape for spec in self.blob_specs}
        for name, parameter in self._views.items():
            self.__dict__[name] = parameter.view(shapes[name])

    def close(self) -> None:
        """Close files and stop threads. The default does nothing."""

    def declare(self, *specs: BlobSpec) -> None:
        """Declare the learnable blobs, from `setup`.

        A later call only checks that the shapes are the same.

        Raises:
            LayerError: a filler is unknown or does not suit its blob, a blob is too large, or would
                change its shape.
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
        """Set the attribute of an optional blob to None until it is installed."""
        if name not in self._parameters:
            self.register_parameter(name, None)

    def _compare(self, specs: Sequence[BlobSpec]) -> None:
        if len(specs) != len(self.blob_specs):
            raise LayerError(
                f"would have {counted(len(specs), 'blob')} for bottoms of this shape, expected "
                f"{len(self.blob_specs)} as in the first setup"
            )
        for spec, old in zip(specs, self.blob_specs, strict=True):
            if spec.shape != old.shape:
                raise LayerError(
                    f"{spec.name} would have shape {times(spec.shape)} for bottoms of this shape, "
                    f"expected {times(old.shape)}: the shape of a blob cannot change"
                )

    def run_pre_hooks(self) -> None:
        """Run the forward pre-hooks, for a fused layer whose `forward` is not called."""
        for hook in tuple(self._forward_pre_hooks.values()):
            hook(self, ())

    def run_hooks(self, bottoms: tuple[Tensor, ...], tops: Tensor | tuple[Tensor, ...]) -> None:
        """Run the forward hooks, for a fused layer whose `forward` is not called."""
        for hook in tuple(self._forward_hooks.values()):
            hook(self, bottoms, tops)

    def top_count(self) -> int:
        """Return the number of tops, including those that Caffe adds automatically."""
        return max(len(self.param.top), self.TOPS[0] if self.IS_LOSS else 0)

    def check_counts(self) -> None:
        """Raise LayerError unless the numbers of bottoms and tops are legal for this type."""
        bottoms, tops = len(self.param.bottom), self.top_count()
        check_count("bottom", bottoms, *self.BOTTOMS)
        check_count("top", tops, *self.TOPS)
        if self.EQUAL_BOTTOMS_AND_TOPS and bottoms != tops:
            raise LayerError(
                f"has {counted(bottoms, 'bottom')} and {counted(tops, 'top')}, expected the same "
                "number"
            )


def new_blob(spec: BlobSpec, seed: int) -> Tensor:
    """Return a blob's initial values, computed on the CPU: the same on all devices and ranks."""
    if spec.initial is not None:
        return spec.initial.clone()
    blob = torch.empty(spec.shape)
    fill(blob, spec.filler, torch.Generator().manual_seed(seed))
    return blob


def once_or(count: int) -> str:
    """Return how often a setting may occur that is common to, or one for each of, `count`
    things: `once or 3 times`.
    """
    return "once" if count == 1 else f"once or {count} times"


def check_count(kind: str, count: int, least: int, most: int | None) -> None:
    """Raise LayerError unless least <= count <= most."""
    if count >= least and (most is None or count <= most):
        return
    if least == most:
        expected = f"exactly {least}" if least else "none"
    elif most is None:
        expected = f"at least {least}"
    else:
        expected = f"{least} to {most}"
    raise LayerError(f"has {counted(count, kind)}, expected {expected}")


def check_shape(name: str, shape: Shape, pattern: str, why: str = "") -> None:
    """Raise LayerError unless a shape matches a pattern.

    Args:
        name: of the blob, for the message.
        pattern: extents with `x` between them: numbers, letters for any number, and `...` at the
            end for any further axes: `1xNxH`, `NxC...`.
        why: what the pattern means.
    """
    ends = pattern.removesuffix("...")
    wanted = ends.split("x") if ends else []
    is_open = ends != pattern
    if len(shape) == len(wanted) or (is_open and len(shape) > len(wanted)):
        pairs = zip(wanted, shape, strict=False)
        if all(part.isalpha() or part == str(extent) for part, extent in pairs):
            return
    meaning = f": {why}" if why else ""
    raise LayerError(f"{name} has shape {times(shape)}, expected {pattern}{meaning}")


def check_image(shape: Shape, name: str = "bottom") -> None:
    """Raise LayerError unless a bottom has the shape of images, N x C x H x W."""
    if len(shape) != 4:
        raise LayerError(f"{name} has shape {times(shape)}, expected 4 axes (NxCxHxW)")


def check_rows(name: str, shape: Shape, values: int, what: str) -> None:
    """Raise LayerError unless a blob has so many values for each item of its first axis."""
    if len(shape) < 2 or math.prod(shape[1:]) != values:
        raise LayerError(
            f"{name} has shape {times(shape)}, expected {values} values for each {what}"
        )


def check_values(name: str, shape: Shape, count: int, what: str) -> None:
    """Raise LayerError unless a blob has so many values, one for each thing of a kind."""
    if math.prod(shape) != count:
        raise LayerError(
            f"{name} has shape {times(shape)}, expected {count} values: one for each {what}"
        )


def optional_bias(
    param: ConvolutionParameter | InnerProductParameter | EmbedParameter,
) -> tuple[BlobSpec, ...]:
    """Return the spec of the blob `bias`, a value for each output; nothing without bias_term."""
    if not param.bias_term:
        return ()
    return (BlobSpec(name="bias", shape=(param.num_output,), filler=param.bias_filler),)


def without_trailing_ones(shape: Shape) -> Shape:
    """Return a shape without extents of 1 at its end, which Caffe's blobs of 4 axes have: R x C
    x 1 x 1 is R x C.
    """
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def check_size(name: str, shape: Shape) -> None:
    """Raise LayerError if a blob of this shape has more values than Caffe can count."""
    if math.prod(shape) > LARGEST_BLOB:
        raise LayerError(
            f"{name} would be {times(shape)} = {math.prod(shape)} values, more than the "
            f"{LARGEST_BLOB} that a blob can have"
        )


def canonical_axis(axis: int, shape: Shape, *, name: str = "axis") -> int:
    """Return the non-negative index of `axis`, which may count from the end as in Caffe.

    Raises:
        LayerError: the shape has no such axis.
    """
    if not -len(shape) <= axis < len(shape):
        raise LayerError(
            f"{name} {axis} is outside the {len(shape)} axes of a bottom of shape {times(shape)}"
        )
    return axis % len(shape)


def times(shape: Sequence[int]) -> str:
    """Format a shape for messages: `100x3x32x32`, or `scalar`."""
    return "x".join(str(extent) for extent in shape) or "scalar"
