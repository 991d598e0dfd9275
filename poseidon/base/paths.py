"""Resolution of the paths in a definition.

Law: an absolute path is used as it is. A relative path is searched for in the folder of the file
that names it, then under the repository root, then under the current folder, in the other order if
the file is outside the repository; the first that exists is used. A path that exists nowhere is
resolved against the repository root if the file is in the repository, otherwise against the folder
of the file: a job writes to the same path wherever it is started, and other projects write nothing
into the checkout. The leading folder names POSEIDON_ROOT and CAFFE_ROOT of older definitions mean
the repository root.
"""

from __future__ import annotations

import os
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
        path: the path in the definition.
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
