"""Windows: the file, the draws, and Caffe's arithmetic of context, squares and borders."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from poseidon.caffe.data.batches.lists import ImageWindow, read_windows
from poseidon.caffe.data.batches.numbered import NumberedReader, Share
from poseidon.caffe.data.batches.windows import CropMode, Sampling, WindowMaker, cut, place_window
from poseidon.errors import DataError

CROP = 9


def sampling(batch: int = 4, **how: object) -> Sampling:
    fields: dict[str, object] = {
        "crop": CROP, "foreground": 1, "context_pad": 0, "mode": CropMode.WARP, "mirror": False, "scale": 1.0,
        "mean": None, "cache": False, "share": Share(), "seed": 1,
    }  # fmt: skip
    return Sampling(batch_size=batch, **(fields | how))  # type: ignore[arg-type]


def picture(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (20, 30, 3), np.uint8)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for index in range(2):
        cv2.imwrite(str(tmp_path / f"{index}.png"), picture(index))
    (tmp_path / "windows").write_text(
        "# 0\n0.png\n3\n20\n30\n3\n2 0.9 1 2 10 12\n1 0.5 3 3 8 8\n0 0.1 0 0 29 19\n"
        "# 1\n1.png\n3\n20\n30\n2\n3 0.3 1 1 5 5\n4 0.7 20 10 29 19\n"
    )
    return tmp_path / "windows"


def opened(source: Path, how: Sampling) -> NumberedReader[WindowMaker]:
    file = read_windows(source, f"{source.parent}/", fg_threshold=0.6, bg_threshold=0.5)
    return NumberedReader(file.source, WindowMaker(file, how))


def test_thresholds_divide_the_windows(source: Path) -> None:
    file = read_windows(source, "", fg_threshold=0.6, bg_threshold=0.5)
    assert [(w.image, w.label) for w in file.foreground] == [(0, 2), (1, 4)]
    assert [(w.image, w.label, w.corners) for w in file.background] == [
        (0, 0, (0, 0, 29, 19)),
        (1, 0, (1, 1, 5, 5)),
    ]


def test_any_whitespace_may_stand_between_numbers(source: Path) -> None:
    by_line = read_windows(source, "", fg_threshold=0.6, bg_threshold=0.5)
    source.write_text(
        "# 0\n0.png\n3 20\t30 3 2 0.9 1 2 10 12\n1 0.5 3 3 8 8 0 0.1\n\n0 0 29 19\n"
        "# 1\n1.png\n3 20 30\n2\n3 0.3 1 1 5 5\n4 0.7 20 10 29 19\n"
    )
    assert read_windows(source, "", fg_threshold=0.6, bg_threshold=0.5) == by_line


def test_background_comes_first_and_workers_draw_differently(source: Path) -> None:
    with opened(source, sampling(8, foreground=3, cache=True)) as reader:
        assert reader.shape == (8, 3, CROP, CROP)
        labels = reader.next()[1].tolist()
    assert labels[:5] == [0] * 5 and set(labels[5:]) <= {2, 4}
    parts = []
    for rank in range(2):
        with opened(source, sampling(8, foreground=8, share=Share(first=rank, step=2))) as reader:
            parts.append([label for _ in range(4) for label in reader.next()[1].tolist()])
    assert parts[0] != parts[1] and set(parts[0]) == {2, 4}


def test_a_resumed_reader_repeats_the_draws(source: Path) -> None:
    with opened(source, sampling(mirror=True)) as reader:
        batches = [reader.next() for _ in range(4)]
    with opened(source, sampling(mirror=True)) as reader:
        reader.skip_to(3)
        again = reader.next()
    assert all((a == b).all() for a, b in zip(batches[3], again, strict=True))


CORNERS = [(4, 5, 15, 11), (0, 0, 29, 19), (25, 2, 29, 18), (0, 14, 3, 19)]
MEAN = np.random.default_rng(1).normal(size=(3, 12, 12)).astype(np.float32)
MEANS = np.array([1, 2, 3], np.float32).reshape(3, 1, 1)
WEIGHTS = np.random.default_rng(5).normal(size=(3, CROP, CROP))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, -33599.343619),
        ({"context_pad": 2}, -2973.787624),
        ({"mode": CropMode.SQUARE}, -8577.550539),
        ({"mode": CropMode.SQUARE, "context_pad": 1, "scale": 0.5}, 3133.716045),
        ({"context_pad": 2, "mean": MEAN}, -3217.106650),
        ({"context_pad": 2, "mean": MEANS}, -3712.628563),
    ],
)
def test_items_are_caffes(how: dict[str, object], expected: float) -> None:
    """Weighted sums of the items that the loops of window_data_layer.cpp make, value by value."""
    total = 0.0
    for number, window in enumerate(CORNERS, 1):
        for mirrored in (False, True):
            item = np.full((3, CROP, CROP), np.nan, np.float32)
            source = ImageWindow(image=0, label=1, corners=window)
            cut(picture(), source, sampling(**how), mirrored, item)
            total += number * (3 if mirrored else 1) * float((WEIGHTS * item).sum())
    assert total == pytest.approx(expected, abs=0.02)


def test_context_is_as_wide_as_asked_for() -> None:
    place = place_window((10, 6, 14, 10), (20, 30), sampling(context_pad=2), mirrored=False)
    assert place.size == (CROP, CROP) and place.offset == (0, 0)
    # 5 pixels become the inner 5 of 9: 2 more on each side, up to rounding.
    assert place.corners[2] - place.corners[0] + 1 in (9, 10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.png\n", r"windows:1: expected '# <index>'"),
        ("# 0\n0.png\n3\n20\n30\nx\n", r"windows:6: expected the number of windows"),
        ("# 0\n0.png\n3\n20\n30\n2\n1 0.9 0 0 1 1\n", r"windows:6: expected 2 windows"),
        ("# 0\n0.png\n3\n20\n30\n1\n1 0.9 0 0 1\n", "windows:6: expected 1 windows of 6 numbers"),
        ("# 0\n0.png\n3\n20\n30\n1\n1 0.9 0 0 1 x\n", "windows:7: expected class"),
        ("# 0\n0.png\n3\n20\n30\n", "windows:2: expected three sizes"),
        ("# 0\n0.png\n3\n20\n30\n1\n1e999 0.9 0 0 1 1\n", r"windows:7: expected class"),
        ("# 0\n0.png\n3\n20\n30\n1\n2147483648 0.9 0 0 1 1\n", "windows:7: the label 2147483648"),
        ("# 0\n0.png\n3\n20\n30\n1\n0 0.9 0 0 1 1\n", "windows:7: a foreground window has class 0"),
        ("# 0\n0.png\n3\n20\n30\n1\n1 0.9 0 0 1 1\n", "has no background windows"),
        ("", "has no foreground windows"),
    ],
)
def test_files_that_do_not_do(source: Path, text: str, message: str) -> None:
    source.write_text(text)
    with pytest.raises(DataError, match=message):
        opened(source, sampling())


def test_pictures_and_windows_that_are_not_there(source: Path) -> None:
    source.write_text("# 0\n0.png\n3\n20\n30\n1\n1 0.9 0 0 30 19\n")
    with (
        opened(source, sampling(1)) as reader,
        pytest.raises(DataError, match="is outside its image of 30 x 20"),
    ):
        reader.next()
    (source.parent / "0.png").unlink()
    with (
        opened(source, sampling(1)) as reader,
        pytest.raises(DataError, match="cannot read the image"),
    ):
        reader.next()
