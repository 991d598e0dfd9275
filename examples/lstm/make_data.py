"""Write data/train.h5 and data/test.h5 and their lists: `python examples/lstm/make_data.py
[FOLDER]`.

A row is one timestep of 16 streams. At each step a stream has a number in -1..1 and a mark, 0 or 1;
the target is the number at the last mark, 0 before the first: what an LSTM has to keep. `cont` is 0
where a sequence of 20 begins.
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

STEPS, STREAMS = 20, 16
SEQUENCES = {"train": 100, "test": 20}
MARKED = 0.2  # of the steps


def sequences(count: int, seed: int) -> dict[str, np.ndarray]:
    """Return `count` sequences of all streams, one after the other."""
    random = np.random.default_rng(seed)
    shape = (count, STEPS, STREAMS)
    numbers = random.uniform(-1, 1, shape)
    marks = random.random(shape) < MARKED
    target = np.zeros(shape)
    last = np.zeros((count, STREAMS))
    for step in range(STEPS):
        last = np.where(marks[:, step], numbers[:, step], last)
        target[:, step] = last
    cont = np.ones(shape)
    cont[:, 0] = 0
    rows = {
        "data": np.stack([numbers, marks], axis=-1),
        "cont": cont,
        "target": target[..., np.newaxis],
    }
    return {
        name: value.reshape(-1, *value.shape[2:]).astype(np.float32) for name, value in rows.items()
    }


def make(folder: Path) -> None:
    """Write both files and the lists that name them."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (part, count) in enumerate(SEQUENCES.items()):
        with h5py.File(folder / f"{part}.h5", "w") as file:
            for name, value in sequences(count, seed).items():
                file.create_dataset(name, data=value)
        (folder / f"{part}.txt").write_text(f"{part}.h5\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "data")
    folder = parser.parse_args().folder
    try:
        make(folder)
    except OSError as error:
        sys.exit(f"make_data.py: cannot write to {folder}: {os.strerror(error.errno or 0)}")
