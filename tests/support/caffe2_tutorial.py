"""Plays the cells of a notebook in one namespace, without Jupyter."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterable
from typing import Any

import pytest


def prepare(patch: pytest.MonkeyPatch, home: Any) -> None:
    """Make `~` a folder, drawings invisible, and `IPython.display` a module."""
    patch.setenv("HOME", str(home))
    patch.setenv("MPLBACKEND", "Agg")
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: None  # type: ignore[attr-defined]
    ipython.version_info = (9, 0)  # type: ignore[attr-defined]
    ipython.display = types.ModuleType("IPython.display")  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "IPython", ipython)
    patch.setitem(sys.modules, "IPython.display", ipython.display)
    patch.chdir(home)
    assert os.path.expanduser("~") == str(home)


def play(cells: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Run cells, each a name and its code, in order; return what they have defined.

    Lines with % or ! are left out.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    for name, code in cells:
        lines = ["" if line.lstrip().startswith(("%", "!")) else line for line in code.splitlines()]
        exec(compile("\n".join(lines) + "\n", name, "exec"), names)
    return names
