"""Caffe2's tutorial, as its document prints it, and this project's notebook."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import poseidon
from tests.support.caffe2_tutorial import play, prepare
from tests.support.needs import SHARED

SEED = "001_545bf89928c6f901.txt"
CHANGES = (
    (r"test_data_count / total_batch_size", "test_data_count // total_batch_size"),
    (r"import requests, zipfile, StringIO", "import io, requests, zipfile"),
    (r"StringIO\.StringIO", "io.BytesIO"),
    (r"np\.asscalar\((.*)\)\)$", r"(\1).item())"),  # numpy has removed it
)
"""What Python 2 and its numpy had."""
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
    """Return the cells of the document's solutions, changed to Python 3 and small sizes."""
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
def test_the_solutions_of_the_tutorial_run_in_order(
    home: Path, unbound: None, capsys: pytest.CaptureFixture[str]
) -> None:
    poseidon.bind()
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
    assert re.fullmatch(
        r"Finished iteration 1/1 \(epoch 2/2\) \([0-9.]+ images/sec\)", finished[-1]
    )
    scores = [line for line in lines if line.startswith("Train accuracy")]
    assert len(scores) == 2
    assert all(
        re.fullmatch(r"Train accuracy: [01]\.\d{3}, test accuracy: [01]\.\d{3}", line)
        for line in scores
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


NOTEBOOK = Path("examples") / "resnet50" / "Multi-GPU_Training.ipynb"
SMALL = {
    "train_data_count": 4,
    "test_data_count": 4,
    "image_scale": 66,
    "image_size": 64,
    "batch_per_device": 2,
    "num_epochs": 1,
}


def notebook(path: Path, home: Path) -> list[tuple[str, str]]:
    """Return the code of a notebook; small sizes follow the cell that is tagged `parameters`."""
    cells = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        cells.append((cell["id"], "".join(cell["source"])))
        if "parameters" in cell["metadata"].get("tags", ()):
            sizes = {**SMALL, "data_folder": str(home / "data")}
            cells.append(
                ("sizes", "\n".join(f"{name} = {value!r}" for name, value in sizes.items()))
            )
    return cells


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
def test_the_notebook_trains_and_shows_predictions(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prepare(monkeypatch, tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    cells = notebook(repository / NOTEBOOK, tmp_path)
    assert "sizes" in dict(cells)
    made = play(cells)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("Made ")] == [
        f"Made {tmp_path}/data/two_class_4",
        f"Made {tmp_path}/data/two_class_4_val_4",
    ]
    assert re.fullmatch(r"Finished iteration 1/1 \([0-9.]+ images/sec\), loss [0-9.]+", lines[2])
    assert re.fullmatch(r"Finished iteration 1/1 \(epoch 1/1\) \([0-9.]+ images/sec\)", lines[3])
    assert re.fullmatch(r"Train accuracy: [01]\.\d{3}, test accuracy: [01]\.\d{3}", lines[4])
    import matplotlib.pyplot as plt

    titles = [ax.get_title() for ax in plt.gcf().axes]
    plt.close("all")
    assert len(titles) == 16
    assert all(re.fullmatch(r"(car|boat) \([0-9.]+%\)", title) for title in titles[:2])
    params = [str(param) for param in made["train_model"].GetParams("gpu_0")]
    for param in params:
        other = made["workspace"].FetchBlob(param.replace("gpu_0/", "gpu_1/"))
        np.testing.assert_array_equal(made["workspace"].FetchBlob(param), other)


def test_the_notebook_is_one(repository: Path) -> None:
    """What Jupyter demands of the file, and that it has no outputs of a run."""
    document = json.loads((repository / NOTEBOOK).read_text(encoding="utf-8"))
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in document["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in document["cells"]:
        assert cell["cell_type"] in ("code", "markdown")
        assert isinstance(cell["metadata"], dict)
        assert cell.get("outputs", []) == []
