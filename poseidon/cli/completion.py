"""`poseidon completion`: a script that completes commands, flags and their values in a shell.

shtab makes it from the parsers, so that it knows what `--help` shows and runs no Python while a
user types.
"""

from __future__ import annotations

import argparse

import shtab

from poseidon.cli.main import COMMANDS
from poseidon.cli.parsers.reading import parser_of

FILES = ("FILE", "FILES", "DIR")
"""What a value is called that is a path."""


def run(arguments: argparse.Namespace) -> int:
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
