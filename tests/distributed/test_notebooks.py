"""`poseidon.launch` in a real kernel: the example, the code of the page, a worker's error, and the
stop button. From a script: a worker that is lost.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.training_processes import environment

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
NOTEBOOK = Path(__file__).parents[2] / "examples/notebook/train.ipynb"
PAGE = Path(__file__).parents[2] / "docs/notebooks.md"
SHARES = "from tests.support import shared_templates; shared_templates.share_templates()"
"""The four jobs import torch once. The template is the kernel's one child that stays."""
FAILS = """
def fails():
    import poseidon
    if poseidon.this_worker().rank == 1:
        raise ValueError("bad luck")
    while True:
        pass

poseidon.launch(fails)
"""
IS_STOPPED = """
def endless():
    import torch
    model = torch.nn.Linear(2, 2)
    with poseidon.distribute(model, poseidon.SGD(lr=0.1)) as group:
        while True:
            model(torch.ones(1, 2)).sum().backward()
            group.step()
            if group.steps == 3 and group.rank == 0:
                import os, signal
                os.kill(kernel, signal.SIGINT)

kernel = os.getpid()
try:
    poseidon.launch(endless)
except KeyboardInterrupt:
    print("interrupted; children:", len(psutil.Process().children(recursive=True)))
"""


def text_of(cell: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_a_notebook_trains_fails_and_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    first.source = f"{SHARES}\n{first.source}"
    trained = len(notebook.cells)
    page = PAGE.read_text(encoding="utf-8").split("```python\n")[1].partition("```")[0]
    for source in (FAILS, page, "import os, poseidon, psutil" + IS_STOPPED):
        notebook.cells.append(nbformat.v4.new_code_cell(source))
    client = NotebookClient(
        notebook, timeout=150, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    shown = [text_of(cell) for cell in notebook.cells if cell.cell_type == "code"]
    assert "epoch 0: loss" in shown[1]
    assert "epoch 4: loss" in shown[1]
    assert "of 2 workers" in shown[1]
    assert (tmp_path / "circle.pt").is_file()
    (error,) = [o for o in notebook.cells[trained].outputs if o.output_type == "error"]
    assert re.search(r"worker 1: Cell In\[\d+\], line 4: ValueError: bad luck \(", error.evalue)
    assert 'raise ValueError("bad luck")' in error.evalue
    assert error.evalue.count("Traceback") == 1
    assert "epoch 2: loss" in shown[-2]
    assert "interrupted; children: 1" in shown[-1]
