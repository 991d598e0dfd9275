"""Where the command begins: Ctrl-C ends it with a line and code 130, also while modules are imported.

Law: this module imports nothing but Python's own library, so that it comes first.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType


def main() -> int:
    """Run the command of this process's arguments; return the exit code."""
    with ctrl_c_ends_at_once("poseidon"):
        command = import_module("poseidon.cli.main")
    code: int = command.main()
    return code


@contextmanager
def ctrl_c_ends_at_once(name: str) -> Iterator[None]:
    """Make Ctrl-C end the process with a line and code 130, while the block imports modules.

    A KeyboardInterrupt would not do: numpy and others lose it, and fail later with an error that
    names another cause. Outside the main thread, or in a program with a handler of its own, nothing
    changes.
    """
    before = signal.getsignal(signal.SIGINT)
    if (
        threading.current_thread() is not threading.main_thread()
        or before is not signal.default_int_handler
    ):
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):
            os.write(2, f"{name}: interrupted\n".encode())
        os._exit(128 + number)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
