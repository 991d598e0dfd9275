"""`poseidon python`: run Python with `caffe` and `caffe2` bound to Poseidon.

This process becomes Python itself, so exit codes, signals and tracebacks are Python's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from poseidon.binding import bind_started_processes
from poseidon.errors import UsageError


def run(arguments: argparse.Namespace) -> int:
    """Replace this process by Python with the words of the command line."""
    option = unbinding_option(arguments.words)
    if option:
        raise UsageError(
            f"Python's option {option} also keeps `caffe` and `caffe2` from being bound; leave it "
            "out"
        )
    bind_started_processes()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, [sys.executable, *arguments.words])


def unbinding_option(words: Sequence[str]) -> str | None:
    """Return the option of Python with which it ignores PYTHONPATH or imports no `sitecustomize`.

    >>> unbinding_option(["-W", "error", "-BI", "train.py", "-E"])
    '-I'
    """
    rest = iter(words)
    for word in rest:
        if word == "--check-hash-based-pycs":
            next(rest, None)
        if word in ("-", "--") or not word.startswith("-"):
            return None
        letters = "" if word.startswith("--") else word[1:]
        for place, letter in enumerate(letters, 1):
            if letter in "EIS":
                return f"-{letter}"
            if letter in "cm":
                return None
            if letter in "WX":
                if place == len(letters):
                    next(rest, None)
                break
    return None
