"""Find for each image the one with the nearest features: `python
examples/feature_extraction/nearest.py [FEATURES] [LIST]`.

FEATURES is what was given as DATABASES to scripts/extract_features.sh, LIST the list of pictures;
by default examples/_temp/features and file_list.txt there. A picture called <class>_<anything>
counts as found rightly if the nearest one is of its class.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

import numpy as np

from poseidon.caffe.data.cursor import open_cursor, records
from poseidon.caffe.data.databases import require
from poseidon.caffe.proto.caffe_pb2 import Datum
from poseidon.errors import DataError, PoseidonError, UsageError

SHOWN = 10


def read_features(prefix: Path) -> dict[int, np.ndarray]:
    """Return the features of all clients and threads, by label: the number behind the image's
    name in the list.
    """
    features: dict[int, np.ndarray] = {}
    for database in sorted(prefix.parent.glob(f"{prefix.name}_*_*")):
        try:
            cursor = open_cursor(database, require(database))
        except DataError as error:
            if "is empty" in str(error):
                # workers take whole batches in turn: with few images the last workers get none
                continue
            raise
        for _, value in records(cursor):
            datum = Datum.FromString(bytes(value))
            features[datum.label] = np.array(datum.float_data, np.float32)
        cursor.close()
    if not features:
        raise UsageError(
            f"there are no features {prefix}_<client>_<thread>: run scripts/extract_features.sh "
            "first"
        )
    return features


def main(prefix: Path, listing: Path) -> None:
    """Print the first pairs, and how many images are nearest to one of their class."""
    features = read_features(prefix)
    pairs = (line.rsplit(maxsplit=1) for line in listing.read_text(encoding="utf-8").splitlines())
    names = {int(number): Path(name).name for name, number in pairs}
    labels = sorted(features)
    rows = np.stack([features[label] for label in labels])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True) + 1e-12
    likeness = rows @ rows.T
    np.fill_diagonal(likeness, -np.inf)
    nearest = [labels[index] for index in likeness.argmax(axis=1)]
    for label, other in list(zip(labels, nearest, strict=True))[:SHOWN]:
        print(f"{names[label]:24} {names[other]}")
    classes = {label: name.partition("_")[0] for label, name in names.items()}
    found = sum(
        classes[label] == classes[other] for label, other in zip(labels, nearest, strict=True)
    )
    print(
        f"{len(labels)} pictures with {rows.shape[1]} features each; {found} are nearest to one "
        "of their class"
    )


if __name__ == "__main__":
    temp = ROOT / "examples" / "_temp"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("features", nargs="?", type=Path, default=temp / "features")
    parser.add_argument("list", nargs="?", type=Path, default=temp / "file_list.txt")
    files = parser.parse_args()
    try:
        main(files.features, files.list)
    except PoseidonError as error:
        sys.exit(f"nearest.py: {error}")
    except OSError as error:
        sys.exit(f"nearest.py: {error.filename}: {error.strerror}")
