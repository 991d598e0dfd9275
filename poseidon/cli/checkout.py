"""Scripts of the checkout find the checkout's own environment.

Law: this module imports nothing but Python's own library, so that a script can import it before
anything else.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

CHECKOUT = Path(__file__).resolve().parents[2]
OLDEST = (3, 10)
"""The oldest Python that runs Poseidon, as in setup.py."""
PACKAGES = (
    "torch", "numpy", "zmq", "msgpack", "google", "lmdb", "cv2", "h5py", "matplotlib", "pydot", "paramiko", "psutil", "tqdm", "shtab",
    "cryptography",
)  # fmt: skip
"""What setup.py requires, by the names that are imported."""


def is_checkout() -> bool:
    """Return whether Poseidon is a checkout, not installed in a folder of packages."""
    return (CHECKOUT / "Makefile").is_file()


def use_environment(*packages: str) -> None:
    """Make sure that the packages can be imported: this process continues as the checkout's
    `.venv` if they cannot.

    Without a `.venv` that has them the process ends with one sentence and code 2.

    Args:
        packages: what the script imports; everything that setup.py requires when none are given.
    """
    missing = [name for name in packages or PACKAGES if find_spec(name) is None]
    if not missing and _is_new_enough():
        return
    python = CHECKOUT / ".venv" / "bin" / "python"
    # at most once, whatever that environment lacks
    if python.exists() and Path(sys.executable) != python:
        sys.stdout.flush()
        # Python 3.9 has no orig_argv
        os.execv(python, [str(python), *getattr(sys, "orig_argv", ["", *sys.argv])[1:]])
    refuse_old_python()
    _refuse(missing)


def refuse_old_python() -> None:
    """End the process with one sentence and code 2 where this Python cannot read Poseidon's
    code.
    """
    if not _is_new_enough():
        print(
            f"poseidon: this Python ({sys.executable}) is {sys.version.split()[0]}; expected "
            f"{OLDEST[0]}.{OLDEST[1]} or newer",
            file=sys.stderr,
        )
        sys.exit(2)


def _is_new_enough() -> bool:
    return sys.version_info[:2] >= OLDEST


def _refuse(missing: list[str]) -> NoReturn:
    script = Path(sys.argv[0]).name
    print(
        f"{script}: this Python ({sys.executable}) lacks {', '.join(missing)}; run `make setup` "
        f"in {CHECKOUT} once",
        file=sys.stderr,
    )
    sys.exit(2)
