"""What a path inside a definition means.

Law: an absolute path is itself. A relative one is looked for beside the file that names it, then
under the repository root, then under the current folder; the first that exists is meant. What
exists nowhere is meant under the repository root by a file of the repository, and beside itself by a
file that lies elsewhere: a job writes to the same place from wherever it is started, and a project of
somebody's own writes nothing into the checkout. The folder names POSEIDON_ROOT and CAFFE_ROOT, which the definitions of
this project's ancestor ask the user to replace, stand for the repository root.
"""

from __future__ import annotations

import os
from pathlib import Path

from poseidon.errors import DefinitionError

LONGEST_NAME = 255  # bytes of a file's name on every system that this runs on
PLACEHOLDERS = ("POSEIDON_ROOT", "CAFFE_ROOT")


_PACKAGE = Path(__file__).resolve().parents[1]
_TEMPLATES = _PACKAGE / "templates"  # setup.py puts it into a wheel; a checkout has none


def repository_root() -> Path:
    """The checkout that this package runs from, or the current folder when it is installed elsewhere.

    A checkout is known by its `prototxt` folder beside the package.
    """
    parent = _PACKAGE.parent
    return parent if (parent / "prototxt").is_dir() and not _TEMPLATES.is_dir() else Path.cwd()


def shipped_folder() -> Path:
    """Where `prototxt`, `machinefiles` and `examples` lie: in the installed package, or at the top of the checkout."""
    return _TEMPLATES if _TEMPLATES.is_dir() else _PACKAGE.parent


def resolve(path: str, *, folder: Path) -> Path:
    """The file or folder that `path` means; it need not exist.

    Args:
        path: as written in the definition.
        folder: the folder of the file that names it.

    Raises:
        DefinitionError: the path is empty, or no file can have it.
    """
    candidates = _candidates(path, folder)
    return next((candidate for candidate in candidates if candidate.exists()), candidates[-1])


def places_of(path: str, *, folder: Path) -> list[Path]:
    """Where `resolve` looks for a path, in order, each place once."""
    return list(dict.fromkeys(_candidates(path, folder)))


def resolve_prefix(path: str, *, folder: Path) -> Path:
    """The prefix that `path` means, such as a snapshot_prefix: its parent folder decides as in `resolve`.

    A prefix without a folder, `lenet`, is meant beside the file that names it; on a host that has only the content of that file,
    and no such folder, in the working folder.
    """
    if path and Path(path).name == path and not folder.exists():
        folder = Path.cwd()
    candidates = _candidates(path, folder)
    return next((candidate for candidate in candidates if candidate.parent.exists()), candidates[-1])


def _candidates(path: str, folder: Path) -> list[Path]:
    """The absolute places that `path` can mean, best first; the last is for what exists nowhere."""
    if not path:
        raise DefinitionError("an empty path is given where a file or folder is expected")
    if "\0" in path or max(len(os.fsencode(part)) for part in path.split("/")) > LONGEST_NAME:
        raise DefinitionError(f"'{path[:LONGEST_NAME]}' is a path that no file can have")
    written = Path(path)
    if written.is_absolute():
        return [written]
    root = repository_root()
    if written.parts and written.parts[0] in PLACEHOLDERS:
        return [root.joinpath(*written.parts[1:])]
    beside = (folder / written).absolute()
    own_project = folder.is_dir() and not folder.resolve().is_relative_to(root.resolve())
    return [beside, root / written, Path.cwd() / written, beside if own_project else root / written]
