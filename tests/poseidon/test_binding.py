"""`import caffe` and `from caffe2.python import ...` give the modules of Poseidon."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

import poseidon
from poseidon.binding import ABSENT, STARTUP
from poseidon.errors import UsageError

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("unbound")


def modules(folder: str, bound: str) -> list[tuple[str, Path]]:
    """Return the modules of a package, by the name that scripts import, with their files."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT / folder).with_suffix("").parts
        found.append((".".join([bound, *parts]).removesuffix(".__init__"), path))
    return found


@pytest.mark.parametrize(
    ("bound", "real"),
    [
        ("caffe", "poseidon.pycaffe"),
        ("caffe.io", "poseidon.pycaffe.io"),
        ("caffe.pycaffe", "poseidon.pycaffe.pycaffe"),
        ("caffe.detector", "poseidon.pycaffe.classifier"),
        ("caffe._caffe", "poseidon.pycaffe._caffe"),
        ("caffe.net_spec", "poseidon.pycaffe.net_spec"),
        ("caffe.proto.caffe_pb2", "poseidon.caffe.proto.caffe_pb2"),
        ("caffe_pb2", "poseidon.caffe.proto.caffe_pb2"),
        ("caffe2.python", "poseidon.caffe2"),
        ("caffe2.python.core", "poseidon.caffe2.core"),
        ("caffe2.python.models.resnet", "poseidon.caffe2.models.resnet"),
        ("caffe2.python.onnx.backend", "poseidon.caffe2.onnx.backend"),
        ("caffe2.python._import_c_extension", "poseidon.caffe2.workspace.c"),
        ("caffe2.python.layers.functional", "poseidon.caffe2.layers.dense"),
        ("caffe2.python.helpers.arg_scope", "poseidon.caffe2.brew"),
        ("caffe2.python.helpers.dropout", "poseidon.caffe2.helpers.layers"),
        ("caffe2.python.helpers.tools", "poseidon.caffe2.helpers.train"),
        ("caffe2.python.caffe2_pb2", "poseidon.caffe2.proto.caffe2_pb2"),
        ("caffe2.proto", "poseidon.caffe2.proto"),
        ("caffe2.proto.caffe2_pb2", "poseidon.caffe2.proto.caffe2_pb2"),
    ],
)
@pytest.mark.parametrize("first", ["bound", "real"])
def test_a_module_is_the_same_under_both_names(bound: str, real: str, first: str) -> None:
    poseidon.bind()
    names = (bound, real) if first == "bound" else (real, bound)
    one, other = map(importlib.import_module, names)
    assert one is other
    assert one.__spec__ is not None and one.__spec__.name == one.__name__
    assert one.__name__.startswith("poseidon.")


def test_every_module_has_its_other_name() -> None:
    poseidon.bind()
    expected = [*modules("poseidon/pycaffe", "caffe"), *modules("poseidon/caffe2", "caffe2.python")]
    assert len(expected) > 150
    for name, path in expected:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None, name
        assert Path(spec.origin) == path or name == "caffe.proto.caffe_pb2"


def test_attributes_of_the_modules_are_the_same() -> None:
    poseidon.bind()
    names: dict[str, object] = {}
    exec(
        "import caffe\nfrom caffe import layers as L, params as P\nfrom caffe.proto import "
        "caffe_pb2\n"
        "from caffe2.python import core, workspace\nimport caffe2.python.scope as scope\nimport "
        "caffe2.proto\n",
        names,
    )
    from poseidon import caffe2, pycaffe
    from poseidon.caffe2 import core, scope

    assert names["caffe"] is pycaffe and names["L"] is pycaffe.layers
    assert names["core"] is core and names["scope"] is scope
    assert sys.modules["caffe2"].python is caffe2
    assert isinstance(names["caffe_pb2"].NetParameter(), pycaffe.proto.caffe_pb2.NetParameter)  # type: ignore[attr-defined]


