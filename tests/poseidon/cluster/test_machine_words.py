"""The words after the port: what they mean, and that none can be taken for an option or a command."""

from __future__ import annotations

import pytest

from poseidon.cluster.machine_words import ClientRole, MachineWords, parse_words
from poseidon.errors import MachinefileError


def test_no_words_leave_everything_open() -> None:
    assert parse_words([], "hosts:1") == MachineWords()


def test_every_word() -> None:
    words = [
        "workdir=~/run",
        "role=worker",
        "user=ml-01",
        "ssh_port=2222",
        "gpus=0,3",
        "python=/opt/py3.11/bin/python",
    ]
    assert parse_words(words, "hosts:1") == MachineWords(
        role=ClientRole.WORKER,
        user="ml-01",
        ssh_port=2222,
        gpus="0,3",
        python="/opt/py3.11/bin/python",
        workdir="~/run",
    )


@pytest.mark.parametrize("word", ["python=python3.11", "python=~/venv/bin/python", "gpus=cpu"])
def test_other_legal_values(word: str) -> None:
    name, _, value = word.partition("=")
    assert getattr(parse_words([word], "hosts:1"), name) == value


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("user=-oProxyCommand=x", "is no user's name"),
        ("user=", "is no user's name"),
        ("user=a;b", "is no user's name"),
        ("user=a\x00", "is no user's name"),
        ("user=a\n", "is no user's name"),
        ("ssh_port=0", "ssh_port must be a port from 1 to 65535"),
        ("ssh_port=65536", "ssh_port must be a whole number"),
        ("ssh_port=-1", "ssh_port must be a whole number"),
        ("ssh_port=22;reboot", "ssh_port must be a whole number"),
        ("gpus=all", "expected device numbers"),
        ("gpus=", "expected device numbers"),
        ("gpus=0,", "expected device numbers"),
        ("gpus=0,00", "lists a device twice"),
        ("gpus=$(id)", "expected device numbers"),
        ("python=-c", "or a program's name"),
        ("python=~other/python", "or a program's name"),
        ("python=bin/python", "or a program's name"),
        ("python=/usr/bin/python|sh", "or a program's name"),
        ("workdir=relative", "expected a path from / or ~/ on"),
        ("workdir=~", "expected a path from / or ~/ on"),
        ("workdir=/a`id`", "expected a path from / or ~/ on"),
        ("workdir=/a'b", "expected a path from / or ~/ on"),
        ("pythn=python", "did you mean 'python='?"),
    ],
)
def test_mistakes(word: str, expected: str) -> None:
    with pytest.raises(MachinefileError) as caught:
        parse_words([word], "hosts:3")
    assert str(caught.value).startswith("hosts:3: ")
    assert expected in str(caught.value)


def test_each_word_stands_once() -> None:
    with pytest.raises(MachinefileError, match="a machine has one user"):
        parse_words(["user=a", "user=a"], "hosts:1")
