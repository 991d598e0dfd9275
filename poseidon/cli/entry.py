"""Where the command, and each script of the checkout, begins: with the right Python and environment.
Ctrl-C ends it with a line and code 130, also while modules are imported.

Law: this module imports nothing but Python's own library, so that it comes first.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
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
    script = Path(sys.argv[0]).name
    _refuse(
        "poseidon" if script == "__main__.py" else script,
        f"lacks {', '.join(missing)}; run `make setup` in {CHECKOUT} once",
    )


def refuse_old_python() -> None:
    """End the process with one sentence and code 2 where this Python cannot read Poseidon's
    code.
    """
    if not _is_new_enough():
        version, oldest = sys.version.split()[0], ".".join(map(str, OLDEST))
        _refuse("poseidon", f"is {version}; expected {oldest} or newer")


def _is_new_enough() -> bool:
    return sys.version_info[:2] >= OLDEST


def _refuse(program: str, why: str) -> NoReturn:
    print(f"{program}: this Python ({sys.executable}) {why}", file=sys.stderr)
    sys.exit(2)


def main() -> int:
    """Run the command of this process's arguments; return the exit code."""
    with ctrl_c_ends_at_once("poseidon"):
        command = import_module("poseidon.cli.main")
    try:
        code: int = command.main()
    finally:
        # a further Ctrl-C ends the process at once: raised in Python's own end it is a traceback
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


@contextmanager
def on_ctrl_c(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call a function at Ctrl-C, within the block. Outside the main thread, or in a program with a
    handler of its own, nothing changes.
    """
    before = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def ctrl_c_ends_at_once(name: str) -> Iterator[None]:
    """Make Ctrl-C end the process with a line and code 130, while the block imports modules; see
    `on_ctrl_c`.

    A KeyboardInterrupt would not do: numpy and others lose it, and fail later with an error that
    names another cause.
    """

    def end(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):
            os.write(2, f"{name}: interrupted\n".encode())
        os._exit(128 + number)

    with on_ctrl_c(end):
        yield
