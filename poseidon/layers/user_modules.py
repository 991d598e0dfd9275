"""Modules of the user's own that register layer types (`--import`).

Law: a module is found as `python -m` finds it, the working directory first; what its code raises leaves here as one
sentence that says where. Every process of a job imports the same modules before it reads a net.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from poseidon.errors import UsageError


def module_names(text: str) -> tuple[str, ...]:
    """Return the names in a flag's text, parted by commas."""
    return tuple(name for part in text.split(",") if (name := part.strip()))


def look_here_too() -> None:
    """Let `import` find modules in the working directory, as `python -m` does."""
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)


def import_modules(names: Sequence[str]) -> None:
    """Import modules that register layers.

    Raises:
        UsageError: there is no such module, or its code fails.
    """
    folder = os.getcwd()
    for name in names:
        look_here_too()
        try:
            importlib.import_module(name)
        except Exception as error:
            raise UsageError(_sentence(name, error, folder)) from error


def _sentence(name: str, error: Exception, folder: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and (name + ".").startswith(error.name + "."):
        return f"--import {name}: there is no module '{error.name}' in {folder} or on Python's path"
    if isinstance(error, SyntaxError):
        return f"--import {name}: {error.filename}:{error.lineno}: {error.msg}"
    # The decorator that refuses a layer stands in our own file; what matters is the line that used it.
    frames = traceback.extract_tb(error.__traceback__)
    place = next((f for f in reversed(frames) if "poseidon/layers" not in f.filename), frames[-1])
    return f"--import {name}: {place.filename}:{place.lineno}: {type(error).__name__}: {error}"
