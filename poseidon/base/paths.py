"""Paths: in definitions, of Python modules, and in messages, with the commands that users can paste.

Law: an absolute path is used as it is. A relative path is searched for in the folder of the file
that names it, then under the repository root, then under the current folder, in the other order if
the file is outside the repository; the first that exists is used. A path that exists nowhere is
resolved against the repository root if the file is in the repository, otherwise against the folder
of the file: a job writes to the same path wherever it is started, and other projects write nothing
into the checkout. The leading folder names POSEIDON_ROOT and CAFFE_ROOT of older definitions mean
the repository root.

The file of a Python module, found as `python -m` finds it.

Law: nothing of the user's is imported.

Commands and paths in messages, so that a user can paste them.

Law: a message that tells the user to type a command names it with `own_command`, and a path with
`short_path`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from poseidon.errors import DefinitionError

LONGEST_NAME = 255  # bytes of a file name on every supported system
PLACEHOLDERS = ("POSEIDON_ROOT", "CAFFE_ROOT")


_PACKAGE = Path(__file__).resolve().parents[1]
_TEMPLATES = _PACKAGE / "templates"  # setup.py puts it into a wheel; a checkout has none


def repository_root() -> Path:
    """Return the checkout that this package runs from, or the current folder if the package is
    installed.

    A checkout has a `prototxt` folder beside the package.
    """
    parent = _PACKAGE.parent
    return parent if (parent / "prototxt").is_dir() and not _TEMPLATES.is_dir() else Path.cwd()


def shipped_folder() -> Path:
    """Return the folder of `prototxt`, `machinefiles` and `examples`: in the
    installed package, or the top of the checkout.
    """
    return _TEMPLATES if _TEMPLATES.is_dir() else _PACKAGE.parent


def resolve(path: str, *, folder: Path) -> Path:
    """Resolve a path of a definition to a file or folder, which need not exist.

    Args:
        folder: the folder of the file that names it.

    Raises:
        DefinitionError: the path is empty or not legal.
    """
    paths = _candidates(path, folder)
    return next((candidate for candidate in paths if candidate.exists()), paths[-1])


def candidates(path: str, *, folder: Path) -> list[Path]:
    """Return the paths that `resolve` tries, in order, without duplicates."""
    return list(dict.fromkeys(_candidates(path, folder)))


def resolve_prefix(path: str, *, folder: Path) -> Path:
    """Resolve a prefix such as snapshot_prefix by its parent folder, as in `resolve`.

    A prefix without a folder, `lenet`, is in the folder of the file that names it. On a host that
    has the content of that file but not the folder, it is in the current folder.
    """
    if path and Path(path).name == path and not folder.exists():
        folder = Path.cwd()
    prefixes = _candidates(path, folder)
    return next((candidate for candidate in prefixes if candidate.parent.exists()), prefixes[-1])


def _candidates(path: str, folder: Path) -> list[Path]:
    """Return the absolute paths that `path` can mean, best first; the last is for a path that
    exists nowhere.
    """
    if not path:
        raise DefinitionError("expected the path of a file or folder, found an empty path")
    if "\0" in path or max(len(os.fsencode(part)) for part in path.split("/")) > LONGEST_NAME:
        why = "a NUL byte" if "\0" in path else f"a name of more than {LONGEST_NAME} bytes"
        raise DefinitionError(f"'{path[:LONGEST_NAME]}' is not a legal path: it has {why}")
    written = Path(path)
    if written.is_absolute():
        return [written]
    root = repository_root()
    if written.parts and written.parts[0] in PLACEHOLDERS:
        return [root.joinpath(*written.parts[1:])]
    beside = (folder / written).absolute()
    below_root, below_current = root / written, Path.cwd() / written
    if folder.resolve().is_relative_to(root.resolve()):
        return [beside, below_root, below_current, below_root]
    # as in Caffe, which knows the current folder alone
    return [beside, below_current, below_root, beside if folder.is_dir() else below_root]


def portable(path: Path) -> str:
    """Return a path that is valid on other hosts too: relative to the current
    folder if it is below it, else absolute.
    """
    absolute = path.absolute()
    try:
        return str(absolute.relative_to(Path.cwd()))
    except ValueError:
        return str(absolute)


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
