"""Dividing lists: each record once, whatever the list names."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from poseidon.caffe.data.batches.hdf5_rows import RowMaker, RowPlan, read_file_list
from poseidon.caffe.data.batches.partition import Share
from poseidon.caffe.data.batches.window_file import read_windows
from poseidon.caffe.data.prepare.split import partition_data
from poseidon.caffe.data.prepare.split_list import ListKind, list_kind, listed_images
from poseidon.errors import DataError, UsageError

WINDOWS = """# 0
a.jpg
3
10
10
2
1 0.9 0 0 5 5
0 0.1 1 1 5 5
# 1
b b.jpg
3
10
10
0

# 2
c.jpg
3
10
10
1
2 0.8 0 0 5 5
"""


def make_rows(folder: Path, counts: list[int]) -> Path:
    """A list of HDF5 files; row r of all of them has data (r, -r) and label r."""
    at = 0
    for number, count in enumerate(counts):
        rows = np.arange(at, at + count)
        with h5py.File(folder / f"f{number}.h5", "w") as file:
            file["data"] = np.stack([rows, -rows], 1).astype(np.float32)
            file["label"] = rows.astype(np.int16)
        at += count
    source = folder / "list.txt"
    source.write_text("".join(f"f{number}.h5\n" for number in range(len(counts))))
    return source


def rows_of(source: Path) -> list[tuple[float, ...]]:
    found = []
    for name in read_file_list(source):
        with h5py.File(source.parent / name) as file:
            assert file["label"].dtype == np.int16, "kinds of numbers are kept"
            found += [
                (*data, label)
                for data, label in zip(file["data"][()], file["label"][()], strict=True)
            ]
    return found


@pytest.mark.parametrize("counts", [[7], [3, 1, 4, 2], [1, 1, 1], [2, 9]])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_rows_are_dealt_one_at_a_time_over_all_files(
    tmp_path: Path, counts: list[int], parts: int
) -> None:
    source = make_rows(tmp_path, counts)
    everything = [(float(r), float(-r), float(r)) for r in range(sum(counts))]
    assert partition_data(source, parts) == sum(counts)
    for part in range(parts):
        assert rows_of(tmp_path / f"list.txt_{part}") == everything[part::parts]
    assert rows_of(source) == everything


def test_large_datasets_pass_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poseidon.caffe.data.prepare.split_list.BLOCK_BYTES", 40)
    source = make_rows(tmp_path, [50, 23])
    partition_data(source, 3)
    assert rows_of(tmp_path / "list.txt_1") == [
        (float(r), float(-r), float(r)) for r in range(1, 73, 3)
    ]


def test_a_divided_list_feeds_the_reader_what_one_process_reads(tmp_path: Path) -> None:
    source = make_rows(tmp_path, [5, 4, 3])
    partition_data(source, 2)

    def first_batch(path: Path, size: int) -> list[float]:
        files = [path.parent / name for name in read_file_list(path)]
        plan = RowPlan(batch_size=size, names=("label",), share=Share(), seed=1)
        return RowMaker(files, plan).tensors(0)[0].tolist()

    dealt = zip(*(first_batch(tmp_path / f"list.txt_{part}", 4) for part in range(2)), strict=True)
    assert [label for pair in dealt for label in pair] == first_batch(source, 8)


def test_parts_of_rows_are_replaced_with_their_folders(tmp_path: Path) -> None:
    source = make_rows(tmp_path, [5])
    partition_data(source, 3)
    with pytest.raises(DataError, match=r"list.txt_0\.rows exists already"):
        partition_data(source, 2)
    assert partition_data(source, 2, replace=True) == 5
    names = sorted(entry.name for entry in tmp_path.iterdir() if "_" in entry.name)
    assert names == ["list.txt_0", "list.txt_0.rows", "list.txt_1", "list.txt_1.rows"]


def test_parts_keep_names_of_any_encoding_and_no_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "list").write_bytes(b"\xef\xbb\xbfcaf\xe9.jpg 1\r\nb.jpg 2\r\n")
    assert partition_data(tmp_path / "list", 2) == 2
    assert [(tmp_path / f"list_{part}").read_bytes() for part in (0, 1)] == [
        b"caf\xe9.jpg 1\n",
        b"b.jpg 2\n",
    ]


def test_windows_stay_with_their_pictures(tmp_path: Path) -> None:
    (tmp_path / "list").write_text(WINDOWS)
    assert partition_data(tmp_path / "list", 2) == 3
    first = read_windows(tmp_path / "list_0", "", fg_threshold=0.5, bg_threshold=0.5)
    assert [path.name for path in first.images] == ["a.jpg", "c.jpg"]
    assert [window.label for window in first.foreground] == [1, 2]
    second = read_windows(tmp_path / "list_1", "", fg_threshold=0.5, bg_threshold=0.5)
    assert [path.name for path in second.images] == ["b b.jpg"]


def test_kinds_of_lists(tmp_path: Path) -> None:
    assert list_kind(make_rows(tmp_path, [1])) is ListKind.ROWS
    (tmp_path / "pictures").write_text("\na b.jpg 3\na b.jpg 4\nc.jpg 1\n")
    assert list_kind(tmp_path / "pictures") is ListKind.IMAGES
    assert listed_images(tmp_path / "pictures", "root/") == [
        Path("root/a b.jpg"),
        Path("root/c.jpg"),
    ]
    (tmp_path / "windows").write_text(WINDOWS)
    assert [path.name for path in listed_images(tmp_path / "windows", "")] == [
        "a.jpg",
        "b b.jpg",
        "c.jpg",
    ]


def damage_missing(folder: Path) -> None:
    (folder / "f1.h5").unlink()


def damage_group(folder: Path) -> None:
    with h5py.File(folder / "f1.h5", "a") as file:
        file.create_group("more")


def damage_rows(folder: Path) -> None:
    with h5py.File(folder / "f1.h5", "a") as file:
        file["more"] = np.zeros(9)


def damage_bytes(folder: Path) -> None:
    (folder / "f1.h5").write_bytes(b"no HDF5")


def damage_nothing_inside(folder: Path) -> None:
    with h5py.File(folder / "f1.h5", "w"):
        pass


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, "there is no HDF5 file f1.h5"),
        (damage_group, "f1.h5: 'more' is not a dataset of rows"),
        (damage_rows, r"f1.h5: its datasets have \[2, 9\] rows"),
        (damage_bytes, "f1.h5 cannot be read as HDF5"),
        (damage_nothing_inside, "f1.h5 has no dataset"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_files_that_cannot_be_divided(tmp_path: Path, damage: object, message: str) -> None:
    source = make_rows(tmp_path, [3, 2])
    assert callable(damage)
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        partition_data(source, 2)
    assert not (tmp_path / "list.txt_0").exists()


def test_more_parts_than_rows(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="into 4 parts: it has only 3 rows"):
        partition_data(make_rows(tmp_path, [1, 2]), 4)
    assert not list(tmp_path.glob("list.txt_*"))


def test_a_text_that_is_no_list_of_images(tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text('name: "n"\nlayer {\n}\n')
    with pytest.raises(
        DataError, match=r"net\.prototxt:1: 'name: \"n\"' is not a path and a label"
    ):
        partition_data(tmp_path / "net.prototxt", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["net.prototxt"]


def test_an_empty_list(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("\n\n")
    with pytest.raises(DataError, match="is empty"):
        partition_data(tmp_path / "list", 1)
