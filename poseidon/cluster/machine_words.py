"""The words after `<id> <host> <port>` on a machinefile's line: `key=value`, each at most once.

    role=server                 worker, server or both
    user=ml  ssh_port=2222      for SSH; without them ~/.ssh/config decides
    gpus=0,1                    devices of this machine's workers: numbers or cpu; without it --gpu decides
    python=/opt/ml/bin/python   the interpreter: a program's name, or a path, ~/ being the user's home
    workdir=~/poseidon          the folder in which the processes run

Law: no value that comes out of here begins with a dash or holds a blank, a quote or any other sign that means
something to a shell, so that none can be taken for an option or a command, however it is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum

from poseidon.errors import MachinefileError

HIGHEST_PORT = 65535
LAYOUT = "'<id> <host> <port>'"

_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}", re.ASCII)
_GPUS = re.compile(r"cpu|[0-9]{1,4}(,[0-9]{1,4})*", re.ASCII)
_PATH = re.compile(r"(~?/)[A-Za-z0-9_.+@,/-]{0,1000}", re.ASCII)
_PROGRAM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}", re.ASCII)


class ClientRole(Enum):
    """What a machine is for."""

    BOTH = "both"
    """Workers, and server shards beside them."""
    WORKER = "worker"
    """Workers alone; its port is not used."""
    SERVER = "server"
    """Server shards alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineWords:
    """What the words of one line say; `Client` has their meaning."""

    role: ClientRole = ClientRole.BOTH
    user: str | None = None
    ssh_port: int | None = None
    gpus: str | None = None
    python: str | None = None
    workdir: str | None = None


def parse_words(words: Sequence[str], place: str) -> MachineWords:
    """The words after the port.

    Args:
        words: as they stand in the line.
        place: file and line, for errors.

    Raises:
        MachinefileError: a word is unknown, stands twice, or has an impossible value.
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name not in _CHECKS or not equals:
            raise MachinefileError(f"{place}: {_extra_word(word)}")
        if name in found:
            raise MachinefileError(f"{place}: a machine has one {name}, found a second word {name}=")
        _CHECKS[name](value, place)
        found[name] = value
    return MachineWords(
        role=ClientRole(found.get("role", ClientRole.BOTH.value)),
        user=found.get("user"),
        ssh_port=int(found["ssh_port"]) if "ssh_port" in found else None,
        gpus=found.get("gpus"),
        python=found.get("python"),
        workdir=found.get("workdir"),
    )


def parse_number(word: str, what: str, highest: int | None = None) -> int:
    """A whole number, 0 or more.

    Args:
        word: the number as it stands in the line.
        what: begins the error, `FILE:LINE: the port`.
        highest: the largest that is legal, if there is one.

    Raises:
        MachinefileError: it is none.
    """
    if not _NUMBER.fullmatch(word) or (highest is not None and int(word) > highest):
        limits = "0, 1, 2, ..." if highest is None else f"0 to {highest}"
        raise MachinefileError(f"{what} must be a whole number ({limits}), not '{word}'")
    return int(word)


def _check_role(value: str, place: str) -> None:
    if value not in {role.value for role in ClientRole}:
        raise MachinefileError(f"{place}: 'role={value}' is no role; expected role=server, worker or both")


def _check_port(value: str, place: str) -> None:
    if not parse_number(value, f"{place}: ssh_port", highest=HIGHEST_PORT):
        raise MachinefileError(f"{place}: ssh_port must be a port from 1 to {HIGHEST_PORT}, not 0")


def _check_gpus(value: str, place: str) -> None:
    if not _GPUS.fullmatch(value):
        raise MachinefileError(f"{place}: 'gpus={value}': expected device numbers (gpus=0,1) or cpu")
    numbers = value.split(",")
    if len({number.lstrip("0") for number in numbers}) < len(numbers):
        raise MachinefileError(f"{place}: 'gpus={value}' lists a device twice")


def _check_user(value: str, place: str) -> None:
    if not _USER.fullmatch(value):
        raise MachinefileError(f"{place}: 'user={value}' is no user's name")


def _check_python(value: str, place: str) -> None:
    if not (_PROGRAM.fullmatch(value) or _PATH.fullmatch(value)):
        raise MachinefileError(f"{place}: 'python={value}': {_EXPECTED_PATH}, or a program's name")


def _check_workdir(value: str, place: str) -> None:
    if not _PATH.fullmatch(value):
        raise MachinefileError(f"{place}: 'workdir={value}': {_EXPECTED_PATH}")


_EXPECTED_PATH = "expected a path from / or ~/ on, of letters, digits and any of _ . + @ , / -"
_CHECKS: dict[str, Callable[[str, str], None]] = {
    "role": _check_role,
    "user": _check_user,
    "ssh_port": _check_port,
    "gpus": _check_gpus,
    "python": _check_python,
    "workdir": _check_workdir,
}


def _extra_word(word: str) -> str:
    name, equals, _ = word.partition("=")
    if not equals:
        return f"nothing known may follow {LAYOUT}, found '{word}'"
    near = get_close_matches(name, _CHECKS, n=1)
    return f"unknown word '{word}'" + (f"; did you mean '{near[0]}='?" if near else f" after {LAYOUT}")
