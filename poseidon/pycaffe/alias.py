"""`import caffe` for code that was written for Caffe."""

from __future__ import annotations

import sys

PACKAGE = __name__.rpartition(".")[0]


def install(name: str = "caffe") -> None:
    """Make `import caffe`, and `import caffe.io` and so on, mean this package, in this process.

    Python layers get this by themselves. Call it before the first import; a Caffe that is imported already stays what
    it is for those who hold it.

    Args:
        name: the name to take.
    """
    for module, loaded in list(sys.modules.items()):
        if module == PACKAGE or module.startswith(PACKAGE + "."):
            sys.modules[name + module[len(PACKAGE) :]] = loaded
