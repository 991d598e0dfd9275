"""Quoting of an argument list as the command line that sshd passes to the user's login shell.

Law: the only place where a remote command line is made. Whatever the arguments hold, sh, bash,
dash, zsh, fish and csh each split the line into the same arguments again, and nothing in it is
expanded or run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from poseidon.errors import JobError

# Characters that have no meaning to any shell.
_PLAIN = re.compile(r"[A-Za-z0-9_./:,+-]+", re.ASCII)
# Inside single quotes fish gives the backslash a meaning and csh the '!'; one backslash before
# each, outside of quotes, is understood by all.
_ESCAPED = {"\\": "\\\\", "'": "\\'", "!": "\\!"}
_PIECE = re.compile(r"[\\'!]|[^\\'!]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def shell_command(argv: Sequence[str]) -> str:
    """Return the command line that runs `argv`.

    >>> shell_command(["python3", "-m", "it's", ""])
    "'python3' -m 'it'\\\\''s' ''"

    Args:
        argv: the program and its arguments; the program is not empty and no option.

    Raises:
        JobError: an argument holds a control character, such as a line end, which not every shell
            accepts; or there is no program.
    """
    if not argv or not argv[0] or argv[0].startswith("-"):
        raise JobError(f"{' '.join(argv)!r:.200} is not a command: expected a program's name first")
    for word in argv:
        if _CONTROL.search(word):
            raise JobError(
                f"{word!r:.200} cannot stand in a remote command: it holds a control character, "
                "or is not UTF-8"
            )
    # A quoted name is neither an alias nor a keyword of the shell (`if`, `exec`).
    first = _quoted(argv[0])
    return " ".join(
        [first, *(word if _PLAIN.fullmatch(word) else _quoted(word) for word in argv[1:])]
    )


def _quoted(word: str) -> str:
    pieces = (_ESCAPED.get(piece) or f"'{piece}'" for piece in _PIECE.findall(word))
    return "".join(pieces) or "''"
