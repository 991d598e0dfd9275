"""Lists of pictures: reading, sizes, orders, shares, and what can be wrong."""

from __future__ import annotations

import os
from pathlib import Path

import cv2
import numpy as np
import pytest

from poseidon.caffe.data.batches.images import ImageMaker, ImagePlan, read_image, read_list
from poseidon.caffe.data.batches.numbered import NumberedReader, Share
from poseidon.caffe.data.batches.transform import Transform
from poseidon.caffe.proto.caffe_pb2 import TransformationParameter
from poseidon.errors import DataError

COUNT = 7


def transform(**fields: object) -> Transform:
    return Transform(TransformationParameter(**fields), train=True, resolve=Path)  # type: ignore[arg-type]


def plan(batch: int = 3, **how: object) -> ImagePlan:
    fields = {"transform": transform(), "share": Share(), "seed": 1} | how
    return ImagePlan(batch_size=batch, **fields)  # type: ignore[arg-type]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Seven pictures of 5 x 4 random pixels; picture i has label 10 i, and its name has a space."""
    lines = []
    for index in range(COUNT):
        pixels = np.random.default_rng(index).integers(0, 256, (5, 4, 3), np.uint8)
        cv2.imwrite(str(tmp_path / f"picture {index}.png"), pixels)
        lines.append(f"picture {index}.png {10 * index}")
    (tmp_path / "list").write_text("\n".join(lines) + "\n")
    return tmp_path / "list"


def reader(source: Path, made: ImagePlan) -> NumberedReader[ImageMaker]:
    lines = read_list(source, f"{source.parent}/")
    return NumberedReader(source, ImageMaker(source, lines, made))


def labels(source: Path, made: ImagePlan, batches: int, start: int = 0) -> list[int]:
    with reader(source, made) as opened:
        opened.skip_to(start)
        return [int(label) for _ in range(batches) for label in opened.next()[1]]


def test_pictures_are_what_opencv_reads(source: Path) -> None:
    with reader(source, plan(2)) as opened:
        assert opened.shape == (2, 3, 5, 4)
        data, label = opened.next()
    for place in range(2):
        expected = cv2.imread(str(source.parent / f"picture {place}.png"), cv2.IMREAD_COLOR)
        assert expected is not None
        np.testing.assert_array_equal(data[place].numpy(), expected.transpose(2, 0, 1))
    assert label.tolist() == [0, 10]


def test_sizes_and_grey(source: Path) -> None:
    path = source.parent / "picture 3.png"
    grey = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
    assert grey is not None
    expected = cv2.resize(grey, (7, 6))
    np.testing.assert_array_equal(read_image(path, color=False, size=(6, 7)), expected[np.newaxis])
    with reader(source, plan(2, size=(6, 7), color=False)) as opened:
        assert tuple(opened.next()[0].shape) == opened.shape == (2, 1, 6, 7)


def test_the_list_begins_anew(source: Path) -> None:
    assert labels(source, plan(3), 3) == [0, 10, 20, 30, 40, 50, 60, 0, 10]
    with reader(source, plan(3)) as opened:
        assert [opened.fresh_records(number) for number in range(4)] == [3, 3, 1, 0]


@pytest.mark.parametrize("shuffle", [False, True])
def test_two_workers_read_what_one_does(source: Path, shuffle: bool) -> None:
    alone = labels(source, plan(2, shuffle=shuffle), 7)
    parts = [
        labels(source, plan(1, shuffle=shuffle, share=Share(first=g, step=2)), 7) for g in range(2)
    ]
    assert [label for pair in zip(*parts, strict=True) for label in pair] == alone
    assert sorted(alone[:7]) == sorted(alone[7:]) == [10 * index for index in range(COUNT)]


def test_a_resumed_reader_goes_on_in_the_same_order(source: Path) -> None:
    whole = labels(source, plan(2, shuffle=True), 9)
    assert labels(source, plan(2, shuffle=True), 4, start=5) == whole[10:]
    assert whole[:7] != whole[7:14]


