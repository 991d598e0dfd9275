"""The reader: which records, in which order, transformed how; resume, wrap, errors."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import text_format
from PIL import Image

from poseidon.caffe.data.batches.numbered import NumberedReader, Share
from poseidon.caffe.data.batches.reader import DatumMaker, DatumPlan, open_maker
from poseidon.caffe.data.batches.transform import Transform
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import encode_datum
from poseidon.caffe.data.prepare.split import partition_data
from poseidon.caffe.proto.caffe_pb2 import TEST, TRAIN, Datum, TransformationParameter
from poseidon.errors import DataError
from tests.support.databases import BACKENDS, make_database, make_pictures, picture, worker_share

AUGMENTED = TransformationParameter(crop_size=3, mirror=True, scale=0.5)
# SSD's steps.
STEPS = text_format.Parse(
    "crop_size: 3 mirror: true resize_param { height: 6 width: 7 interp_mode: LINEAR interp_mode: "
    "NEAREST } "
    "distort_param { brightness_prob: 0.9 brightness_delta: 40 random_order_prob: 0.5 } "
    "expand_param { max_expand_ratio: 3 } mean_value: 9 "
    "noise_param { saltpepper: true saltpepper_param { fraction: 0.2 value: 1 } }",
    TransformationParameter(),
)


Reader = NumberedReader[DatumMaker]


def reader(
    source: Path,
    *,
    param: TransformationParameter | None = None,
    train: bool = True,
    backend: Backend = Backend.LMDB,
    batch_size: int = 4,
    share: Share | None = None,
    seed: int = 1,
    prefetch: int = 4,
    **options: Any,
) -> Reader:
    plan = DatumPlan(
        batch_size=batch_size,
        transform=Transform(param or TransformationParameter(), train=train, resolve=Path),
        share=share or Share(),
        seed=seed,
        **options,
    )
    maker = open_maker(source, backend, lambda cursor: DatumMaker(cursor, plan))
    return NumberedReader(source, maker, prefetch=prefetch)


def labels(open_reader: Reader, batches: int) -> list[list[int]]:
    with open_reader:
        return [open_reader.next()[1].int().tolist() for _ in range(batches)]


def copies(open_reader: Reader, batches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    with open_reader:
        return [
            (data.clone(), label.clone())
            for data, label in (open_reader.next() for _ in range(batches))
        ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_wrap_around_as_in_caffe(tmp_path: Path, backend: Backend) -> None:
    path = make_pictures(tmp_path / "db", 10, backend=backend)
    with reader(path, backend=backend) as source:
        assert source.shape == (4, 3, 4, 5)
        for batch in range(6):
            data, label = source.next()
            expected = [n % 10 for n in range(batch * 4, batch * 4 + 4)]
            assert (data.dtype, label.dtype) == (torch.float32, torch.float32)
            assert label.tolist() == expected
            np.testing.assert_array_equal(data.numpy(), [picture(i) for i in expected])
        assert source.batches_done == 6


def test_a_batch_may_be_larger_than_the_database(tmp_path: Path) -> None:
    path = make_pictures(tmp_path / "db", 3)
    assert labels(reader(path, batch_size=8), 2) == [
        [0, 1, 2, 0, 1, 2, 0, 1],
        [2, 0, 1, 2, 0, 1, 2, 0],
    ]


@pytest.mark.parametrize("param", [AUGMENTED, STEPS], ids=["crop", "steps"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("workers", "length", "clients"),
    # Parts of unequal length would wrap around at different times, so what is divided divides
    # evenly.
    [(2, 10, 1), (3, 10, 1), (4, 7, 1), (5, 5, 1), (2, 10, 2), (5, 5, 5)],
)
def test_workers_together_see_what_one_process_sees(
    tmp_path: Path,
    backend: Backend,
    workers: int,
    length: int,
    clients: int,
    param: TransformationParameter,
) -> None:
    """Pictures, labels, crops, mirrors and SSD's steps; with one database, or with a part for
    each worker.
    """
    path = make_pictures(tmp_path / "db", length, backend=backend)
    shared = clients == 1
    if not shared:
        partition_data(path, clients)
    batch, count = 2, 9
    whole = copies(reader(path, param=param, batch_size=batch * workers, backend=backend), count)
    for rank in range(workers):
        share = worker_share(TRAIN, rank, workers, batch, clients=clients, shared=shared)
        source = path if shared else tmp_path / f"db_{rank}"
        part = copies(
            reader(source, param=param, batch_size=batch, share=share, backend=backend), count
        )
        for (all_data, all_labels), (data, label) in zip(whole, part, strict=True):
            assert torch.equal(data, all_data[rank::workers])
            assert torch.equal(label, all_labels[rank::workers])


def test_test_batches_are_those_of_one_process(tmp_path: Path) -> None:
    path = make_pictures(tmp_path / "db", 10)
    whole = labels(reader(path, batch_size=3, train=False), 6)
    for rank in range(2):
        share = worker_share(TEST, rank, 2, 3, clients=2)
        assert labels(reader(path, batch_size=3, train=False, share=share), 3) == whole[rank::2]


@pytest.mark.parametrize("done", [0, 1, 5, 6, 1000])
def test_a_resumed_reader_goes_on_exactly(tmp_path: Path, done: int) -> None:
    path = make_pictures(tmp_path / "db", 10)
    share = Share(first=1, step=3)
    with (
        reader(path, param=AUGMENTED, share=share) as first,
        reader(path, param=AUGMENTED, share=share) as second,
    ):
        for _ in range(done):
            first.next()
        second.next()
        second.skip_to(done)
        assert second.batches_done == done
        for _ in range(3):
            expected, found = first.next(), second.next()
            assert torch.equal(expected[0], found[0])
            assert torch.equal(expected[1], found[1])
        assert first.batches_done == second.batches_done == done + 3


def test_crops_and_mirrors_depend_on_the_seed_and_change_from_pass_to_pass(tmp_path: Path) -> None:
    path = make_pictures(tmp_path / "db", 4, shape=(3, 12, 12))
    one, again = (copies(reader(path, param=AUGMENTED), 3) for _ in range(2))
    other = copies(reader(path, param=AUGMENTED, seed=2), 1)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(one, again, strict=True))
    assert not torch.equal(one[0][0], other[0][0])
    assert not torch.equal(one[0][0], one[1][0])


def test_rand_skip_is_the_same_on_all_workers(tmp_path: Path) -> None:
    path = make_pictures(tmp_path / "db", 50)
    starts = set()
    for seed in range(20):
        first = labels(reader(path, batch_size=1, seed=seed, rand_skip=5), 1)[0][0]
        second = labels(
            reader(path, batch_size=1, seed=seed, rand_skip=5, share=Share(first=1, step=2)), 1
        )[0][0]
        assert second == first + 1
        starts.add(first)
    assert starts == set(range(5))


def png(image: np.ndarray[Any, Any], label: int) -> bytes:
    """A record with a picture (H, W, 3) or (H, W) in it."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return Datum(data=buffer.getvalue(), encoded=True, label=label).SerializeToString()


