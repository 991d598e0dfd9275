"""Write data/train*.h5 and data/test.h5 and their lists: `python
examples/hdf5_classification/make_data.py [FOLDER]`.

10,000 rows of four numbers and a class, 0 or 1. Two numbers say the class, by a circle: inside one,
outside the other, so that no straight line parts them; the others are a mixture of the two, and
noise. The last quarter is for testing.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# a checkout works without being installed
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from poseidon.cli.entry import use_environment

use_environment()

import h5py
import numpy as np

ROWS = 10_000
TEST_ROWS = 2_500
MISTAKEN = 0.02  # of the classes, at random


def rows(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of four numbers, and their classes."""
    random = np.random.default_rng(seed)
    plane = random.standard_normal((count, 2))
    inside = (plane**2).sum(axis=1) < np.where(plane[:, 0] > 0, 4, 0.25)
    classes = np.where(random.random(count) < MISTAKEN, ~inside, inside)
    mixture = plane @ np.array([0.6, -0.8]) + 0.1 * random.standard_normal(count)
    data = np.column_stack([plane, mixture, random.standard_normal(count)])
    return data.astype(np.float32), classes.astype(np.float32)


def make(folder: Path) -> None:
    """Write two files to train on, one to test on, and the lists that name them."""
    folder.mkdir(parents=True, exist_ok=True)
    data, classes = rows(ROWS)
    train = ROWS - TEST_ROWS
    parts = {
        "train1": slice(0, train // 2),
        "train2": slice(train // 2, train),
        "test": slice(train, ROWS),
    }
    for name, part in parts.items():
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file.create_dataset("data", data=data[part], compression="gzip")
            file.create_dataset("label", data=classes[part])
    (folder / "train.txt").write_text("train1.h5\ntrain2.h5\n")
    (folder / "test.txt").write_text("test.h5\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "data")
    folder = parser.parse_args().folder
    try:
        make(folder)
    except OSError as error:
        sys.exit(f"make_data.py: cannot write to {folder}: {os.strerror(error.errno or 0)}")