def test_rand_skip_is_the_seeds(source: Path) -> None:
    starts = {labels(source, plan(1, rand_skip=5, seed=seed), 1)[0] for seed in range(20)}
    assert starts == {0, 10, 20, 30, 40}
    with pytest.raises(DataError, match="rand_skip skips"):
        for seed in range(20):
            reader(source, plan(1, rand_skip=500, seed=seed)).close()


def test_crop_mirror_and_mean_are_those_of_databases(source: Path) -> None:
    made = plan(
        COUNT, transform=transform(crop_size=3, mirror=True, mean_value=[1.0, 2.0, 3.0], scale=0.5)
    )
    with reader(source, made) as opened:
        data, _ = opened.next()
    assert tuple(data.shape) == (COUNT, 3, 3, 3)
    pixels = read_image(source.parent / "picture 0.png", color=True).astype(np.float32)
    whole = (pixels - np.array([1, 2, 3], np.float32).reshape(3, 1, 1)) * np.float32(0.5)
    windows = [whole[:, y : y + 3, x : x + 3] for y in range(3) for x in range(2)]
    assert any(
        np.array_equal(data[0].numpy(), w) or np.array_equal(data[0].numpy(), w[..., ::-1])
        for w in windows
    )


def test_pictures_of_many_sizes_fill_no_batch(tmp_path: Path) -> None:
    for index, size in enumerate([(4, 5), (6, 3)]):
        cv2.imwrite(str(tmp_path / f"{index}.png"), np.full((*size, 3), index, np.uint8))
    (tmp_path / "list").write_text("0.png 0\n1.png 1\n")
    with (
        reader(tmp_path / "list", plan(2)) as opened,
        pytest.raises(DataError, match=r"list:2: image of 3 x 6 x 3"),
    ):
        opened.next()


def test_workers_agree_on_the_shape_of_pictures_of_many_sizes(source: Path) -> None:
    cv2.imwrite(str(source.parent / "picture 1.png"), np.zeros((6, 3, 3), np.uint8))
    for rank in range(2):
        with reader(source, plan(1, share=Share(first=rank, step=2))) as opened:
            assert opened.shape == (1, 3, 5, 4)  # the first picture's


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a.png\n", r"list:1: 'a.png' is not a path and a label"),
        ("a.png +-5\n", "is not a path and a label"),
        ("a.png 2147483648\n", "list:1: the label 2147483648 is out of range"),
        ("a\0.png 1\n", "cannot read the list .*: it is not text"),
        ("a.png 1\nb.png x\n", r"list:2: 'b.png x' is not a path and a label"),
    ],
)
def test_lists_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "list").write_text(text)
    with pytest.raises(DataError, match=message):
        read_list(tmp_path / "list", "")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
def test_a_list_of_any_editor(tmp_path: Path, encoding: str) -> None:
    """A name that is not UTF-8 is the name of a file, too."""
    name = os.fsdecode("caf\u00e9.png".encode("latin-1" if encoding == "latin-1" else "utf-8"))
    (tmp_path / "list").write_bytes("caf\u00e9.png 2147483647\r\nb.png\t-5\r\n".encode(encoding))
    assert read_list(tmp_path / "list", "") == [(1, name, 2147483647), (2, "b.png", -5)]


def test_a_line_with_two_labels_is_named(source: Path) -> None:
    source.write_text("picture 0.png 1 2\n")
    message = r"list:1: there is no image .*picture 0.png 1; a line has one label, and '1' is probably a second label"
    with pytest.raises(DataError, match=message):
        reader(source, plan(1))


def test_pictures_that_are_none(source: Path) -> None:
    with pytest.raises(DataError, match="cannot read the list"):
        read_list(source.parent / "nosuch", "")
    (source.parent / "picture 4.png").write_bytes(b"no images")
    (source.parent / "picture 5.png").unlink()
    with reader(source, plan(1)) as opened:
        opened.skip_to(4)
        with pytest.raises(DataError, match=r"list:5: the image .*picture 4.png cannot be decoded"):
            opened.next()
        opened.skip_to(5)
        with pytest.raises(DataError, match=r"list:6: there is no image"):
            opened.next()
