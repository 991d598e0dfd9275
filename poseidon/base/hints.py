"""Commands and paths in messages, so that a user can paste them.

Law: a message that tells the user to type a command names it with `own_command`, and a path with
`short_path`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

NAME = "poseidon"


def own_command(folder: Path | None = None) -> str:
    """Return how the user types this installation's command.

    It is `poseidon` if a shell finds this installation under that name. Otherwise it is the path of
    the command, such as `.venv/bin/poseidon`, or of the interpreter with `-m poseidon`.

    Args:
        folder: the folder in which it is typed; by default the working folder.
    """
    found = shutil.which(NAME)
    for script in _scripts():
        if found is not None and os.path.samefile(found, script):
            return NAME
        return _typed(script, folder)
    return f"{own_python(folder)} -m {NAME}"


def own_python(folder: Path | None = None) -> str:
    """Return how the user types this interpreter: `python`, if that is the one of this environment.

    Args:
        folder: see `own_command`.
    """
    found, own = shutil.which("python"), Path(sys.executable)
    # Interpreters of several environments may be links to one file.
    if found is not None and os.path.samefile(Path(found).parent, own.parent):
        return "python"
    return _typed(own, folder)


def short_path(path: Path, folder: Path | None = None) -> str:
    """Return a path as a user types it: relative to a folder or absolute, whichever is shorter.

    Args:
        path: absolute, or relative to the working folder.
        folder: where it is typed; by default the working folder.
    """
    absolute, relative = os.path.abspath(path), os.path.relpath(path, folder)
    return relative if len(relative) <= len(absolute) else absolute


def _scripts() -> Iterator[Path]:
    """Yield the commands of this installation that exist: the one that runs, the interpreter's."""
    running = Path(sys.argv[0]) if sys.argv else Path()
    for script in (running, Path(sys.executable).parent / NAME):
        if script.name == NAME and script.is_file():
            yield script


def _typed(program: Path, folder: Path | None) -> str:
    """Return a program's path for a shell, which looks a bare name up elsewhere."""
    path = short_path(program, folder)
    return shlex.quote(path if os.sep in path else os.path.join(os.curdir, path))
