"""The arguments of a Python process: the module or program that it runs, and where it finds
modules.

Python itself searches the current folder first (`-m`, `-c`), before its own library: a file
`random.py` there, or a folder `poseidon`, would take the place of the module that is meant. Here
the folder comes last: layers of the user in it are still found. Python 3.11 has `-P` and
$PYTHONSAFEPATH, which leave the folder out; a host's Python may be older, and processes that a
script starts must not inherit the variable.

Law: every Python process that Poseidon starts, here or on another host, gets its arguments from
this module.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Iterable
from pathlib import Path

_FOLDER_LAST = 'import sys; sys.path[:1] == [""] and sys.path.append(sys.path.pop(0)); '
_RUN_MODULE = 'import runpy; runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)'
_PACKAGES = Path(__file__).resolve().parents[2]
"""The folder that has the package `poseidon`."""


def module_arguments(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the arguments of an interpreter that runs a module, as `-m` would, with its
    arguments.
    """
    return ("-c", _FOLDER_LAST + _RUN_MODULE, module, *arguments)


def sent_program_arguments() -> tuple[str, ...]:
    """Return the arguments of an interpreter that runs a program from its standard input.

    A line with the program's size in bytes comes first, then the program; what follows is the
    program's input.
    """
    return ("-c", _FOLDER_LAST + "i = sys.stdin.buffer; exec(i.read(int(i.readline())))")


def module_folders(inherited: str) -> str:
    """Return $PYTHONPATH for a process of this interpreter that is to find what this process finds.

    An empty entry, the current folder, is left out; so is each folder of packages that the
    interpreter has by itself, since it would come before Python's own library.

    Args:
        inherited: the value of this process.
    """
    own = {*site.getsitepackages(), site.getusersitepackages()}
    found = [str(_PACKAGES), *_package_folders(sys.path), *inherited.split(os.pathsep)]
    return os.pathsep.join(dict.fromkeys(path for path in found if path and path not in own))


def checkout() -> str:
    """Return the folder that has the package, where that is the source; empty when it is
    installed.
    """
    return "" if _PACKAGES.name in ("site-packages", "dist-packages") else str(_PACKAGES)


def _package_folders(paths: Iterable[str]) -> list[str]:
    return [path for path in paths if path.endswith("site-packages")]
