"""`poseidon completion`: what bash offers, and that zsh takes the script."""

from __future__ import annotations

import subprocess

import pytest

from poseidon.cli.completion import bash_script, zsh_script


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("poseidon tr", "train"),
        ("poseidon train --exch", "--exchange_plan= --exchange="),
        ("poseidon train -exch", "-exchange_plan= -exchange="),
        ("poseidon train --exchange = h", "hybrid"),
        ("poseidon train -launcher s", "ssh"),
        ("poseidon completion z", "zsh"),
        ("poseidon worker --key_file f train --backg", "--background"),
        ("poseidon train --table_staleness = x", ""),
        ("poseidon train --client_i", ""),
    ],
)
def test_bash(words: str, offered: str) -> None:
    program = f'{bash_script()}\nCOMP_WORDS=({words}); COMP_CWORD={words.count(" ")}; _poseidon; echo "${{COMPREPLY[*]}}"'
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == (offered, "")


@pytest.mark.needs("zsh")
def test_zsh_reads_its_script() -> None:
    subprocess.run(["zsh", "-n"], input=zsh_script(), text=True, check=True, timeout=60)


def test_zsh_has_flags_with_their_help() -> None:
    script = zsh_script()
    assert (
        "'--exchange=[auto (default), hybrid, ps, svb, allreduce, local]:KIND:(auto hybrid ps svb "
        "allreduce local)'" in script
    )
    assert "'--solver=[the solver definition (prototxt)]:FILE:_files'" in script
