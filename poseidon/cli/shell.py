"""The commands for a shell: completion prints a script for it, python binds Caffe's names.

shtab makes it from the parsers, so that it knows what `--help` shows and runs no Python while a
user types.

This process becomes Python itself, so exit codes, signals and tracebacks are Python's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import shtab

from poseidon.binding import bind_started_processes
from poseidon.cli.main import COMMANDS
from poseidon.cli.parsers.reading import parser_of
from poseidon.errors import UsageError

FILES = ("FILE", "FILES", "DIR")
"""What a value is called that is a path."""


def run_completion(arguments: argparse.Namespace) -> int:
    """Print the script."""
    print(script(arguments.shell))
    return 0


def script(shell: str) -> str:
    """Return the script for a shell, one of shtab's."""
    root = argparse.ArgumentParser(prog="poseidon")
    commands = root.add_subparsers()
    for command in COMMANDS.values():
        flags = list(command.parser().flags())
        parser = commands.add_parser(
            command.name, help=command.line, parents=[parser_of(flags)], add_help=False
        )
        by_attribute = {flag.attribute: flag for flag in flags}
        for action in parser._actions:  # there is no public list
            flag = by_attribute.get(action.dest)
            if flag and flag.choices:
                action.choices = flag.choices
            elif flag and flag.metavar in FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab's way
    return shtab.complete(root, shell)


def run_python(arguments: argparse.Namespace) -> int:
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