def mixed_record(number: int) -> bytes:
    """Raw, float and encoded records of the same picture, in turn."""
    array = picture(number)
    return (
        encode_datum(array, number),
        encode_datum(array.astype(np.float32), number),
        png(array[::-1].transpose(1, 2, 0), number),
    )[number % 3]


@pytest.mark.parametrize("first", [0, 1, 2], ids=["raw first", "float first", "encoded first"])
def test_records_of_every_kind_side_by_side(tmp_path: Path, first: int) -> None:
    path = make_database(
        tmp_path / "db",
        Backend.LMDB,
        ((b"%05d" % i, mixed_record(i)) for i in range(first, first + 9)),
    )
    for data, label in copies(reader(path), 4):
        np.testing.assert_array_equal(data.numpy(), [picture(int(i)) for i in label])


def test_encoded_pictures_of_many_sizes_with_a_crop(tmp_path: Path) -> None:
    sizes = [(6, 6), (5, 9), (8, 4)]
    path = make_database(
        tmp_path / "db",
        Backend.LMDB,
        ((b"%d" % i, png(picture(i, (*size, 3)), i)) for i, size in enumerate(sizes)),
    )
    param = TransformationParameter(crop_size=4)
    data, _ = copies(reader(path, param=param, train=False, batch_size=3), 1)[0]
    for i, (height, width) in enumerate(sizes):
        top, left = (height - 4) // 2, (width - 4) // 2
        expected = picture(i, (height, width, 3))[top : top + 4, left : left + 4, ::-1].transpose(
            2, 0, 1
        )
        np.testing.assert_array_equal(data[i].numpy(), expected)


SIZES = [(4, 5), (9, 7), (6, 6), (4, 5), (5, 4)]


def sized(number: int) -> np.ndarray[Any, Any]:
    return picture(number, (3, *SIZES[number]))


def as_raw(number: int) -> bytes:
    return encode_datum(sized(number), number)


def as_float(number: int) -> bytes:
    return encode_datum(sized(number).astype(np.float32), number)


def as_png(number: int) -> bytes:
    return png(sized(number)[::-1].transpose(1, 2, 0), number)


def mixed_sizes(
    path: Path, record: Callable[[int], bytes], backend: Backend = Backend.LMDB
) -> Path:
    return make_database(path, backend, ((b"%05d" % i, record(i)) for i in range(len(SIZES))))


@pytest.mark.parametrize("record", [as_raw, as_float, as_png])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_of_one_record_has_its_size(
    tmp_path: Path, backend: Backend, record: Callable[[int], bytes]
) -> None:
    path = mixed_sizes(tmp_path / "db", record, backend)
    param = TransformationParameter(mean_value=[10], scale=0.5)
    with reader(path, param=param, batch_size=1, backend=backend) as source:
        assert source.shape == (1, 3, 4, 5) and not source.maker.plan.has_one_shape
        for number in (0, 1, 2, 3, 4, 0, 1):
            data, label = source.next()
            np.testing.assert_array_equal(
                data[0].numpy(), (sized(number).astype(np.float32) - 10) * 0.5
            )
            assert label.tolist() == [number]


