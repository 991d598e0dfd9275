"""Data: batches of a database of Datum records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from poseidon.data.partition import share_for, source_for
from poseidon.data.reader import BatchReader
from poseidon.data.transform import Transform
from poseidon.layers.base import LayerError, Shape
from poseidon.layers.registry import register
from poseidon.layers.sources import Source
from poseidon.proto.caffe_pb2 import TRAIN

# Fields that today's grammar keeps in transform_param; a value here would be without effect.
MOVED_FIELDS = ("scale", "mean_file", "crop_size", "mirror")


@register("Data")
class Data(Source):
    """Pictures and labels from an LMDB or LevelDB database, read ahead in the background.

    Tops: data N x C x H x W, cropped and transformed; optionally label N.

    Fields (data_param): source, batch_size N of one worker, backend, rand_skip, prefetch, shared_file_system (true:
    all clients share the records of one database; false: client k has `<source>_k`); transform_param.
    """

    MAX_TOPS: ClassVar[int | None] = 2

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, context = self.param.data_param, self.context
        if not param.source:
            raise LayerError("missing source")
        if param.batch_size < 1:
            raise LayerError("missing batch_size, expected at least 1")
        for name in MOVED_FIELDS:
            if param.HasField(name):
                raise LayerError(f"data_param has {name}, which belongs in transform_param")
        source = source_for(
            context.resolve(param.source),
            shared_file_system=param.shared_file_system,
            client=context.client,
            clients=context.clients,
        )
        share = share_for(
            phase=context.phase,
            shared_file_system=param.shared_file_system,
            client=context.client,
            clients=context.clients,
            local_rank=context.local_rank,
            local_workers=context.local_workers,
            rank=context.rank,
            workers=context.workers,
            batch=param.batch_size,
        )
        self.with_label = len(self.param.top) > 1
        self.reader = BatchReader(
            source=source,
            backend=param.backend,
            batch_size=param.batch_size,
            transform=Transform(
                self.param.transform_param, train=context.phase == TRAIN, resolve=context.resolve
            ),
            share=share,
            seed=context.seed,
            prefetch=param.prefetch,
            rand_skip=param.rand_skip,
            label=self.with_label,
            force_color=param.force_encoded_color,
        )
        shape = tuple(int(extent) for extent in self.reader.shape)
        batch = shape if len(shape) == 4 else (param.batch_size, *shape)
        return [batch, (param.batch_size,)][: len(self.param.top)]

    def forward(self) -> Tensor | tuple[Tensor, ...]:
        data, label = self.reader.next()
        device = self.context.device
        data = data.to(device, non_blocking=True)
        return (data, label.to(device, non_blocking=True)) if self.with_label else data

    def close(self) -> None:
        if hasattr(self, "reader"):
            self.reader.close()
