#!/usr/bin/env python3
"""Train GoogLeNet on drawn pictures, to try a cluster before ImageNet is on it:

    python examples/googlenet/train_googlenet.py [--cpu] [flags of `poseidon train`]

The parameters are those at the head of run_local.py, two GPUs on each of two clients. With --cpu
each client has two workers on its CPU. The pictures, and a net with small batches that reads them,
go to examples/googlenet/data; further flags follow, such as --max_iter=100.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

from poseidon.caffe.data.cursor import open_writer
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import encode_datum
from poseidon.caffe.data.prepare.procedural import draw_images
from poseidon.caffe.proto.definition import read_net, read_solver
from poseidon.caffe.proto.text import to_text
from poseidon.errors import PoseidonError

HERE = Path(__file__).resolve().parent
PICTURES, BATCH, ENLARGED = 64, 2, 8
"""Pictures of each part; of a worker's batch; pixels of GoogLeNet's 256 for each that is drawn."""
FEW = {"max_iter": 20, "display": 5, "test_interval": 10, "test_iter": 2, "snapshot": 0}
"""Fields of the solver, for an end within minutes also on a CPU."""


def draw(path: Path, seed: int) -> None:
    """Make a database of drawn pictures, unless it is there."""
    if path.exists():
        return
    drawn = draw_images(PICTURES, seed=seed)
    writer = open_writer(path, Backend.LMDB)
    for index, (image, label) in enumerate(zip(drawn.images, drawn.labels, strict=True)):
        large = image[::-1].repeat(ENLARGED, 1).repeat(ENLARGED, 2)  # to Caffe's B, G, R
        writer.put(b"%05d" % index, encode_datum(large, int(label)))
    writer.close()


def derive(solver: Path, folder: Path) -> Path:
    """Write the pictures, the net and the solver to a folder; return the solver's path."""
    folder.mkdir(parents=True, exist_ok=True)
    definition = read_solver(solver)
    net = read_net(definition.resolve(definition.param.net)).param
    for layer, part in zip(net.layer[:2], ("train", "test"), strict=True):
        draw(folder / f"{part}_lmdb", seed=len(part))
        layer.data_param.source = str(folder / f"{part}_lmdb")
        layer.data_param.batch_size = BATCH
    (folder / "train_val.prototxt").write_text(to_text(net), encoding="utf-8")
    param = definition.param
    param.net = str(folder / "train_val.prototxt")
    param.ClearField("test_iter")
    for name, value in FEW.items():
        found = getattr(param, name)
        found.append(value) if name == "test_iter" else setattr(param, name, value)
    path = folder / "solver.prototxt"
    path.write_text(to_text(param), encoding="utf-8")
    return path


def main(words: list[str], folder: Path = HERE / "data") -> int:
    """Prepare, and train; returns the exit code."""
    edited = runpy.run_path(str(HERE / "run_local.py"))
    own = edited["main"].__globals__
    if "--cpu" in words:
        words = [word for word in words if word != "--cpu"]
        own["device"] = []
    try:
        own["solver"] = derive(ROOT / own["solver"], folder)
    except PoseidonError as error:
        print(f"train_googlenet.py: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"train_googlenet.py: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    code: int = edited["main"](words)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
