"""The registry knows every type once."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import poseidon.caffe.layers
from poseidon.caffe.layers.base import Layer, LayerContext, LayerError
from poseidon.caffe.layers.registry import create, known_types, layer_class, register
from poseidon.caffe.proto.caffe_pb2 import TRAIN, LayerParameter


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'ReLU' is already registered by ReLU"):
        register("ReLU")(Layer)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Convolutoin", r"unknown layer type 'Convolutoin'; did you mean 'Convolution'\?"),
        ("relu", r"did you mean 'ReLU'\?"),
        ("Qqqqqq", r"unknown layer type 'Qqqqqq'; known: .*Softmax"),
        (
            "RegionLoss",
            "unknown layer type 'RegionLoss'; it is 'RegionLoss' of Yolo's branch of Caffe",
        ),
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
