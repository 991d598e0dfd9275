"""The library of LevelDB databases, which is optional.

Law: LevelDB alone needs plyvel. Where plyvel is missing everything else works, and LevelDB is one sentence with the remedy.
"""

from __future__ import annotations

from types import ModuleType

from poseidon.errors import DataError

PLYVEL: ModuleType | None
ERRORS: tuple[type[Exception], ...]
"""What the library raises."""

try:
    import plyvel
except ImportError:
    PLYVEL, ERRORS = None, ()
else:
    PLYVEL, ERRORS = plyvel, (plyvel.Error,)


class LevelDbMissingError(DataError):
    """This Python has no library for LevelDB."""


def require_leveldb() -> ModuleType:
    """Return the module `plyvel`.

    Raises:
        LevelDbMissingError: it is not installed here; says how to install it and what works without.
    """
    if PLYVEL is None:
        raise LevelDbMissingError(
            "LevelDB needs the Python package plyvel, which is not installed here: use LMDB (--backend=lmdb), or "
            "pip install plyvel (Python 3.13 and newer build it: apt-get install g++ libleveldb-dev first)"
        )
    return PLYVEL
