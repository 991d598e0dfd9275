"""ImageInput: batches of images and labels from a database, decoded on threads one batch ahead."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe2.images.records import Format, Labelled
from poseidon.caffe2.images.transform import Array, Transform
from poseidon.caffe2.operators.registry import ANY, NO_GRADIENT, Context, operator
from poseidon.caffe2.proto.caffe2_pb2 import Argument, TensorProto
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.runtime.reader import Consumer, Reader, Record


@dataclass(slots=True)
class _Batch:
    """A batch that threads are decoding.

    Attributes:
        images: what the threads fill.
        parts: the rest of each record, in order.
        database: for messages.
        keys: of the records.
    """

    images: Array
    parts: list[Future[Labelled]]
    database: str
    keys: list[bytes]


@operator("ImageInput", gradient=NO_GRADIENT, inputs=(0, 1), outputs=(2, ANY))
class ImageInput:
    """Reads records: float32 images (N, crop, crop, C), int32 or float32 labels (N), more.

    With `use_gpu_transform` images are (N, C, crop, crop), and of `output_type` float or float16.

    The random numbers of an image depend on its number in the sequence of all shards, and on the
    operator's `random_seed` or else the reader's: they are the same for any number of devices,
    shards and threads.

    Args of the operator:
        batch_size, color, scale, minsize, warp, crop, mirror, mean, std, mean_per_channel,
        std_per_channel, random_scale, color_jitter, img_saturation, img_brightness, img_contrast,
        color_lighting, color_lighting_std, scale_jitter_type, is_test: see `Transform`.
        bounding_ymin, bounding_xmin, bounding_height, bounding_width: see `Transform.box`.
        use_caffe_datum, label_type, num_labels, output_sizes: see `Format`. decode_threads: how
        many threads decode. db, db_type: the database of an operator without a reader.
    """

    def __init__(
        self,
        *,
        context: Context,
        batch_size: int = 0,
        color: int = 1,
        color_jitter: bool = False,
        img_saturation: float = 0.4,
        img_brightness: float = 0.4,
        img_contrast: float = 0.4,
        color_lighting: bool = False,
        color_lighting_std: float = 0.1,
        scale_jitter_type: int = 0,
        label_type: int = 0,
        num_labels: int = 0,
        scale: int = -1,
        minsize: int = -1,
        warp: bool = False,
        crop: int = -1,
        mirror: bool = False,
        mean: float = 0.0,
        mean_per_channel: list[float] = [],  # noqa: B006 (it is not changed)
        std: float = 1.0,
        std_per_channel: list[float] = [],  # noqa: B006
        bounding_ymin: int = -1,
        bounding_xmin: int = -1,
        bounding_height: int = -1,
        bounding_width: int = -1,
        use_caffe_datum: bool = False,
        use_gpu_transform: bool = False,
        decode_threads: int = 4,
        output_type: Argument | None = None,
        db: str = "",
        db_type: str = "leveldb",
        output_sizes: list[int] = [],  # noqa: B006
        random_scale: list[int] = [-1, -1],  # noqa: B006
        is_test: bool = False,
    ) -> None:
        _check(batch_size, decode_threads, scale_jitter_type, random_scale)
        extras = max(context.outputs - 2, 0)
        if output_sizes and len(output_sizes) != extras:
            raise ValueError(f"ImageInput: {extras} more outputs, {len(output_sizes)} output_sizes")
        self.context, self.batch, self.color = context, batch_size, bool(color)
        self.on_gpu, self.dtype = use_gpu_transform, _output_type(output_type)
        self.format = Format(
            datum=use_caffe_datum,
            color=bool(color),
            label_type=label_type,
            num_labels=num_labels,
            extra_sizes=tuple(output_sizes or [1] * extras),
        )
        self.transform = Transform(
            crop=crop,
            scale=scale,
            minsize=minsize,
            warp=warp,
            random_scale=(random_scale[0], random_scale[1]),
            mirror=mirror,
            mean=np.array(mean_per_channel or [mean]),
            std=np.array(std_per_channel or [std]),
            color_jitter=color_jitter,
            jitter=(img_saturation, img_brightness, img_contrast),
            color_lighting=color_lighting_std if color_lighting else 0.0,
            inception=scale_jitter_type == 1,
            box=(bounding_ymin, bounding_xmin, bounding_height, bounding_width),
            is_test=is_test,
        )
        if not context.definition.input and not db:
            raise ValueError("ImageInput: a reader (CreateDB) or the argument db is expected")
        self._own = (
            Reader(db, db_type) if not context.definition.input and context.workspace else None
        )
        self._consumer = Consumer(batch_size, self._own or _present(context))
        self._threads = ThreadPoolExecutor(decode_threads, thread_name_prefix="caffe2-decode")
        self._process = os.getpid()
        self._ahead: tuple[object, _Batch] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the images: (N, crop, crop, C)."""
        return self.batch, self.transform.crop, self.transform.crop, 3 if self.color else 1

    def __call__(self, reader: Any = None) -> tuple[Tensor, ...]:
        """Return the next batch, and have the one behind it decoded.

        Raises:
            RuntimeError: a record has a different format; names database, key and the expected one.
                Or this process was forked.
        """
        if self.context.device.type == "meta":
            return self._shapes()
        if self._process != os.getpid():
            raise EnforceNotMet(
                "the threads that decode images are not in this process, which was forked; create "
                "the net and its reader after the fork"
            )
        reader = self._own or reader
        ahead, self._ahead = self._ahead, None
        batch = ahead[1] if ahead is not None and ahead[0] is reader else self._started(reader)
        self._ahead = reader, self._started(reader)
        return self._finished(batch)

    def _started(self, reader: Any) -> _Batch:
        """Read the records of a batch, and give them to the threads."""
        records = self._consumer.take(reader)
        images = np.empty(self.shape, np.uint8 if self._normalize_later else np.float32)
        seed = self.context.generator.initial_seed() if self.context.generator else reader.seed
        name = f"{reader.path} ({reader.db_type})"
        parts = [
            self._threads.submit(_decode, self.format, self.transform, record, name, seed, image)
            for record, image in zip(records, images, strict=True)
        ]
        return _Batch(images, parts, name, [record.key for record in records])

    @property
    def _normalize_later(self) -> bool:
        """Whether pixels go to the device as bytes: no color is changed on the way."""
        change = self.transform.color_jitter or self.transform.color_lighting
        return self.on_gpu and (self.transform.is_test or not change)

    def _finished(self, batch: _Batch) -> tuple[Tensor, ...]:
        parts = [part.result() for part in batch.parts]
        labels = [part.label for part in parts]
        columns = [
            labels,
            *([part.extras[i] for part in parts] for i in range(len(self.format.extra_sizes))),
        ]
        for column in columns:
            for key, value in zip(batch.keys, column, strict=True):
                if value.dtype != column[0].dtype:
                    raise EnforceNotMet(
                        f"the record {key.decode(errors='backslashreplace')!r} of the database "
                        f"{batch.database} has values of type {value.dtype}, not {column[0].dtype} "
                        "as the first of its batch"
                    )
        vectors = [torch.from_numpy(np.stack(column)).to(self.context.device) for column in columns]
        return (self._images(batch.images), *vectors)

    def _images(self, images: Array) -> Tensor:
        found = torch.from_numpy(images).to(self.context.device)
        if not self.on_gpu:
            return found
        if self._normalize_later:
            mean, std = (
                torch.tensor(values, dtype=torch.float32, device=found.device)
                for values in (self.transform.mean, self.transform.std)
            )
            found = (found.float() - mean[: self.shape[3]]) * (1 / std[: self.shape[3]])
        return found.permute(0, 3, 1, 2).to(self.dtype).contiguous()

    def _shapes(self) -> tuple[Tensor, ...]:
        """Return the outputs without data: labels are taken to be int32."""
        count, crop, _, channels = self.shape
        size = (count, channels, crop, crop) if self.on_gpu else self.shape
        dtype = self.dtype if self.on_gpu else torch.float32
        images = torch.empty(size, dtype=dtype, device="meta")
        labels = (count,) if self.format.single else (count, self.format.num_labels)
        return images, torch.empty(labels, dtype=torch.int32, device="meta")


