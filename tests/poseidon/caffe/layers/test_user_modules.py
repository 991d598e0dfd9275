"""A sentence about what fails in a module of `--import`; `tests/distributed/test_own_layers.py`
has the jobs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from poseidon.caffe.layers.user_modules import location_in
from poseidon.errors import described

SOURCE = """
import torch

def forward(x):
    return torch.relu(x).view(7)

def read(path):
    return open(path)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of the user."""
    name = "own_layer_of_a_test"
    (tmp_path / f"{name}.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


@pytest.mark.parametrize(
    ("call", "kind", "expected"),
    [
        (lambda module: module.forward(torch.ones(2)), RuntimeError, ":5: RuntimeError: shape "
"'[7]' is invalid for input of size 2"),
        (lambda module: module.forward(2), TypeError, ":5: TypeError: relu(): argument 'input' "
"(position 1) must be Tensor, not int"),
        (lambda module: module.read("/none"), FileNotFoundError, ":8: FileNotFoundError: [Errno "
"2] No such file or directory: '/none'"),
    ],
)  # fmt: skip
def test_the_last_line_of_the_module_is_named(
    own: str, call: Callable[[Any], object], kind: type[Exception], expected: str
) -> None:
    module = importlib.import_module(own)
    with pytest.raises(kind) as caught:
        call(module)
    location = location_in(["os", own], caught.value)
    assert f"{location}: {described(caught.value)}" == f"{module.__file__}{expected}"
    assert location_in(["os", "not_there"], caught.value) == ""
