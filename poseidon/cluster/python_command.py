"""The arguments of a Python process: the module or program that it runs, and where it finds
modules.

Python itself searches the current folder first (`-m`, `-c`), before its own library: a file
`random.py` there, or a folder `poseidon`, would take the place of the module that is meant. Here
the folder comes last: layers of the user in it are still found. Python 3.11 has `-P` and
$PYTHONSAFEPATH, which leave the folder out; a host's Python may be older, and processes that a
script starts must not inherit the variable.

Law: every Python process that Poseidon starts, here or on another host, gets its arguments from
this module.

The command that runs Python on a remote host: with which interpreter, and in which folder.

The machinefile's `python=` and `workdir=` decide. Without them it is the launcher's own
interpreter, checkout and folder where the host has them under the same paths (as with a shared file
system), else `python3` and the user's home.

Law: pure. A shell script on the host makes the choice, so no question need be asked beforehand.
"""

from __future__ import annotations

import os
import site
import sys
from dataclasses import dataclass
from pathlib import Path

from poseidon.cluster.machinefile import Host
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
        refuse("Poseidon %s is installed there, and %s here; install the same version" % (there, here))
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


CANNOT_START = 125
"""Exit status: the machinefile's `workdir` cannot be entered, or its `python` not be run; the last
line of standard error says so.
"""

# One line, since a remote command holds no line ends. Its arguments are the five of
# `remote_command`, then Python's.
_SCRIPT = (
    "; ".join(
        (
            "own=$1 checkout=$2 python=$3 folder=$4 here=$5 && shift 5 || exit 125",
            'case $python in "~/"*) python=$HOME/${python#"~/"};; esac',
            'case $folder in "~/"*) folder=$HOME/${folder#"~/"};; esac',
            'if [ -n "$folder" ]',
            'then cd "$folder" 2>/dev/null || {',
            'echo "workdir=$folder does not exist on this host, or cannot be entered" >&2',
            f"exit {CANNOT_START}",
            "}",
            'else cd "$here" 2>/dev/null || cd',
            "fi",
            'if [ -z "$python" ]',
            "then python=python3",
            'if [ -x "$own" ]',
            "then python=$own",
            'if [ -d "$checkout/poseidon" ]',
            "then PYTHONPATH=$checkout${PYTHONPATH:+:$PYTHONPATH}",
            "export PYTHONPATH",
            "fi",
            "fi",
            "fi",
            'found=$(command -v "$python") && [ -f "$found" ] && [ -x "$found" ] || {',
            'echo "$python cannot be run on this host; set python= of this host in the machinefile '
            'to a Python 3.10 or newer" >&2',
            f"exit {CANNOT_START}",
            "}",
            'exec "$python" "$@"',
        )
    )
    .replace("then; ", "then ")
    .replace("{; ", "{ ")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherEnvironment:
    """Where the launcher itself runs.

    Attributes:
        python: its interpreter, an absolute path.
        checkout: the folder of the source; empty when the package is installed.
        folder: its working directory.
    """

    python: str
    checkout: str
    folder: str


def remote_command(host: Host, launcher: LauncherEnvironment, *arguments: str) -> tuple[str, ...]:
    """Return the argv that runs Python with arguments on a host of the machinefile."""
    chosen = (
        launcher.python,
        launcher.checkout,
        host.python or "",
        host.workdir or "",
        launcher.folder,
    )
    return ("sh", "-c", _SCRIPT, "poseidon", *chosen, *arguments)
