"""Remote command lines: every shell takes them apart into the words that went in."""

from __future__ import annotations

import random
import subprocess

import pytest

from poseidon.cluster.ssh.quoting import shell_command
from poseidon.errors import JobError

SHELLS = ["sh", "bash", "dash"] + [
    pytest.param(shell, marks=pytest.mark.needs(shell)) for shell in ("fish", "ksh", "tcsh", "zsh")
]
SIGNS = " \"'`$\\!*?[]{}()<>|&;#~=%@^-+,.:/aZ09\u00e9\u4e2d\U0001f600"
WORDS = [
    "",
    "-",
    "--option=x",
    "$(touch /tmp/never)",
    "`id`",
    "a;b",
    "a&&b",
    "${HOME}",
    "~",
    "~root",
    "!!",
    "it's",
    "\\",
    "\\\\'",
    "'\\''",
    "*",
    "if",
    "=ls",
    "%1",
    "^a^b",
    "a\u00a0b",
    "{a,b}",
    ">file",
    "#comment",
    "a b  c",
]


def _taken_apart(shell: str, argv: list[str]) -> list[str]:
    """What the shell makes of the line; `printf` writes each word with an end that no word can
    hold.
    """
    line = shell_command(["/usr/bin/printf", "%s\\0", *argv])
    done = subprocess.run([shell, "-c", line], capture_output=True, timeout=60, check=True)
    return done.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize("shell", SHELLS)
def test_known_dangers(shell: str) -> None:
    assert _taken_apart(shell, WORDS) == WORDS


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("seed", range(3))
def test_random_words(shell: str, seed: int) -> None:
    chance = random.Random(seed)
    words = ["".join(chance.choices(SIGNS, k=chance.randrange(12))) for _ in range(1000)]
    assert _taken_apart(shell, words) == words


@pytest.mark.parametrize("program", ["if", "while", "echo hello", "$SHELL", "a=b"])
def test_the_first_word_is_a_program_and_nothing_else(program: str) -> None:
    done = subprocess.run(
        ["sh", "-c", shell_command([program])], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 127, done


@pytest.mark.parametrize("word", ["a\nb", "a\rb", "\0", "\x1b[0m", "\x7f", "\udc80"])
def test_what_no_shell_can_be_given(word: str) -> None:
    with pytest.raises(JobError, match="control character"):
        shell_command(["true", word])


@pytest.mark.parametrize("argv", [[], [""], ["-c", "x"]])
def test_no_program(argv: list[str]) -> None:
    with pytest.raises(JobError, match="is not a command"):
        shell_command(argv)
