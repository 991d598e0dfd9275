"""Import of the user's modules: those that register layer types (`--import`), and scripts.

Law: a module is found as `import` finds it, in the working directory last. An exception of its code
becomes an error that names the line. Every process of a job imports the same modules before it
reads a net.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from poseidon.errors import UsageError


def add_working_directory() -> None:
    """Add the working directory to `sys.path`, at its end: no file there takes the place of
    a different module.
    """
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
    """Return the last line of these modules in an exception's traceback, as `FILE:LINE`; empty if
    it has none.
    """
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
