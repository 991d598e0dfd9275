"""Ctrl-C while modules are imported."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from poseidon.cli.entry import ctrl_c_ends_at_once

PROGRAM = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "{imported}":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                pass

sys.meta_path.insert(0, Interrupts())
from poseidon.cli.entry import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("imported", "name"), [("numpy", "poseidon train"), ("poseidon.cli.checks", "poseidon")]
)
def test_ctrl_c_within_an_import_that_loses_it_is_one_line(imported: str, name: str) -> None:
    """The job would start, and train as if nobody had asked it to stop."""
    program = PROGRAM.format(imported=imported)
    words = [sys.executable, "-c", program, "train", "--solver=/dev/null"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, f"{name}: interrupted\n")


def test_ctrl_c_at_the_end_of_python_is_no_traceback() -> None:
    """Such as the second of two, when the first has ended the job."""
    program = (
        "import atexit, os, signal, sys\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "from poseidon.cli.entry import main\nsys.exit(main())"
    )
    words = [sys.executable, "-c", program, "--version"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_program_with_a_handler_of_its_own_keeps_it() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with ctrl_c_ends_at_once("x"):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with ctrl_c_ends_at_once("x"):
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
