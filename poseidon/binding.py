"""`import caffe` and `from caffe2.python import core`, for scripts that were written for Caffe
and Caffe2.

Law: a module of Poseidon has one object, whatever name imports it: `caffe.Net` is
`poseidon.pycaffe.Net`. A bound name comes before every folder of `sys.path`, because scripts insert
the folder of their own Caffe there.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

from poseidon.base.settings import put_on_python_path
from poseidon.errors import UsageError

NAMES = {
    "caffe.detector": "poseidon.pycaffe.classifier",
    "caffe": "poseidon.pycaffe",
    "caffe2.python._import_c_extension": "poseidon.caffe2.workspace.c",
    "caffe2.python.control_ops_grad": "poseidon.caffe2.core.control_gradients",
    "caffe2.python.layers.functional": "poseidon.caffe2.layers.dense",
    "caffe2.python.layers.sparse_lookup": "poseidon.caffe2.layers.dense",
    "caffe2.python.modeling.net_modifier": "poseidon.caffe2.modeling.gradient_clipping",
    "caffe2.python.predictor.serde": "poseidon.caffe2.predictor.predictor_py_utils",
    "caffe2.python.helpers.arg_scope": "poseidon.caffe2.brew",
    "caffe2.python.helpers.control_ops": "poseidon.caffe2.helpers.train",
    "caffe2.python.helpers.tools": "poseidon.caffe2.helpers.train",
    **{
        f"caffe2.python.helpers.{name}": "poseidon.caffe2.helpers.layers"
        for name in (
            "algebra",
            "array_helpers",
            "dropout",
            "elementwise_linear",
            "fc",
            "nonlinearity",
            "pooling",
        )
    },
    "caffe2.python.caffe2_pb2": "poseidon.caffe2.proto.caffe2_pb2",
    "caffe2.python": "poseidon.caffe2",
    "caffe2.proto": "poseidon.caffe2.proto",
    "caffe_pb2": "poseidon.caffe.proto.caffe_pb2",  # two modules with Caffe's messages exclude each other
}
"""Packages and modules by the names that scripts import; the first that fits counts."""
ABSENT = {
    "caffe2.python.examples": "run examples/resnet50/resnet50_trainer.py of Poseidon",
    "caffe2.python.models.seq2seq": "build it of rnn_cell.MultiRNNCell and "
    "rnn_cell.LSTMWithAttention",
    "caffe2.python.regularizer": "call optimizer.add_weight_decay",
    "caffe2.python.normalizer": "use brew.spatial_bn or brew.layer_norm",
    "caffe2.python.functional": "feed blobs and call workspace.RunOperatorOnce",
    "caffe2.python.test_util": "a checkout runs Caffe2's own tests: python -m "
    "tests.support.caffe2_testing FILE",
    "caffe2.python.trt": "run ONNX models with onnxruntime",
    "caffe2.python.ideep": "operators compute with torch, which uses oneDNN itself",
    "caffe2.python.mkl": "operators compute with torch, which uses oneDNN itself",
    "caffe2.contrib": "its operators are not here",
}
"""Packages and modules of Caffe2 that scripts import and Poseidon does not have, with what to use."""
_PACKAGE = Path(__file__).parent
STARTUP = _PACKAGE / "startup"
"""The folder of `sitecustomize.py`, which binds the names when a Python starts."""


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of `NAMES`, what is in them, and `caffe2`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "caffe2":
            return ModuleSpec(fullname, self, is_package=True)
        name = _bound(fullname)
        found = None if name in ABSENT else _real_spec(name)
        if found is None:
            if instead := ABSENT.get(name):
                raise ModuleNotFoundError(
                    f"Poseidon has no {name} (docs/caffe2.md lists what it has); {instead}",
                    name=name,
                )
            return None
        spec = ModuleSpec(fullname, self, origin=found.origin)
        spec.has_location = found.has_location
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return None: the import system makes an empty module, which `exec_module` replaces."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put the real module in the place of the empty one."""
        real = _real(_bound(module.__name__))
        if real is not None:
            sys.modules[module.__name__] = importlib.import_module(real)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of a module, for `python -m`."""
        spec = _real_spec(fullname)
        if spec is None or not isinstance(spec.loader, InspectLoader):
            return None
        return spec.loader.get_code(spec.name)


def _bound(name: str) -> str:
    """Return the bound name of a module that a package has under this name only: `from
    caffe2.python import caffe2_pb2` asks for `poseidon.caffe2.caffe2_pb2`.
    """
    for bound, real in NAMES.items():
        if name.startswith(f"{real}."):
            made = bound + name[len(real) :]
            return made if made in NAMES or made in ABSENT else name
    return name


def _real(name: str) -> str | None:
    for bound, real in NAMES.items():
        if name == bound or name.startswith(f"{bound}."):
            return real + name[len(bound) :]
    return None


def _real_spec(name: str) -> ModuleSpec | None:
    real = _real(name)
    return importlib.util.find_spec(real) if real else None


def bind() -> None:
    """Make `caffe`, `caffe_pb2`, `caffe2.python` and `caffe2.proto` mean Poseidon's modules.

    It holds in this process from now on, and in every Python that this process starts. Call it
    before the first import of `caffe` or `caffe2`. A second call changes nothing.

    Raises:
        UsageError: another Caffe or Caffe2 has been imported.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name in ("caffe", "caffe2", "caffe_pb2"):
        if name in sys.modules:
            place = getattr(sys.modules[name], "__file__", None) or "elsewhere"
            raise UsageError(
                f"'{name}' has been imported from {place}; call poseidon.bind() before the first "
                "import of it"
            )
    sys.meta_path.insert(0, _Finder())
    bind_started_processes()


def bind_started_processes() -> None:
    """Bind the names in every Python that this process starts from now on, and not in this
    process.
    """
    installed = _PACKAGE.parent.name in ("site-packages", "dist-packages")
    put_on_python_path(STARTUP, *([] if installed else [_PACKAGE.parent]))
