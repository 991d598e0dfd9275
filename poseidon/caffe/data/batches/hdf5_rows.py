"""Batches of rows from a list of HDF5 files.

Law: the records are the rows of all files in the list's order. A batch is a pure function of its
number (and of list, share and seed). One file is in memory at a time.

Source: caffe's HDF5DataLayer. `shuffle` permutes the files, and the rows in each file, as in Caffe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from poseidon.caffe.data.batches.lists import RecordOrder, read_list_lines
from poseidon.caffe.data.batches.numbered import Maker, Share
from poseidon.caffe.data.databases import IN_README
from poseidon.errors import DataError

Floats = npt.NDArray[np.float32]
# HDF5's best compression is 1032 bytes to one. A dataset of up to ALWAYS_BYTES is always accepted.
MOST_PACKED, ALWAYS_BYTES = 1032, 1 << 26
HDF5_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError)
"""What h5py raises for damaged files, such as RuntimeError for links that lead to each other."""
NUMBERS = "fiu"  # numpy's kinds: float, signed, unsigned


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """The batches to read.

    Attributes:
        batch_size: N.
        names: the datasets, one for each top.
        shuffle: read each epoch in a different order.
    """

    batch_size: int
    names: tuple[str, ...]
    share: Share
    seed: int
    shuffle: bool = False


def read_file_list(source: Path) -> list[str]:
    """Read the paths in a list of HDF5 files, one a line.

    Raises:
        DataError: the file cannot be read, or names no file.
    """
    if not source.exists():
        raise DataError(f"there is no list of HDF5 files {source}: make it first ({IN_README})")
    return [line.strip() for _, line in read_list_lines(source, "list of HDF5 files")]


class RowMaker(Maker):
    """A `Maker` of batches: N rows of each dataset.

    Args:
        files: HDF5 files, one or more.

    Raises:
        DataError: a file is missing or damaged, lacks a dataset, or its datasets
            differ in the number or the shape of rows.
    """

    def __init__(self, files: Sequence[Path], plan: RowPlan) -> None:
        super().__init__(plan.share, plan.batch_size)
        self._files = list(files)
        self._plan = plan
        rows, row_shapes = self._measure()
        self.shapes = tuple((plan.batch_size, *shape) for shape in row_shapes)
        self.shape = self.shapes[0]
        self._order = RecordOrder(rows, shuffle=plan.shuffle, seed=plan.seed)
        self._loaded: int | None = None
        self._arrays: list[Floats] = []

    def __len__(self) -> int:
        return len(self._order)

    def tensors(self, number: int) -> tuple[Tensor, ...]:
        plan = self._plan
        batch = [np.empty(shape, np.float32) for shape in self.shapes]
        for index, stream in enumerate(
            plan.share.records(number * plan.batch_size, plan.batch_size).tolist()
        ):
            group, row = self._order.group(self._order.record(stream))
            self._load(group)
            for target, array in zip(batch, self._arrays, strict=True):
                target[index] = array[row]
        return tuple(torch.from_numpy(array) for array in batch)

    def close(self) -> None:
        """Free the rows in memory."""
        self._arrays, self._loaded = [], None

    def _measure(self) -> tuple[list[int], list[tuple[int, ...]]]:
        """Return the number of rows of each file, and the shape of a row of each dataset."""
        rows: list[int] = []
        shapes: list[tuple[int, ...]] = []
        for path in self._files:
            found = [(name, shape) for name, shape, _ in _datasets(path, self._plan.names)]
            rows.append(_equal_rows(path, found))
            row_shapes = [shape[1:] for _, shape in found]
            shapes = shapes or row_shapes
            for name, shape, expected in zip(self._plan.names, row_shapes, shapes, strict=True):
                if shape != expected:
                    raise DataError(
                        f"{path}: rows of '{name}' have shape {shape}, expected {expected} as in "
                        f"{self._files[0]}"
                    )
        return rows, shapes

    def _load(self, group: int) -> None:
        if group == self._loaded:
            return
        path = self._files[group]
        self._arrays = [array for _, _, array in _datasets(path, self._plan.names, load=True)]
        self._loaded = group


def _datasets(
    path: Path, names: Sequence[str], *, load: bool = False
) -> list[tuple[str, tuple[int, ...], Floats]]:
    """Return the name, the shape and, with `load`, the values of each dataset."""
    if not path.is_file():
        raise DataError(f"there is no HDF5 file {path}")
    try:
        with h5py.File(path, "r") as file:
            return [(name, *_dataset(path, file, name, load=load)) for name in names]
    except HDF5_ERRORS as error:
        raise DataError(
            f"{path} cannot be read as HDF5: it is damaged, or of a different format"
        ) from error


def _dataset(
    path: Path, file: h5py.File, name: str, *, load: bool
) -> tuple[tuple[int, ...], Floats]:
    found = file.get(name)
    if isinstance(found, h5py.Group):
        inside = [f"{name}/{each}" for each in _dataset_names(found)]
        raise DataError(
            f"{path}: '{name}', the name of a top, is a group of datasets, expected a dataset; "
            f"it has: {', '.join(inside) or 'none'}"
        )
    if not isinstance(found, h5py.Dataset):
        names = ", ".join(_dataset_names(file)) or "none"
        raise DataError(f"{path} has no dataset '{name}', the name of a top; it has: {names}")
    if found.dtype.kind not in NUMBERS or not found.shape or not found.shape[0]:
        raise DataError(
            f"{path}: dataset '{name}' is {found.dtype} of shape {found.shape}, expected rows of "
            "numbers"
        )
    # Rows that a file claims but does not store read as zeros and would exhaust the memory.
    if found.nbytes > max(ALWAYS_BYTES, MOST_PACKED * found.id.get_storage_size()):
        raise DataError(
            f"{path}: dataset '{name}' claims shape {found.shape}, more than its file can hold"
        )
    values = np.asarray(found[()], np.float32) if load else np.empty(0, np.float32)
    return tuple(found.shape), values


def _dataset_names(group: h5py.Group) -> list[str]:
    """Return the names of the datasets in a group and in the groups in it."""
    names: list[str] = []
    group.visititems(
        lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None
    )
    return names


def _equal_rows(path: Path, found: Sequence[tuple[str, tuple[int, ...]]]) -> int:
    """Return the number of rows, which must be the same in all datasets of a file."""
    first, rows = found[0][0], found[0][1][0]
    for name, shape in found:
        if shape[0] != rows:
            raise DataError(
                f"{path}: '{first}' has {rows} rows and '{name}' has {shape[0]}, expected the "
                "same number"
            )
    return rows
