"""A small SSD trains on drawn shapes, in jobs of one and of two workers, to a mean average
precision.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from poseidon.caffe.data.prepare.procedural import write_detection_set
from poseidon.cli.main import main
from prototxt.ssd.detector import Detector
from prototxt.ssd.generate import SHAPES, chain
from tests.support.training_processes import machinefile, poseidon_here

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

# Two thirds of the side and no random windows, so that few iterations are enough to see it learn.
TINY = replace(
    SHAPES,
    side=64,
    heads=chain((("conv3/relu", 15, 23, (2.0,), 8), ("conv4/relu", 23, 37, (2.0,), 16))),
    samples=False,
    tests=4,
)


def make(folder: Path, detector: Detector, images: dict[str, int]) -> None:
    """Write the data and the definitions."""
    for number, (part, count) in enumerate(images.items()):
        side = detector.side
        source = write_detection_set(
            folder / part, count, first=100_000 * number, size=(side, side)
        )
        labels = f"--label_map_file={folder}/{part}/labelmap.prototxt"
        words = ["convert_annoset", "--anno_type=detection", "--encoded", labels]
        assert main([*words, f"{folder / part}/", str(source), f"{folder}/{part}_lmdb"]) == 0
    for name, text in detector.definitions().items():
        (folder / name).write_text(text)


def precisions(folder: Path, workers: int) -> list[float]:
    """What the tests of a job log."""
    hosts = machinefile(folder, workers, 1)
    done = poseidon_here(
        folder, "train", "--solver=shapes_ssd_solver.prototxt", f"--hostfile={hosts}"
    )
    assert done.returncode == 0, done.stderr
    return [
        float(x)
        for x in re.findall(r"output #0: detection_eval = (\S+)", done.stdout + done.stderr)
    ]


DATA = ("train_lmdb", "test_lmdb", "test/labelmap.prototxt")


def test_a_detector_learns_with_two_workers(tmp_path: Path) -> None:
    settings = {"max_iter": 50, "test_interval": 50, "test_initialization": "true", "base_lr": 0.01}
    solver = tuple((key, settings.get(key, value)) for key, value in TINY.solver)
    detector = replace(TINY, data=DATA, batch=(8, 8), solver=(*solver, ("random_seed", 3)))
    make(tmp_path, detector, {"train": 96, "test": 32})
    first, last = precisions(tmp_path, 2)
    assert first < 0.1
    assert last > 0.35


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [1, 2])
def test_shapes_ssd_reaches_its_precision(tmp_path: Path, workers: int) -> None:
    """The zoo's net as it is; two workers have half the batch each, so that both jobs see the
    same images.
    """
    batch = (SHAPES.batch[0] // workers, SHAPES.batch[1])
    solver = (*SHAPES.solver, ("random_seed", 3), ("show_per_class_result", "true"))
    make(
        tmp_path,
        replace(SHAPES, data=DATA, batch=batch, solver=solver),
        {"train": 320, "test": 128},
    )
    found = precisions(tmp_path, workers)
    print(found)
    assert len(found) == 3
    assert found[-1] > 0.8
