"""The registry of layer types, and import of the user's modules that add some.

Law: a type is registered once, when its module is imported, and never changed. Any import from
`poseidon.caffe.layers` imports every module that registers a type.

Import of the user's modules: those that register layer types (`--import`), and scripts.

Law: a module is found as `import` finds it, in the working directory last. An exception of its code
becomes an error that names the line. Every process of a job imports the same modules before it
reads a net.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from poseidon.caffe.layers.base import Layer, LayerContext, LayerError
from poseidon.caffe.proto.branches import of_type
from poseidon.caffe.proto.caffe_pb2 import LayerParameter
from poseidon.errors import UsageError, nearest

Class = TypeVar("Class", bound=type[Layer])
Replacement = Callable[[LayerParameter, LayerContext], LayerParameter]
_CLASSES: dict[str, type[Layer]] = {}
_PYTHON_LAYERS: dict[tuple[str, str], Replacement] = {}
_FOREIGN_NAMES = {
    **dict.fromkeys(("conv", "conv2d"), "Convolution"),
    **dict.fromkeys(("fullyconnected", "fc", "linear", "dense", "ip"), "InnerProduct"),
    **dict.fromkeys(("maxpool", "maxpooling", "avgpool", "averagepooling"), "Pooling"),
    **dict.fromkeys(("crossentropy", "crossentropyloss", "softmaxloss"), "SoftmaxWithLoss"),
    **dict.fromkeys(("mse", "mseloss", "l2loss"), "EuclideanLoss"),
    **dict.fromkeys(("bn", "batchnormalization"), "BatchNorm"),
    **dict.fromkeys(("add", "sum"), "Eltwise"),
}
"""The names that other frameworks use, with Caffe's types."""


def register(name: str) -> Callable[[Class], Class]:
    """Return a class decorator that registers the layer type `name`.

    Raises:
        ValueError: the type is registered already.
    """

    def add(layer: Class) -> Class:
        if name in _CLASSES:
            raise ValueError(
                f"layer type '{name}' is already registered by {_CLASSES[name].__qualname__}"
            )
        _CLASSES[name] = layer
        return layer

    return add


def replaces_python(module: str, layer: str) -> Callable[[Replacement], Replacement]:
    """Return a decorator that registers a function in place of a named Python layer.

    The function returns the definition of a layer of a different type. It is used only
    where Python has no module of that name.
    """

    def add(replacement: Replacement) -> Replacement:
        _PYTHON_LAYERS[module, layer] = replacement
        return replacement

    return add


def replaced(param: LayerParameter, context: LayerContext) -> LayerParameter:
    """Return the definition that stands for `param`: another one for a known Python
    layer without its module, else `param`.
    """
    name = (param.python_param.module, param.python_param.layer)
    if param.type != "Python" or name not in _PYTHON_LAYERS or _is_importable(name[0]):
        return param
    return _PYTHON_LAYERS[name](param, context)


def _is_importable(module: str) -> bool:
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its package is missing, or is not a package
        return False


def known_types() -> frozenset[str]:
    """Return all registered types."""
    return frozenset(_CLASSES)


def layer_class(name: str) -> type[Layer]:
    """Return the class of a type.

    Raises:
        LayerError: the type is unknown. The text suggests similar names.
    """
    if not name:
        raise LayerError("has no type")
    if name not in _CLASSES:
        raise LayerError(unknown_type(name, _CLASSES))
    return _CLASSES[name]


def create(param: LayerParameter, context: LayerContext) -> Layer:
    """Create a layer and check its numbers of bottoms and tops. `setup` is not called.

    Raises:
        LayerError: the type is unknown, or the number of bottoms or tops is illegal.
    """
    param = replaced(param, context)
    layer = layer_class(param.type)(param, context)
    layer.check_counts()
    return layer


def unknown_type(name: str, types: Iterable[str]) -> str:
    """Return the message for an unknown layer type: similar names, and the flag for own types."""
    names = sorted(set(types))
    if name.lower() not in map(str.lower, names) and (branch := of_type(name)):
        return f"unknown layer type '{name}'; it is {branch} (for a type of your own see --import)"
    lowered = {choice.lower(): choice for choice in names}
    near = [lowered[match] for match in difflib.get_close_matches(name.lower(), lowered, n=3)]
    first = _FOREIGN_NAMES.get(name.lower()) or lowered.get(name.lower()) or nearest(name, names)
    near = list(dict.fromkeys([first, *near])) if first else near
    if not near:  # the long list would hide the flag
        known = ", ".join(names)
        return f"unknown layer type '{name}'; for a type of your own see --import; known: {known}"
    also = f"similar: {', '.join(near[1:])}; " if len(near) > 1 else ""
    hint = f"did you mean '{near[0]}'? ({also}for a type of your own see --import)"
    return f"unknown layer type '{name}'; {hint}"


def add_working_directory() -> None:
    """Append the working directory to `sys.path`: no file there replaces a different module."""
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)


def import_modules(names: Sequence[str]) -> None:
    """Import modules that register layers.

    Raises:
        UsageError: there is no such module, or its code raises an exception.
    """
    folder = os.getcwd()
    for name in names:
        add_working_directory()
        try:
            importlib.import_module(name)
        except Exception as error:
            raise UsageError(_message(name, error, folder)) from error


def import_file(path: Path) -> ModuleType:
    """Import a Python file, which may import what lies beside it.

    Exceptions of its code are raised unchanged.

    Args:
        path: ends in `.py`.
    """
    sys.path.insert(0, str(path.absolute().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def location_in(names: Sequence[str], error: BaseException) -> str:
    """Return these modules' last line in a traceback, as `FILE:LINE`; empty if there is none."""
    files = {getattr(sys.modules.get(name), "__file__", None) for name in names}
    lines = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files
    ]
    return f"{lines[-1].filename}:{lines[-1].lineno}" if lines else ""


def _message(name: str, error: Exception, folder: str) -> str:
    if (
        isinstance(error, ModuleNotFoundError)
        and error.name
        and (name + ".").startswith(error.name + ".")
    ):
        return f"--import {name}: there is no module '{error.name}' in {folder} or on Python's path"
    if isinstance(error, SyntaxError):
        return f"--import {name}: {error.filename}:{error.lineno}: {error.msg}"
    # `register` raises in our own file; the user needs the line that calls it.
    frames = traceback.extract_tb(error.__traceback__)
    frame = next(
        (f for f in reversed(frames) if "poseidon/caffe/layers" not in f.filename), frames[-1]
    )
    return f"--import {name}: {frame.filename}:{frame.lineno}: {type(error).__name__}: {error}"
