"""`from caffe2.python import core` for code that was written for Caffe2."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = __name__.rpartition(".")[0]
ALIASES = {"caffe2.python": PACKAGE, "caffe2.proto": f"{PACKAGE}.proto"}


class _Finder(MetaPathFinder, Loader):
    """Finds `caffe2`, `caffe2.python...` and `caffe2.proto...`: the modules of this package under those names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`."""
        real = _real(fullname)
        if fullname != "caffe2" and (real is None or importlib.util.find_spec(real) is None):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return None: the import system makes an empty module, which `exec_module` replaces."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put the real module in the place of the empty one."""
        real = _real(module.__name__)
        if real is not None:
            sys.modules[module.__name__] = importlib.import_module(real)


def _real(name: str) -> str | None:
    for alias, real in ALIASES.items():
        if name == alias or name.startswith(f"{alias}."):
            return real + name[len(alias) :]
    return None


def install() -> None:
    """Make `caffe2.python` and `caffe2.proto` mean this package, in this process.

    Call it before the first import of `caffe2`.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