def _decode(
    form: Format, transform: Transform, record: Record, database: str, seed: int, target: Array
) -> Labelled:
    """Decode a record, and write its image to its place in the batch."""
    labelled = form.decode(record, database)
    random = np.random.default_rng((seed, record.number))
    try:
        pixels = transform.pixels(labelled.image, labelled.box, random)
    except EnforceNotMet as error:
        raise EnforceNotMet(
            f"the record {record.key.decode(errors='backslashreplace')!r} of the database "
            f"{database}: {error}"
        ) from error
    values = pixels if target.dtype == np.uint8 else transform.normalized(pixels, random)
    target[...] = values if values.ndim == 3 else values[..., np.newaxis]
    return Labelled(target, labelled.label, labelled.extras)


def _present(context: Context) -> object:
    """Return what the operator's input holds already; None for nothing or no workspace."""
    if context.workspace is None:
        return None
    blob = context.workspace.find(context.definition.input[0])
    return None if blob is None else blob.value


def _check(
    batch_size: int, decode_threads: int, scale_jitter_type: int, random_scale: list[int]
) -> None:
    """Raise ValueError where an argument of `ImageInput` is out of its range."""
    if batch_size < 1:
        raise ValueError(f"ImageInput: batch_size must be above 0, not {batch_size}")
    if decode_threads < 1:
        raise ValueError(f"ImageInput: decode_threads must be above 0, not {decode_threads}")
    if scale_jitter_type not in (0, 1):
        raise ValueError(f"ImageInput: scale_jitter_type={scale_jitter_type}, expected 0 or 1")
    if len(random_scale) != 2:
        raise ValueError(f"ImageInput: random_scale must be two lengths, not {random_scale}")


def _output_type(argument: Argument | None) -> torch.dtype:
    names: Sequence[str] = ("float", "float16")
    if argument is None:
        return torch.float32
    if argument.HasField("s"):
        name = argument.s.decode().lower()
    else:
        name = TensorProto.DataType.Name(argument.i).lower()
    if name not in names:
        raise ValueError(f"ImageInput: output_type must be {' or '.join(names)}, not {name}")
    return torch.float16 if name == "float16" else torch.float32
