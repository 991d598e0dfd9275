"""Caffe2's tutorial, as its document prints it, and this project's notebook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.caffe2_tutorial import play, prepare
from tests.support.needs import SHARED

SEED = "001_545bf89928c6f901.txt"
CHANGES = (
    (r"from caffe2\.python", "from poseidon.caffe2"),
    (r"from caffe2\.proto", "from poseidon.caffe2.proto"),
    (r"test_data_count / total_batch_size", "test_data_count // total_batch_size"),
    (r"import requests, zipfile, StringIO", "import io, requests, zipfile"),
    (r"StringIO\.StringIO", "io.BytesIO"),
    (r"np\.asscalar\((.*)\)\)$", r"(\1).item())"),  # numpy has removed it
)
"""The import root, and what Python 2 and its numpy had."""
SIZES = (
    (r"train_data_count = 1280", "train_data_count = 4"),
    (r"test_data_count = 96", "test_data_count = 4"),
    (r"batch_per_device = 32", "batch_per_device = 2"),
    (r"scale=256", "scale=36"),
    (r"crop=224", "crop=32"),
    (r"n = 16$", "n = 2"),
)
"""Sizes for a processor without a GPU."""


def solutions() -> list[tuple[str, str]]:
    """Return the cells of the document's solutions, changed to this project, Python 3 and small sizes."""
    text = (SHARED / "seeds" / SEED).read_text(encoding="utf-8")
    text = text[text.index("# SOLUTION for Part 1\n") :].partition("\nTO DO:")[0]
    cells = []
    for cell in re.split(r"^In\s\[\s\]:\s*$", text, flags=re.MULTILINE):
        for old, new in (*CHANGES, *SIZES):
            cell = re.sub(old, new, cell, flags=re.MULTILINE)
        cells.append((cell.strip().splitlines()[0].lstrip("# "), cell))
    return cells


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with the tutorial's two databases, of drawn cars and boats."""
    from poseidon.caffe2.images.pictures import make_two_class

    folder = tmp_path / "caffe2_notebooks" / "tutorial_data" / "resnet_trainer"
    folder.mkdir(parents=True)
    for name, count, first in (("train", 4, 0), ("val", 4, 4)):
        path = folder / f"imagenet_cars_boats_{name}"
        make_two_class(path, "lmdb", "caffe2", count, seed=0, first=first)
    prepare(monkeypatch, tmp_path)
    return tmp_path


@pytest.mark.needs("data")
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
def test_the_solutions_of_the_tutorial_run_in_order(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = solutions()
    assert [name for name, _ in cells if name.startswith("SOLUTION")] == [
        *(f"SOLUTION for Part {part}" for part in range(1, 9)),
        "SOLUTION for Part 8 Part Deux",
        "SOLUTION for Part 9 Prep",
        "SOLUTION for Part 9",
        "SOLUTION for Part 10",
        "SOLUTION for Part 10 - display reporting setup",
        "SOLUTION for Part 11",
    ]
    made: dict[str, Any] = play(cells)
    lines = capsys.readouterr().out.splitlines()
    finished = [line for line in lines if line.startswith("Finished iteration")]
    assert len(finished) == 2 + 2
    assert re.fullmatch(r"Finished iteration 1/1 \(epoch 2/2\) \([0-9.]+ images/sec\)", finished[-1])
    scores = [line for line in lines if line.startswith("Train accuracy")]
    assert len(scores) == 2
    assert all(
        re.fullmatch(r"Train accuracy: [01]\.\d{3}, test accuracy: [01]\.\d{3}", line) for line in scores
    )
    assert made["train_model"]._devices == [0, 1]
    assert 0 <= made["test_accuracy"] <= 1
    import matplotlib.pyplot as plt

    assert len(plt.get_fignums()) == 2
    grid = plt.figure(plt.get_fignums()[-1])
    titles = [ax.get_title() for ax in grid.axes if ax.get_title()]
    assert len(titles) == 2
    assert all(re.fullmatch(r"(RIGHT|WRONG) \([0-9.]+%\)", title) for title in titles)
    plt.close("all")
    image = made["workspace"].FetchBlob("gpu_0/data")
    assert image.shape == (2, 3, 32, 32)
    assert np.abs(image).max() <= 1
