"""What is to be trained, read from definitions and scripts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from poseidon.errors import DataError, UsageError
from poseidon.observe.plan.sources import training_of_module, training_of_net

CPU = torch.device("cpu")
NET = """
layer { name: "data" type: "Data" top: "data" top: "label" data_param { source: "none" batch_size: 6 }
  transform_param { CROP } }
layer { name: "fc" type: "InnerProduct" bottom: "data" top: "y" inner_product_param { num_output: 4
  weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "y" bottom: "label" top: "loss" }
"""
SCRIPT = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from beside import INPUTS
@dataclass
class Width:
    outputs: int = 2
def example():
    return torch.nn.Linear(INPUTS, Width().outputs), (torch.zeros(7, INPUTS),)
def tensor():
    return torch.nn.Linear(3, 2), torch.zeros(7, 3)
def wrong():
    return 5
def fails():
    raise KeyError("x")
def misfit():
    return torch.nn.Linear(3, 2), (torch.zeros(7, 4),)
def outside():
    return torch.nn.Embedding(3, 2), torch.tensor([5])
def untrained():
    return torch.nn.Tanh(), (torch.zeros(2, 2),)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("INPUTS = 3")
    return path


def test_a_solvers_net_is_planned_without_its_data(tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text(NET.replace("CROP", "crop_size: 5"))
    solver = tmp_path / "solver.prototxt"
    solver.write_text(
        f'net: "{tmp_path / "net.prototxt"}"\nbase_lr: 0.1\nlr_policy: "fixed"\nmax_iter: 1\n'
    )
    training = training_of_net(solver, compute_s=None, device=CPU, is_solver=True)
    assert [(layer.name, layer.tensors[0]) for layer in training.layers] == [("fc", (4, 75))]
    assert training.batch == 6
    assert training.compute_s > 0
    assert [note.split()[0] for note in training.notes] == ["data", "the"]


def test_a_net_whose_shapes_need_its_data_is_refused(tmp_path: Path) -> None:
    net = tmp_path / "net.prototxt"
    net.write_text(NET.replace("CROP", ""))
    with pytest.raises(DataError, match=r"none.*; without data .* or from a deploy net \(--net\)"):
        training_of_net(net, compute_s=1.0, device=CPU, is_solver=False)


@pytest.mark.parametrize("name", ["example", "tensor"])
def test_a_function_returns_a_module_and_an_example(name: str, script: Path) -> None:
    training = training_of_module(f"{script}:{name}", compute_s=None, device=CPU)
    (layer,) = training.layers
    assert (layer.tensors, layer.fully_connected, layer.rows) == (((2, 3), (2,)), True, 7)
    assert training.batch == 7
    assert training.compute_s > 0


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing", "has no function 'missing'"),
        ("wrong", "expected a module and an example batch, found int"),
        ("fails", "it fails with KeyError"),
        ("misfit", "does not run on its example"),
        ("outside", "does not run on its example: IndexError: index out of range"),
        ("untrained", "has no trained layer"),
        ("1", r"expected FILE.py:FUNCTION"),
    ],
)
def test_other_functions_are_one_sentence(name: str, problem: str, script: Path) -> None:
    with pytest.raises(UsageError, match=problem):
        training_of_module(f"{script}:{name}", compute_s=1.0, device=CPU)


def test_a_script_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="with a file that exists"):
        training_of_module(f"{tmp_path / 'none.py'}:f", compute_s=1.0, device=CPU)
