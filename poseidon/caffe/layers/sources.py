"""Layers without bottoms: Input, DummyData, and the base class of layers that read records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poseidon.caffe.data.batches.numbered import (
    DeviceTransform,
    NumberedReader,
    Share,
    part_path,
    source_for,
)
from poseidon.caffe.data.batches.transform import Transform
from poseidon.caffe.data.batches.windows import CHANNELS
from poseidon.caffe.layers.base import Counts, Layer, LayerError, Shape, check_size, once_or, times
from poseidon.caffe.layers.fillers import FillerError, check, fill
from poseidon.caffe.layers.registry import register
from poseidon.caffe.proto.caffe_pb2 import (
    TEST,
    TRAIN,
    BlobShape,
    DummyDataParameter,
    FillerParameter,
    TransformationParameter,
)
from poseidon.exchange.device import device_of


class Source(Layer):
    """The base class of layers without bottoms."""

    BOTTOMS = (0, 0)
    TOPS: ClassVar[Counts] = (1, None)


class SourceBlock(Protocol):
    """The fields that the blocks of all layers that read records have."""

    source: str
    shared_file_system: bool


class ReadingSource(Source):
    """The base class of layers that read records in the background.

    The first `setup` sets `reader`.
    """

    OPENS_FILES = True
    reader: NumberedReader[Any] | None = None
    _floats: DeviceTransform | None = None

    def forward(self) -> Tensor | tuple[Tensor, ...]:
        assert self.reader is not None
        tops = self.reader.next()
        device = device_of(self.context.device)
        for top in tops:
            device.keep(top)
        transform = self.reader.maker.transform
        if transform is not None and tops[0].dtype == torch.uint8:
            pixels, places, *others = tops
            if self._floats is None:
                self._floats = DeviceTransform(transform, pixels.device)
            tops = (self._floats(pixels, places), *others)
        tops = tops[: len(self.param.top)]
        return tops if len(tops) > 1 else tops[0]

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()

    def transform(self, param: TransformationParameter | None = None) -> Transform:
        """Return the transformation of the definition, or a different one for this phase."""
        return Transform(
            self.param.transform_param if param is None else param,
            train=self.context.phase == TRAIN,
            resolve=self.context.resolve,
        )

    def share(self, block: SourceBlock, batch: int) -> Share:
        """Return the share of the records that this worker reads, in batches of `batch`."""
        context, seat = self.context, self.context.seat
        together = batch if context.phase == TEST else 1
        if block.shared_file_system:
            return Share(first=context.rank, step=context.workers, block=together)
        return Share(
            first=seat.local_rank,
            step=seat.local_workers,
            block=together,
            client=seat.host,
            clients=seat.host_count,
        )

    def source(self, block: SourceBlock) -> Path:
        """Return the database or list of this client.

        Raises:
            LayerError: the block names no source.
            DataError: this client's part is missing.
        """
        if not block.source:
            raise LayerError("missing source")
        context = self.context
        source = context.resolve(block.source)
        if not block.shared_file_system and not source.exists():
            # A host with its part only: search for the part to find the folder.
            part = context.resolve(str(part_path(Path(block.source), context.seat.host)))
            source = part.with_name(source.name) if part.exists() else source
        return source_for(
            source,
            shared_file_system=block.shared_file_system,
            client=context.seat.host,
            clients=context.seat.host_count,
        )

    def channel_mean(self) -> NDArray[np.float32] | None:
        """Return the mean_value of each channel of color images, (3, 1, 1); None if there is none.

        Raises:
            LayerError: the number of values is wrong.
        """
        values = self.param.transform_param.mean_value
        if not values:
            return None
        if len(values) not in (1, CHANNELS):
            raise LayerError(f"mean_value occurs {len(values)} times, expected 1 or {CHANNELS}")
        return np.broadcast_to(np.array(values, np.float32).reshape(-1, 1, 1), (CHANNELS, 1, 1))

    def images_root(self, source: Path, root: str, first: str) -> str:
        """Return the prefix of the paths of a list of images.

        Args:
            root: the prefix that the definition names.
            first: the list's first path, without the prefix.

        Returns:
            `root`, made absolute if the first image is found elsewhere than below the current
            folder.
        """
        if Path(root + first).is_absolute():
            return root
        # Paths have neither ./ nor // in them, unlike the lines of `find`.
        ending = str(Path(first))
        for found in (self.context.resolve(root + first), source.parent / (root + first)):
            if found.exists() and str(found).endswith(ending):
                return str(found).removesuffix(ending)
        return root


@register("Input")
class Input(Source):
    """Blobs that the caller passes: `net({"data": tensor})`.

    Tops: one or more. Fields (input_param): shape, one for all tops or one for each.
    """

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        shapes = [top_shape(shape) for shape in self.param.input_param.shape]
        return shape_per_top("input_param shape", shapes, len(self.param.top))

    def forward(self, *bottoms: Tensor) -> Tensor:
        raise LayerError("an Input layer has no forward pass; the net sets its tops")


@register("DummyData")
class DummyData(Source):
    """Blobs filled by fillers. Random ones are drawn in every forward pass.

    Tops: one or more.

    Fields (dummy_data_param): data_filler, none (the constant 0), one for all tops or one for each;
    shape, or the old num, channels, height and width, one for all tops or one for each.
    """

    IS_RANDOM = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, tops = self.param.dummy_data_param, len(self.param.top)
        shapes = dummy_shapes(param, tops)
        fillers = list(param.data_filler) or [FillerParameter(type="constant")]
        if len(fillers) not in (1, tops):
            raise LayerError(
                f"data_filler occurs {len(fillers)} times, expected at most {once_or(tops)}"
            )
        self.fillers = fillers * (tops if len(fillers) == 1 else 1)
        self.shapes = shapes
        self.constants: dict[int, Tensor] = {}
        for index, (filler, shape) in enumerate(zip(self.fillers, shapes, strict=True)):
            try:
                check(filler, shape)
            except FillerError as error:
                raise LayerError(f"data_filler: {error}") from error
            check_size(f"top {index + 1}", shape)
            if filler.type == "constant":
                self.constants[index] = torch.full(shape, filler.value, device=self.context.device)
        return shapes

    def forward(self) -> Tensor | tuple[Tensor, ...]:
        tops = tuple(self._top(index) for index in range(len(self.shapes)))
        return tops if len(tops) > 1 else tops[0]

    def _top(self, index: int) -> Tensor:
        if index in self.constants:
            return self.constants[index]
        if self.generator is None:
            raise LayerError("a random filler needs a generator, which the net sets")
        blob = torch.empty(self.shapes[index], device=self.generator.device)
        fill(blob, self.fillers[index], self.generator)
        return blob


def top_shape(shape: BlobShape) -> Shape:
    """Return a shape of the definition as a tuple.

    Raises:
        LayerError: an extent is below 1.
    """
    dims = tuple(int(dim) for dim in shape.dim)
    if min(dims, default=1) < 1:
        raise LayerError(f"shape is {times(dims)}, expected extents of at least 1")
    return dims


def shape_per_top(name: str, shapes: Sequence[Shape], tops: int) -> list[Shape]:
    """Return a shape for each top, from one for each or one for all.

    Raises:
        LayerError: the number of shapes is wrong.
    """
    if len(shapes) not in (1, tops):
        raise LayerError(f"{name} occurs {len(shapes)} times, expected {once_or(tops)}")
    return list(shapes) * (tops if len(shapes) == 1 else 1)


def dummy_shapes(param: DummyDataParameter, tops: int) -> list[Shape]:
    """Return the shapes of the tops, from `shape` or the old fields.

    Raises:
        LayerError: both are set, neither is, or the number of values is wrong.
    """
    old = {name: list(getattr(param, name)) for name in ("num", "channels", "height", "width")}
    if param.shape:
        if any(old.values()):
            raise LayerError("has both shape and num/channels/height/width, expected one of them")
        return shape_per_top(
            "dummy_data_param shape", [top_shape(shape) for shape in param.shape], tops
        )
    for name, values in old.items():
        if len(values) not in (1, tops):
            raise LayerError(
                f"{name} occurs {len(values)} times, expected {once_or(tops)} (or use shape)"
            )
    columns = [values * (tops if len(values) == 1 else 1) for values in old.values()]
    return [top_shape(BlobShape(dim=dims)) for dims in zip(*columns, strict=True)]
