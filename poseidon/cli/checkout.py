"""Scripts of the checkout find the checkout's own environment.

Law: this module imports nothing but Python's own library, so that a script can import it before anything else.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "torch", "numpy", "zmq", "msgpack", "google", "lmdb", "cv2", "h5py", "matplotlib", "pydot", "paramiko", "psutil", "tqdm",
)  # fmt: skip
"""What setup.py requires, by the names that are imported."""


def is_checkout() -> bool:
    """Return whether Poseidon is a checkout, not installed in a folder of packages."""
    return (CHECKOUT / "Makefile").is_file()


def use_environment(*packages: str) -> None:
    """Make sure that the packages can be imported: this process continues as the checkout's `.venv` if they cannot.

    Without a `.venv` that has them the process ends with one sentence and code 2.

    Args:
        packages: what the script imports; everything that setup.py requires when none are given.
    """
    missing = [name for name in packages or PACKAGES if find_spec(name) is None]
    if not missing:
        return
    python = CHECKOUT / ".venv" / "bin" / "python"
    if python.exists() and Path(sys.executable) != python:  # at most once, whatever that environment lacks
        sys.stdout.flush()
        os.execv(python, [str(python), *sys.orig_argv[1:]])
    _refuse(missing)


def _refuse(missing: list[str]) -> NoReturn:
    script = Path(sys.argv[0]).name
    print(
        f"{script}: this Python ({sys.executable}) lacks {', '.join(missing)}; run `make setup` in {CHECKOUT} once",
        file=sys.stderr,
    )
    sys.exit(2)
