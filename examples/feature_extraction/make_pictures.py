"""Write test images of the CIFAR-10 example as files: `python
examples/feature_extraction/make_pictures.py [FOLDER]`.

They are called <class>_<number>.png and lie in examples/images, if no other folder is given. The
databases come from examples/cifar10/create_cifar10.sh. A record of CIFAR-10 is red first, and Caffe
reads a picture blue first; so red and blue are exchanged in the files, and the net sees what it was
trained on.
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

import cv2

from poseidon.caffe.data.cursor import open_cursor, records
from poseidon.caffe.data.databases import require
from poseidon.caffe.data.datum import decode
from poseidon.errors import PoseidonError

COUNT = 200


def make(database: Path, folder: Path) -> int:
    """Write the first images of a database; return how many.

    Raises:
        DataError: there is no such database.
    """
    cursor = open_cursor(database, require(database))
    folder.mkdir(parents=True, exist_ok=True)
    written = 0
    for written, (_, value) in enumerate(islice(records(cursor), COUNT), 1):
        picture, label = decode(value)
        cv2.imwrite(str(folder / f"{label}_{written:03}.png"), picture.transpose(1, 2, 0))
    cursor.close()
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "examples" / "images")
    folder = parser.parse_args().folder
    try:
        print(
            f"{make(ROOT / 'examples' / 'cifar10' / 'cifar10_test_lmdb', folder)} pictures in "
            f"{folder}"
        )
    except PoseidonError as error:
        sys.exit(f"make_pictures.py: {error}")
    except OSError as error:
        sys.exit(f"make_pictures.py: {error.filename}: {error.strerror}")
