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
from pathlib import Path

from poseidon.version import __version__

_FOLDER_LAST = 'import sys; sys.path[:1] == [""] and sys.path.append(sys.path.pop(0)); '
_RUN_MODULE = 'import runpy; runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)'
_RUN_AGENT = """\
import sys
sys.path[:1] == [""] and sys.path.append(sys.path.pop(0))
def refuse(why):
    import json, os, struct
    message = json.dumps({"kind": "Refused", "id": -1, "message": why}).encode()
    os.write(1, struct.pack(">I", len(message)) + message)
    sys.exit(1)
if sys.version_info < (3, 10):
    version = ".".join(map(str, sys.version_info[:3]))
    refuse("%s is Python %s; expected 3.10 or newer" % (sys.executable, version))
try:
    import poseidon
    there, here = poseidon.__version__, sys.argv[2]
    if there != here:
        refuse("Poseidon %s is installed there, and %s here; expected the same" % (there, here))
    from poseidon.cluster.agent.__main__ import main
except Exception as error:
    refuse("%s has no Poseidon (%s); give its line python= or workdir=" % (sys.executable, error))
sys.exit(main(sys.argv[3:]))
"""
"""Runs the agent, or reports in its place why it cannot run: standard library, any Python 3."""
_PACKAGES = Path(__file__).resolve().parents[2]
"""The folder that has the package `poseidon`."""


def module_arguments(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the arguments of an interpreter that runs a module, as `-m` would, with its
    arguments.
    """
    return program_arguments(_RUN_MODULE, module, *arguments)


def program_arguments(program: str, *arguments: str) -> tuple[str, ...]:
    """Return the arguments of an interpreter that runs a program, as `-c` would, with its
    arguments.
    """
    return ("-c", _FOLDER_LAST + program, *arguments)


def agent_arguments(job: str) -> tuple[str, ...]:
    """Return the arguments of an interpreter that runs the agent of a host.

    Any Python from 3.7 on answers the launcher with a sentence where the agent cannot run.

    Args:
        job: its id; empty: of no job.
    """
    mark = ("--job", job) if job else ()
    return ("-c", f"exec({_RUN_AGENT!r})", "poseidon.cluster.agent", __version__, *mark)


def module_folders(inherited: str) -> str:
    """Return $PYTHONPATH for a process of this interpreter that is to find what this process finds.

    An empty entry, the current folder, is left out; so is each folder of packages that the
    interpreter has by itself, since it would come before Python's own library.

    Args:
        inherited: the value of this process.
    """
    own = {*site.getsitepackages(), site.getusersitepackages()}
    installed = (path for path in sys.path if path.endswith("site-packages"))
    found = [str(_PACKAGES), *installed, *inherited.split(os.pathsep)]
    return os.pathsep.join(dict.fromkeys(path for path in found if path and path not in own))


def checkout() -> str:
    """Return the folder that has the package, where that is the source; empty when it is
    installed.
    """
    return "" if _PACKAGES.name in ("site-packages", "dist-packages") else str(_PACKAGES)
