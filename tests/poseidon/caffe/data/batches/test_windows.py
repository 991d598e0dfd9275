"""Windows: the file, the draws, and Caffe's arithmetic of context, squares and borders, written
out.
"""

from __future__ import annotations

import math
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


def c_round(value: float) -> int:
    return int(math.copysign(math.floor(abs(value) + 0.5), value))


def caffes(window: tuple[int, int, int, int], how: Sampling, mirrored: bool) -> np.ndarray:
    """The item as window_data_layer.cpp makes it, value by value."""
    image, crop = picture(), how.crop
    x1, y1, x2, y2 = window
    pad_w = pad_h = 0
    wide = high = crop
    square = how.mode is CropMode.SQUARE
    if how.context_pad > 0 or square:
        context = crop / (crop - 2 * how.context_pad)
        half_h, half_w = (y2 - y1 + 1) / 2, (x2 - x1 + 1) / 2
        center_x, center_y = x1 + half_w, y1 + half_h
        if square:
            half_h = half_w = max(half_h, half_w)
        x1, x2 = c_round(center_x - half_w * context), c_round(center_x + half_w * context)
        y1, y2 = c_round(center_y - half_h * context), c_round(center_y + half_h * context)
        scale_x, scale_y = crop / (x2 - x1 + 1), crop / (y2 - y1 + 1)
        left, top = max(0, -x1), max(0, -y1)
        right, bottom = max(0, x2 - image.shape[1] + 1), max(0, y2 - image.shape[0] + 1)
        x1, y1, x2, y2 = x1 + left, y1 + top, x2 - right, y2 - bottom
        wide, high = c_round((x2 - x1 + 1) * scale_x), c_round((y2 - y1 + 1) * scale_y)
        pad_h = c_round(top * scale_y)
        pad_w = c_round((right if mirrored else left) * scale_x)
        high, wide = min(high, crop - pad_h), min(wide, crop - pad_w)
    part = cv2.resize(image[y1 : y2 + 1, x1 : x2 + 1], (wide, high), interpolation=cv2.INTER_LINEAR)
    part = cv2.flip(part, 1) if mirrored else part
    item = np.zeros((3, crop, crop), np.float32)
    for c in range(3):
        for h in range(high):
            for w in range(wide):
                mean = 0.0
                if how.mean is not None:
                    off = (how.mean.shape[1] - crop) // 2 if how.mean.shape[1] > 1 else 0
                    place = (off + pad_h + h, off + pad_w + w) if how.mean.shape[1] > 1 else (0, 0)
                    mean = how.mean[(c, *place)]
                item[c, pad_h + h, pad_w + w] = (
                    np.float32(part[h, w, c]) - np.float32(mean)
                ) * np.float32(how.scale)
    return item


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize(
    "window", [(4, 5, 15, 11), (0, 0, 29, 19), (25, 2, 29, 18), (0, 14, 3, 19)]
)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"context_pad": 2},
        {"mode": CropMode.SQUARE},
        {"mode": CropMode.SQUARE, "context_pad": 1, "scale": 0.5},
        {
            "context_pad": 2,
            "mean": np.random.default_rng(1).normal(size=(3, 12, 12)).astype(np.float32),
        },
        {"context_pad": 2, "mean": np.array([1, 2, 3], np.float32).reshape(3, 1, 1)},
    ],
    ids=["warp", "context", "square", "square context scaled", "mean file", "mean values"],
)
def test_items_are_caffes(
    how: dict[str, object], window: tuple[int, int, int, int], mirrored: bool
) -> None:
    made = sampling(**how)
    item = np.full((3, CROP, CROP), np.nan, np.float32)
    cut(picture(), ImageWindow(image=0, label=1, corners=window), made, mirrored, item)
    np.testing.assert_allclose(item, caffes(window, made, mirrored), rtol=1e-6)


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
        ("# 0\n0.png\n3\n20\n30\n1\n1 0.9 0 0 1\n", "windows:7: expected class"),
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
