"""The registry knows every type once."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import poseidon.caffe.layers
from poseidon.caffe.layers.base import Layer, LayerContext, LayerError
from poseidon.caffe.layers.registry import create, known_types, layer_class, location_in, register
from poseidon.caffe.proto.caffe_pb2 import TRAIN, LayerParameter
from poseidon.errors import described


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'ReLU' is already registered by ReLU"):
        register("ReLU")(Layer)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Convolutoin", r"unknown layer type 'Convolutoin'; did you mean 'Convolution'\?"),
        ("relu", r"did you mean 'ReLU'\?"),
        (
            "Qqqqqq",
            r"unknown layer type 'Qqqqqq'; for a type of your own see --import; known: .*Softmax",
        ),
        ("RegionLoss", "unknown layer type 'RegionLoss'"),
        ("", "has no type"),
    ],
)
def test_unknown(name: str, message: str) -> None:
    with pytest.raises(LayerError, match=message):
        layer_class(name)


@pytest.mark.parametrize("name", sorted(known_types()))
def test_every_type_documents_itself_and_checks_its_counts(name: str) -> None:
    kind = layer_class(name)
    assert kind.__doc__ and kind.setup is not Layer.setup
    if kind.BOTTOMS[0] == kind.TOPS[0] == 0 and kind.BOTTOMS[1] is None:
        return  # takes any number
    with pytest.raises(LayerError, match="expected"):
        create(
            LayerParameter(type=name, bottom=["b"] * (0 if kind.BOTTOMS[0] else 1)),
            LayerContext(phase=TRAIN, seed=0),
        )


def test_the_package_imports_every_module_with_a_type() -> None:
    folder = Path(poseidon.caffe.layers.__path__[0])
    imports = ast.walk(ast.parse((folder / "__init__.py").read_text()))
    imported = {
        f"{node.module}.{name.name}"
        for node in imports
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    for path in folder.rglob("*.py"):
        if re.search(r"^@(register|replaces_python)\(", path.read_text(), re.MULTILINE):
            module = path.relative_to(folder).with_suffix("").parts
            assert ".".join(("poseidon.caffe.layers", *module)) in imported


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
