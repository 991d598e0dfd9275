"""Rows of HDF5 files: types, shares, shuffles, and what can be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest

from poseidon.caffe.data.batches.hdf5_rows import RowMaker, RowPlan, read_file_list
from poseidon.caffe.data.batches.numbered import NumberedReader, Share
from poseidon.errors import DataError

NAMES = ("data", "label")


def write(path: Path, **datasets: np.ndarray) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in datasets.items():
            file.create_dataset(name, data=values)
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Rows 0 to 3 and 4 to 6; row i of `data` is 2 x 3 of i, its label i."""
    made = []
    for name, rows in (("a.h5", range(4)), ("b.h5", range(4, 7))):
        data = np.stack([np.full((2, 3), row, np.float64) for row in rows])
        made.append(write(tmp_path / name, data=data, label=np.array(rows, np.int64)))
    return made


def plan(batch: int = 3, **how: object) -> RowPlan:
    fields = {"names": NAMES, "share": Share(), "seed": 1} | how
    return RowPlan(batch_size=batch, **fields)  # type: ignore[arg-type]


def labels(files: Sequence[Path], made: RowPlan, batches: int, start: int = 0) -> list[int]:
    found = []
    with NumberedReader(files[0], RowMaker(files, made)) as opened:
        opened.skip_to(start)
        for _ in range(batches):
            data, label = opened.next()
            assert (data == label.view(-1, 1, 1)).all()
            found += [int(value) for value in label]
    return found


def test_rows_follow_the_files(files: list[Path]) -> None:
    maker = RowMaker(files, plan(3))
    assert maker.shapes == ((3, 2, 3), (3,))
    assert [maker.fresh_records(number) for number in range(4)] == [3, 3, 1, 0]
    assert labels(files, plan(3), 3) == [0, 1, 2, 3, 4, 5, 6, 0, 1]


def test_links_that_lead_to_each_other_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "loop.h5"
    with h5py.File(path, "w") as file:
        file["data"], file["label"] = h5py.SoftLink("/label"), h5py.SoftLink("/data")
    with pytest.raises(DataError, match=r"loop\.h5 cannot be read as HDF5: it is damaged"):
        RowMaker([path], plan())


@pytest.mark.parametrize("shuffle", [False, True])
def test_two_workers_read_what_one_does(files: list[Path], shuffle: bool) -> None:
    alone = labels(files, plan(2, shuffle=shuffle), 7)
    parts = [
        labels(files, plan(1, shuffle=shuffle, share=Share(first=g, step=2)), 7) for g in range(2)
    ]
    assert [label for pair in zip(*parts, strict=True) for label in pair] == alone
    assert sorted(alone[:7]) == sorted(alone[7:]) == list(range(7))


def test_shuffled_files_stay_together_and_resume(files: list[Path]) -> None:
    whole = labels(files, plan(1, shuffle=True), 14)
    assert sorted(whole[:4]) == [0, 1, 2, 3] or sorted(whole[:3]) == [4, 5, 6]
    assert labels(files, plan(1, shuffle=True), 5, start=9) == whole[9:]


def test_caffes_own_files(shared: Path) -> None:
    folder = shared / "data" / "dbs" / "hdf5"
    names = ("data", "label", "label2")
    paths = [folder / "sample_data.h5", folder / "sample_data_2_gzip.h5"]
    maker = RowMaker(paths, plan(10, names=names))
    assert maker.shapes == ((10, 8, 6, 5), (10, 1), (10, 1))
    with h5py.File(paths[1]) as file:
        expected = np.asarray(file["data"], np.float32)
    np.testing.assert_array_equal(maker.tensors(1)[0].numpy(), expected)


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ({"data": np.zeros((2, 3))}, "has no dataset 'label', the name of a top; it has: data"),
        ({"data": np.zeros((2, 3)), "label": np.zeros(3)}, "'data' has 2 rows and 'label' has 3"),
        (
            {"data": np.zeros((2, 3)), "label": np.array([b"x", b"y"])},
            "'label' is .* expected rows of numbers",
        ),
        ({"data": np.float32(3), "label": np.zeros(1)}, "expected rows of numbers"),
        ({"data": np.zeros((2, 4)), "label": np.zeros(2)}, r"rows of 'data' have shape \(4,\)"),
    ],
)
def test_files_that_do_not_do(
    files: list[Path], tmp_path: Path, datasets: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        RowMaker([files[0], write(tmp_path / "c.h5", **datasets)], plan())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("grp", "'grp', the name of a top, is a group of datasets, expected a dataset"),
        ("none", "has no dataset 'none', the name of a top; it has: grp/in/data, grp/x"),
        ("empty", "is a group of datasets, expected a dataset; it has: none"),
    ],
)
def test_a_top_that_names_a_group(tmp_path: Path, name: str, message: str) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["grp/in/data"] = file["grp/x"] = np.zeros((2, 3))
        file.create_group("empty")
    with pytest.raises(DataError, match=message):
        RowMaker([tmp_path / "a.h5"], plan(names=(name,)))
    assert RowMaker([tmp_path / "a.h5"], plan(1, names=("grp/x",))).shapes == ((1, 3),)


def test_no_files(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("\n")
    with pytest.raises(DataError, match="is empty"):
        read_file_list(tmp_path / "list")
    with pytest.raises(DataError, match=r"there is no list of HDF5 files .*: make it first"):
        read_file_list(tmp_path / "nosuch")
    with pytest.raises(DataError, match="there is no HDF5 file"):
        RowMaker([tmp_path / "nosuch.h5"], plan())
    (tmp_path / "bad.h5").write_bytes(b"no HDF5")
    with pytest.raises(DataError, match="cannot be read as HDF5"):
        RowMaker([tmp_path / "bad.h5"], plan())


def test_a_file_that_claims_more_than_it_holds(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("data", shape=(1 << 40,), chunks=(1024,), dtype="f4")
    with pytest.raises(DataError, match=r"claims shape .* more than its file can hold"):
        RowMaker([tmp_path / "a.h5"], plan(names=("data",)))
