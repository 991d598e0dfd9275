"""`poseidon completion`: what bash offers, and that other shells take the script."""

from __future__ import annotations

import subprocess

import pytest

from poseidon.cli.completion import script
from poseidon.cli.parsers.watch import SHELLS


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("poseidon tr", "train"),
        ("poseidon train --exch", "--exchange_plan --exchange"),
        ("poseidon train --exchange h", "hybrid"),
        ("poseidon train --launcher s", "ssh"),
        ("poseidon completion z", "zsh"),
        ("poseidon train --staleness x", ""),
        ("poseidon train --client_i", ""),
    ],
)
def test_bash(words: str, offered: str) -> None:
    program = f'{script("bash")}\nCOMP_WORDS=({words}); COMP_CWORD={words.count(" ")}; _shtab_poseidon; echo "${{COMPREPLY[*]}}"'
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == (offered, "")


@pytest.mark.needs("zsh")
def test_zsh_reads_its_script() -> None:
    subprocess.run(["zsh", "-n"], input=script("zsh"), text=True, check=True, timeout=60)


def test_zsh_has_flags_with_their_help() -> None:
    said = script("zsh")
    assert "--solver[the solver definition (prototxt)]:FILE:_files" in said
    assert "(auto hybrid ps svb allreduce local)" in said


def test_each_shell_has_a_script() -> None:
    assert all("poseidon" in script(shell) for shell in SHELLS)