@pytest.mark.parametrize("record", [as_raw, as_png])
def test_records_of_many_sizes_over_workers_and_after_a_resume(
    tmp_path: Path, record: Callable[[int], bytes]
) -> None:
    path, param = mixed_sizes(tmp_path / "db", record), TransformationParameter(mirror=True)
    whole = copies(reader(path, param=param, batch_size=1), 12)
    # mirrored at random
    assert any(not torch.equal(whole[i][0], whole[i + 5][0]) for i in range(5))
    for rank in range(3):
        share = Share(first=rank, step=3)
        for begin in (0, 2):
            part = reader(path, param=param, batch_size=1, share=share, prefetch=2)
            part.skip_to(begin)
            for expected, found in zip(
                whole[rank::3][begin:], copies(part, 4 - begin), strict=True
            ):
                assert torch.equal(expected[0], found[0]) and torch.equal(expected[1], found[1])


def test_records_of_many_sizes_with_a_crop_have_one_shape(tmp_path: Path) -> None:
    param = TransformationParameter(crop_size=4)
    with reader(
        mixed_sizes(tmp_path / "db", as_raw), param=param, train=False, batch_size=1
    ) as source:
        assert source.maker.plan.has_one_shape
        for number in range(5):
            top, left = ((extent - 4) // 2 for extent in SIZES[number])
            expected = sized(number)[:, top : top + 4, left : left + 4]
            np.testing.assert_array_equal(source.next()[0][0].numpy(), expected)


def test_force_color(tmp_path: Path) -> None:
    path = make_database(tmp_path / "db", Backend.LMDB, [(b"a", png(picture(0, (1, 4, 4))[0], 0))])
    with reader(path) as plain, reader(path, force_color=True) as colored:
        assert plain.shape == (4, 1, 4, 4)
        assert colored.shape == (4, 3, 4, 4)
        assert torch.equal(colored.next()[0], plain.next()[0].expand(4, 3, 4, 4))


def test_no_labels_without_a_label_top(tmp_path: Path) -> None:
    with reader(make_pictures(tmp_path / "db", 3), label=False) as source:
        assert source.next()[1].shape == (0,)


def test_a_batch_that_is_kept_stays_as_it_is(tmp_path: Path) -> None:
    with reader(make_pictures(tmp_path / "db", 10), prefetch=1) as source:
        kept = [source.next() for _ in range(8)]
        for batch, (data, _) in enumerate(kept):
            expected = [picture(n % 10) for n in range(batch * 4, batch * 4 + 4)]
            np.testing.assert_array_equal(data.numpy(), expected)


BROKEN: dict[str, tuple[Callable[[], bytes], str]] = {
    "rubbish": (lambda: b"rubbish!", r"db: record 6 \(key '00006'\): the record is not a Datum"),
    "short": (lambda: encode_datum(picture(0), 1)[:40], r"record 6 \(key '00006'\)"),
    "other shape": (
        lambda: encode_datum(picture(0, (3, 5, 4)), 1),
        r"record 6 .* is 3 x 5 x 4 .*first record is 3 x 4 x 5; set crop_size or .*, or "
        r"batch_size: 1",
    ),
    "other channels": (
        lambda: encode_datum(picture(0, (1, 4, 5)), 1),
        r"record 6 .* is 1 x 4 x 5 .*first record is 3 x 4 x 5; set force_color or force_gray",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_record_is_named_when_its_batch_is_due(tmp_path: Path, kind: str) -> None:
    make, message = BROKEN[kind]
    records = [(b"%05d" % i, encode_datum(picture(i), i)) for i in range(9)]
    records[6] = (b"00006", make())
    path = make_database(tmp_path / "db", Backend.LMDB, records)
    with reader(path) as source:
        assert source.next()[1].tolist() == [0, 1, 2, 3]
        with pytest.raises(DataError, match=message):
            source.next()
        assert source.batches_done == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda path: reader(path, param=TransformationParameter(crop_size=9)),
            "crop_size 9 is larger",
        ),
        (lambda path: reader(path, backend=Backend.LEVELDB), "is LMDB, but was named as LevelDB"),
        (lambda path: reader(path / "none"), "does not exist"),
    ],
)
def test_what_cannot_be_opened(
    tmp_path: Path, make: Callable[[Path], Reader], message: str
) -> None:
    path = make_pictures(tmp_path / "db", 3)
    with pytest.raises(DataError, match=message):
        make(path)


def test_a_closed_reader_raises(tmp_path: Path) -> None:
    source = reader(make_pictures(tmp_path / "db", 3))
    source.next()
    source.close()
    source.close()
    with pytest.raises(DataError, match="is closed"):
        source.next()
