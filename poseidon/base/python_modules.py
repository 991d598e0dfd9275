"""The file of a Python module, found as `python -m` finds it.

Law: nothing of the user's is imported.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path


def module_file(name: str) -> Path | None:
    """Return the file that `python -m NAME` runs in the current folder; None: there is none.

    Args:
        name: `train` or `package.train`. A package stands for its `__main__.py`.
    """
    first, *rest = name.split(".")
    spec = _top_level(first) if all((first, *rest)) else None
    if spec is None:
        return None
    if spec.submodule_search_locations is None:
        is_file = not rest and spec.has_location and spec.origin is not None
        return Path(spec.origin or "") if is_file else None
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    for number, part in enumerate(rest, start=1):
        found = list[Path]()
        for folder in folders:
            if (folder / part / "__init__.py").is_file():
                found = [folder / part]
                break
            if (file := folder / f"{part}.py").is_file():
                return file if number == len(rest) else None
            if (folder / part).is_dir():  # a part of a package without __init__.py
                found.append(folder / part)
        folders = found
    mains = (folder / "__main__.py" for folder in folders)
    return next((file for file in mains if file.is_file()), None)


def no_module(name: str) -> str:
    """Return a sentence on a module that is not there; `module_file` returns None for it."""
    if name.endswith(".py"):
        return (
            f"-m {name}: expected the name of a module, such as package.train; a file needs no -m"
        )
    return (
        f"-m {name}: Python finds no such module in {os.getcwd()} or where packages are installed"
    )


def _top_level(name: str) -> ModuleSpec | None:
    is_safe = getattr(sys.flags, "safe_path", False)  # Python 3.10 has none
    folders = [*([] if is_safe else [os.getcwd()]), *(path for path in sys.path if path)]
    specs = (finder.find_spec(name, folders) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)