def test_another_caffe_on_the_path_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts insert the folder of their own Caffe before they import it."""
    for name in ("caffe", "caffe2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong one')")
    poseidon.bind()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("caffe").__name__ == "poseidon.pycaffe"
    assert importlib.import_module("caffe2.python").__name__ == "poseidon.caffe2"


@pytest.mark.parametrize(
    "name",
    ["caffe.no_such", "caffe.io.no_such", "caffe2.no_such", "caffe2.python.no_such", "caffe22"],
)
def test_a_module_that_does_not_exist_is_not_found(name: str) -> None:
    poseidon.bind()
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{name}'"):
        importlib.import_module(name)


def test_an_absent_module_of_caffe2_says_what_to_use_and_is_listed() -> None:
    poseidon.bind()
    page = (ROOT / "docs" / "caffe2.md").read_text(encoding="utf-8")
    for name, instead in ABSENT.items():
        with pytest.raises(ModuleNotFoundError, match=f"Poseidon has no {name} ") as caught:
            importlib.import_module(name)
        assert str(caught.value).endswith(instead) and caught.value.name == name
        assert f"`{name.removeprefix('caffe2.python.')}`" in page
    with pytest.raises(ModuleNotFoundError, match=r"Poseidon has no caffe2\.python\.trt "):
        importlib.import_module("caffe2.python.trt.transform")
    with pytest.raises(ModuleNotFoundError, match=r"no caffe2\.python\.regularizer .*weight_decay"):
        exec("from caffe2.python import core, regularizer")


def test_a_package_of_caffe2_that_has_its_place_elsewhere_comes_from_its_parent() -> None:
    poseidon.bind()
    names: dict[str, ModuleType] = {}
    exec(
        "from caffe2.python import caffe2_pb2, onnx\nimport caffe2.python.onnx.backend as backend",
        names,
    )
    assert names["caffe2_pb2"].__name__ == "poseidon.caffe2.proto.caffe2_pb2"
    assert names["onnx"].__name__ == "poseidon.caffe2.onnx"
    assert names["backend"].__name__ == "poseidon.caffe2.onnx.backend"


@pytest.mark.parametrize("name", ["caffe", "caffe2", "caffe_pb2"])
def test_another_caffe_that_was_imported_before_is_one_sentence(name: str) -> None:
    other = ModuleType(name)
    other.__file__ = "/opt/caffe/python/caffe/__init__.py"
    sys.modules[name] = other
    before = list(sys.meta_path)
    with pytest.raises(
        UsageError, match=f"'{name}' has been imported from /opt/caffe/python/.*; call poseidon"
    ):
        poseidon.bind()
    assert sys.meta_path == before and sys.modules[name] is other


def test_a_second_call_changes_nothing() -> None:
    poseidon.bind()
    before = (list(sys.meta_path), os.environ["PYTHONPATH"])
    importlib.import_module("caffe")
    poseidon.bind()
    assert (list(sys.meta_path), os.environ["PYTHONPATH"]) == before
    assert before[1].split(os.pathsep)[:2] == [str(STARTUP), str(ROOT)]


@pytest.mark.parametrize(
    ("name", "attribute"),
    [
        ("caffe.proto.caffe_pb2", "NetParameter"),
        ("caffe2.python.core", "BlobReference"),
        ("caffe.io", "Transformer"),
    ],
)
def test_pickles_of_caffe_are_read(name: str, attribute: str) -> None:
    poseidon.bind()
    kind = getattr(importlib.import_module(name), attribute)
    assert pickle.loads(f"c{name}\n{attribute}\n.".encode()) is kind
    assert pickle.loads(pickle.dumps(kind)) is kind


def test_python_m_runs_a_bound_module() -> None:
    poseidon.bind()
    made = runpy.run_module("caffe2.python.scope", run_name="__main__")
    assert made["__name__"] == "__main__" and made["__spec__"].name == "caffe2.python.scope"
    assert made["__file__"] == str(ROOT / "poseidon/caffe2/scope.py")
