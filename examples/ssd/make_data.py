"""Write databases of drawn shapes with their boxes: `python examples/ssd/make_data.py [FOLDER]`.

Creates `train_lmdb`, `test_lmdb` and `labelmap.prototxt`, and the images and annotations that they
are made of, in the format of PASCAL VOC: the same steps make a database of your own images.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# a checkout works without being installed
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from poseidon.cli.entry import use_environment

use_environment()

from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.prepare.annoset import AnnotationFormat, Annotations, convert_annoset
from poseidon.caffe.data.prepare.imageset import Conversion
from poseidon.caffe.data.prepare.procedural import write_detection_set
from poseidon.errors import PoseidonError

# The number of images of each part, and the number of its first scene.
PARTS = {"train": (320, 0), "test": (128, 100_000)}


def make(folder: Path) -> None:
    """Write the images and annotations of each part, and its database."""
    for part, (count, first) in PARTS.items():
        source = write_detection_set(folder / part, count, first=first)
        labels = folder / "labelmap.prototxt"
        labels.write_text((folder / part / "labelmap.prototxt").read_text())
        form = Annotations(form=AnnotationFormat.XML, label_map=labels)
        database = folder / f"{part}_lmdb"
        convert_annoset(
            f"{folder / part}/", source, database, Backend.LMDB, Conversion(encoded=True), form
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "data")
    try:
        make(parser.parse_args().folder)
    except PoseidonError as error:
        sys.exit(f"make_data.py: {error}")
    except OSError as error:
        sys.exit(f"make_data.py: {error.filename}: {error.strerror}")
