"""Picture files into databases."""

from __future__ import annotations

import os
from pathlib import Path

import cv2
import numpy as np
import pytest

from poseidon.caffe.data.cursor import open_cursor, records
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import decode
from poseidon.caffe.data.prepare.imageset import (
    SIDES,
    Conversion,
    convert_imageset,
    draw_labels,
    draw_picture,
)
from poseidon.caffe.proto.caffe_pb2 import Datum
from poseidon.cli.main import main
from poseidon.errors import DataError

SIZES = [(4, 5), (4, 5), (6, 3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index, size in enumerate(SIZES):
        pixels = np.random.default_rng(index).integers(0, 256, (*size, 3), np.uint8)
        cv2.imwrite(str(tmp_path / f"p {index}.png"), pixels)
    (tmp_path / "list").write_text(
        "".join(f"p {index}.png {index + 5}\n" for index in range(len(SIZES)))
    )
    return tmp_path


def convert(
    folder: Path, backend: Backend = Backend.LMDB, **how: object
) -> list[tuple[bytes, Datum]]:
    conversion = Conversion(**how)  # type: ignore[arg-type]
    count = convert_imageset(f"{folder}/", folder / "list", folder / "db", backend, conversion)
    cursor = open_cursor(folder / "db", backend)
    try:
        found = [(bytes(key), Datum.FromString(bytes(value))) for key, value in records(cursor)]
    finally:
        cursor.close()
    assert len(found) == count
    return found


def pixels(folder: Path, index: int, flag: int = cv2.IMREAD_COLOR) -> np.ndarray:
    found = cv2.imread(str(folder / f"p {index}.png"), flag)
    assert found is not None
    return found


@pytest.mark.parametrize("backend", list(Backend))
def test_pixels_blue_first_with_caffes_keys(folder: Path, backend: Backend) -> None:
    found = convert(folder, backend)
    assert [key for key, _ in found] == [
        b"00000000_p 0.png",
        b"00000001_p 1.png",
        b"00000002_p 2.png",
    ]
    assert [datum.label for _, datum in found] == [5, 6, 7]
    for index, (_, datum) in enumerate(found):
        image, _ = decode(datum.SerializeToString())
        np.testing.assert_array_equal(image, pixels(folder, index).transpose(2, 0, 1))


def test_sizes_and_grey(folder: Path) -> None:
    for index, (_, datum) in enumerate(convert(folder, gray=True, size=(7, 0))):
        expected = cv2.resize(pixels(folder, index, cv2.IMREAD_GRAYSCALE), (SIZES[index][1], 7))
        assert (datum.channels, datum.height, datum.width) == (1, 7, SIZES[index][1])
        np.testing.assert_array_equal(decode(datum.SerializeToString())[0], expected[np.newaxis])


def test_encoded_pictures_are_the_files_unless_something_changes(folder: Path) -> None:
    for index, (_, datum) in enumerate(convert(folder, encoded=True)):
        assert datum.encoded and datum.data == (folder / f"p {index}.png").read_bytes()


@pytest.mark.parametrize("how", [{"gray": True}, {"size": (3, 3)}, {"encode_type": "bmp"}])
def test_encoded_anew(folder: Path, how: dict[str, object]) -> None:
    _, datum = convert(folder, encoded=True, **how)[0]
    expected = pixels(folder, 0, cv2.IMREAD_GRAYSCALE if "gray" in how else cv2.IMREAD_COLOR)
    expected = cv2.resize(expected, (3, 3)) if "size" in how else expected
    found = cv2.imdecode(np.frombuffer(datum.data, np.uint8), cv2.IMREAD_UNCHANGED)
    assert datum.encoded and datum.data != (folder / "p 0.png").read_bytes()
    np.testing.assert_array_equal(found, expected)


def test_a_shuffle_is_its_seeds(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (folder / "list").write_text("".join(f"p 0.png {label}\n" for label in range(30)))
    orders = []
    for number, seed in enumerate((1, 1, 2)):
        found = convert(folder, shuffle=True, seed=seed)
        orders.append([datum.label for _, datum in found])
        (folder / "db").rename(folder / f"db{number}")
    assert sorted(orders[0]) == list(range(30))
    assert orders[0] == orders[1] != orders[2] != list(range(30))


@pytest.mark.parametrize("wrong", ["check_size", "format"])
def test_mistakes_leave_no_database(folder: Path, wrong: str) -> None:
    how: dict[str, object] = {}
    message = {
        "check_size": r"list:3: image of 54 values, expected 60",
        "format": r"list:1: the image .* cannot be encoded as 'nosuch'",
    }[wrong]
    if wrong == "check_size":
        how["check_size"] = True
    else:
        how["encode_type"] = "nosuch"
    with pytest.raises(DataError, match=message):
        convert(folder, **how)
    assert not (folder / "db").exists()


@pytest.mark.parametrize(
    ("content", "why"), [(None, "cannot be read: No such file"), (b"nothing", "cannot be decoded")]
)
def test_a_picture_that_cannot_be_read_is_left_out(
    folder: Path, caplog: pytest.LogCaptureFixture, content: bytes | None, why: str
) -> None:
    (folder / "p 1.png").unlink()
    if content is not None:
        (folder / "p 1.png").write_bytes(content)
    assert [key for key, _ in convert(folder)] == [b"00000000_p 0.png", b"00000002_p 2.png"]
    (warning,) = caplog.messages
    assert "list:2: the image" in warning
    assert why in warning
    assert warning.endswith("; it is left out")


def test_no_picture_can_be_read(folder: Path) -> None:
    for picture in folder.glob("*.png"):
        picture.unlink()
    with pytest.raises(DataError, match=r"list:1: the image .*p 0\.png cannot be read"):
        convert(folder)
    assert not (folder / "db").exists()


def test_a_folder_without_a_slash_is_named(folder: Path) -> None:
    (folder / "list").write_text("a.png 1\n", encoding="utf-8")
    (folder / "pictures").mkdir()
    with pytest.raises(
        DataError,
        match=rf"picturesa\.png cannot be read: .*; end the folder with a slash: {folder}/pictures/",
    ):
        convert_imageset(
            f"{folder}/pictures", folder / "list", folder / "db", Backend.LMDB, Conversion()
        )


def test_two_labels_in_a_line_are_named(folder: Path) -> None:
    (folder / "list").write_text("p 0.png 3 4\n", encoding="utf-8")
    message = r"list:1: .*p 0.png 3 cannot be read: .*; a line has one label, and '3' is probably a second label"
    with pytest.raises(DataError, match=message):
        convert(folder)


def test_a_list_of_windows_with_names_of_any_encoding_and_labels_of_32_bits(folder: Path) -> None:
    name = b"caf\xe9 \xff.png"
    (folder / "p 1.png").rename(folder / os.fsdecode(name))
    lines = b"\xef\xbb\xbfp 0.png 2147483647\r\n%b -2147483648\r\n" % name
    (folder / "list").write_bytes(lines)
    found = convert(folder)
    assert [key for key, _ in found] == [b"00000000_p 0.png", b"00000001_" + name]
    assert [datum.label for _, datum in found] == [2147483647, -2147483648]


@pytest.mark.needs("leveldb")
def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "-resize_width=4 --resize_height 4 -shuffle=true --gray --noencoded"
    words, paths = (
        ["convert_imageset", *flags.split()],
        [f"{folder}/{end}" for end in ("", "list", "db")],
    )
    assert main([*words, "--backend", "leveldb", *paths]) == 0
    assert "Processed 3 files." in capsys.readouterr().out
    assert main([*words, *paths]) == 1
    assert "exists already" in capsys.readouterr().err


def pixels_of_two_class(number: int, label: int, seed: int = 0) -> np.ndarray:
    return cv2.imdecode(
        np.frombuffer(draw_picture(number, label, seed=seed), np.uint8), cv2.IMREAD_COLOR
    )


def test_a_picture_depends_on_seed_number_and_label() -> None:
    assert draw_picture(3, 1, seed=5) == draw_picture(3, 1, seed=5)
    assert (
        len({draw_picture(n, label, seed=s) for n in (0, 1) for label in (0, 1) for s in (0, 1)})
        == 8
    )


def test_the_classes_differ_in_shape_only() -> None:
    """Of one number and seed, both have the same size and background."""
    for number in range(5):
        car, boat = pixels_of_two_class(number, 0), pixels_of_two_class(number, 1)
        assert car.shape == boat.shape
        assert SIDES[0] <= min(car.shape[:2]) <= max(car.shape[:2]) <= SIDES[1]
        corner = np.abs(car[:6, :6].mean((0, 1)) - boat[:6, :6].mean((0, 1)))
        assert corner.max() < 6
        assert np.abs(car.astype(int) - boat).max() > 40


def test_labels_are_as_many_of_each() -> None:
    labels = draw_labels(21, seed=1)
    assert sorted(np.bincount(labels)) == [10, 11]
    assert labels.tolist() != sorted(labels.tolist())
