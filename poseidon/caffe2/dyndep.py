"""Libraries of operators that Caffe2 loads at run time: here they are always present."""

from __future__ import annotations

_imported: set[str] = set()


def InitOpsLibrary(name: str, trigger_lazy: bool = True) -> None:
    """Note that a library was asked for, e.g.

    `@/caffe2/caffe2/contrib/gloo:gloo_ops`; there is nothing to load.

    An operator that does not exist is an error when it is used.
    """
    _imported.add(name)


def GetImportedOpsLibraries() -> set[str]:
    """Return the names of the libraries that were asked for."""
    return set(_imported)
