"""Layers without bottoms: Input and DummyData, and what those share that read records (in modules of their own)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from poseidon.data.batches.numbered import NumberedReader
from poseidon.data.batches.partition import Share, part_path, share_for, source_for
from poseidon.layers.base import Layer, LayerError, Shape, times
from poseidon.layers.fillers import FillerError, check, fill
from poseidon.layers.naming import once_or
from poseidon.layers.registry import register
from poseidon.proto.caffe_pb2 import BlobShape, DummyDataParameter, FillerParameter


class Source(Layer):
    """A layer that makes its tops from nothing that the net computed."""

    MIN_BOTTOMS: ClassVar[int] = 0
    MAX_BOTTOMS: ClassVar[int | None] = 0
    MAX_TOPS: ClassVar[int | None] = None


class ReadingSource(Source):
    """A source whose records a reader makes ahead of their use. `setup` sets `reader`, once."""

    OPENS_FILES: ClassVar[bool] = True
    reader: NumberedReader | None = None

    def forward(self) -> Tensor | tuple[Tensor, ...]:
        assert self.reader is not None
        device = self.context.device
        tops = tuple(top.to(device, non_blocking=True) for top in self.reader.next())
        tops = tops[: len(self.param.top)]
        return tops if len(tops) > 1 else tops[0]

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()

    def share(self, *, shared_file_system: bool, batch: int) -> Share:
        """Return the records of this worker."""
        context = self.context
        return share_for(
            phase=context.phase,
            shared_file_system=shared_file_system,
            client=context.client,
            clients=context.clients,
            local_rank=context.local_rank,
            local_workers=context.local_workers,
            rank=context.rank,
            workers=context.workers,
            batch=batch,
        )

    def source(self, name: str, *, shared_file_system: bool) -> Path:
        """Return the database or list of this client.

        Raises:
            LayerError: none is named.
            DataError: this client's part is missing.
        """
        if not name:
            raise LayerError("missing source")
        context = self.context
        source = context.resolve(name)
        if not shared_file_system and not source.exists():
            # A machine that has its part alone: the part decides which folder is meant.
            part = context.resolve(str(part_path(Path(name), context.client)))
            source = part.with_name(source.name) if part.exists() else source
        return source_for(
            source,
            shared_file_system=shared_file_system,
            client=context.client,
            clients=context.clients,
        )


@register("Input")
class Input(Source):
    """Blobs that the caller gives: `net({"data": tensor})`.

    Tops: one or more. Fields (input_param): shape, once or once a top.
    """

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        shapes = [top_shape(shape) for shape in self.param.input_param.shape]
        return one_each("input_param shape", shapes, len(self.param.top))

    def forward(self, *bottoms: Tensor) -> Tensor:
        raise LayerError("an Input layer computes nothing; the net fills its tops")


@register("DummyData")
class DummyData(Source):
    """Blobs filled by fillers: constant ones once, random ones anew in every forward pass.

    Tops: one or more.

    Fields (dummy_data_param): data_filler, none (the constant 0), one, or one a top; shape, once or once a top, or
    the old num, channels, height and width, each once or once a top.
    """

    IS_RANDOM: ClassVar[bool] = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, tops = self.param.dummy_data_param, len(self.param.top)
        shapes = dummy_shapes(param, tops)
        fillers = list(param.data_filler) or [FillerParameter(type="constant")]
        if len(fillers) not in (1, tops):
            raise LayerError(f"data_filler is given {len(fillers)} times, expected at most {once_or(tops)}")
        self.fillers = fillers * (tops if len(fillers) == 1 else 1)
        self.shapes = shapes
        self.constants: dict[int, Tensor] = {}
        for index, (filler, shape) in enumerate(zip(self.fillers, shapes, strict=True)):
            try:
                check(filler, shape)
            except FillerError as error:
                raise LayerError(f"data_filler: {error}") from error
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
            raise LayerError("a random filler needs a generator; the net gives one")
        blob = torch.empty(self.shapes[index], device=self.generator.device)
        fill(blob, self.fillers[index], self.generator)
        return blob


def top_shape(shape: BlobShape) -> Shape:
    """Return a shape of the definition.

    Raises:
        LayerError: an extent is below 1.
    """
    dims = tuple(int(dim) for dim in shape.dim)
    if min(dims, default=1) < 1:
        raise LayerError(f"shape is {times(dims)}, expected extents of at least 1")
    return dims


def one_each(name: str, shapes: Sequence[Shape], tops: int) -> list[Shape]:
    """One shape a top: as many as given, or the only one for all.

    Raises:
        LayerError: another number of shapes.
    """
    if len(shapes) not in (1, tops):
        raise LayerError(f"{name} is given {len(shapes)} times, expected {once_or(tops)}")
    return list(shapes) * (tops if len(shapes) == 1 else 1)


def dummy_shapes(param: DummyDataParameter, tops: int) -> list[Shape]:
    """Return the tops' shapes, by either grammar.

    Raises:
        LayerError: both grammars, neither, or a wrong number of values.
    """
    old = {name: list(getattr(param, name)) for name in ("num", "channels", "height", "width")}
    if param.shape:
        if any(old.values()):
            raise LayerError("has both shape and num/channels/height/width, expected one of them")
        return one_each("dummy_data_param shape", [top_shape(shape) for shape in param.shape], tops)
    for name, values in old.items():
        if len(values) not in (1, tops):
            raise LayerError(
                f"{name} is given {len(values)} times, expected {once_or(tops)} (or write shape)"
            )
    columns = [values * (tops if len(values) == 1 else 1) for values in old.values()]
    return [top_shape(BlobShape(dim=dims)) for dims in zip(*columns, strict=True)]
