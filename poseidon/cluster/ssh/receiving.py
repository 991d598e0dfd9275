"""What a host does while files are delivered to it: says what it has, and gives what has come whole its name.

It runs there by `START`, which takes this file from standard input, so it knows Python alone: no package need be installed.
Then an order comes as one JSON document, and the answer goes as one to standard output. Paths come in the order only,
never in argv.

Law: a file gets its name when all of it is there and its SHA-256 is the order's; until then it is
`.<name>.arriving` beside it. What is there already and differs is told, and removed only if the order says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from typing import Any

START = "import sys; i = sys.stdin.buffer; exec(i.read(int(i.readline())))"
"""What the interpreter is given in argv; the number of this file's bytes and these follow on standard input."""
ARRIVING = ".%s.arriving"
# What databases keep beside their records while they are open; it comes and goes.
PASSING = ("lock.mdb", "LOCK", "LOG", "LOG.old")


def answer(order: dict[str, Any]) -> dict[str, Any]:
    """Carry out an order.

    Args:
        order: `do` is `inspect` or `seal`; `files` lists `path`, `size` and `sha256` of each; `folders` those that hold
            nothing but these files; `replace` whether what differs makes way.

    Returns:
        `problem`, a sentence; or, to `inspect`, `files` with `path`, `state` and `arrived` bytes with their
        `sha256` of each, and `free` bytes; or, to `seal`, `bad`, the numbers of files that came out wrong.
    """
    try:
        if order["do"] == "seal":
            return {"bad": [number for number, file in enumerate(order["files"]) if not _seal(file)]}
        return _inspect(order)
    except OSError as error:
        return {"problem": f"{error.filename or 'a file'}: {error.strerror or error}"}


def _inspect(order: dict[str, Any]) -> dict[str, Any]:
    files = [dict(file, path=os.path.abspath(os.path.expanduser(file["path"]))) for file in order["files"]]
    strangers = _strangers(order["folders"], {file["path"] for file in files})
    states = [_state(file) for file in files]
    strangers += [file["path"] for file, state in zip(files, states, strict=True) if state == "other"]
    if strangers and not order["replace"]:
        return {"problem": f"{strangers[0]} is there already and is something else"}
    for path in strangers:
        _remove(path)
    found = []
    for file, state in zip(files, states, strict=True):
        os.makedirs(os.path.dirname(file["path"]), exist_ok=True)
        arriving = arriving_path(file["path"])
        arrived = os.path.getsize(arriving) if os.path.isfile(arriving) and state != "same" else 0
        if arrived > file["size"]:
            os.remove(arriving)
            arrived = 0
        found.append(
            {
                "path": file["path"],
                "state": "same" if state == "same" else "missing",
                "arrived": arrived,
                "sha256": digest(arriving) if arrived else "",
            }
        )
    return {"files": found, "free": _free_bytes(files)}


def _state(file: dict[str, Any]) -> str:
    path = file["path"]
    if not os.path.lexists(path):
        return "missing"
    same = os.path.isfile(path) and os.path.getsize(path) == file["size"] and digest(path) == file["sha256"]
    return "same" if same else "other"


def _strangers(folders: list[str], expected: set[str]) -> list[str]:
    """What lies in folders that are to hold the expected files alone."""
    found = []
    for folder in folders:
        folder = os.path.abspath(os.path.expanduser(folder))
        if os.path.lexists(folder) and not os.path.isdir(folder):
            found.append(folder)
        for place, _, names in os.walk(folder):
            paths = [os.path.join(place, name) for name in names if name not in PASSING]
            found += [path for path in paths if path not in expected and not path.endswith(".arriving")]
    return sorted(found)


def _seal(file: dict[str, Any]) -> bool:
    """Give a file its name; False when its bytes are not those expected, and then they are gone."""
    arriving = arriving_path(file["path"])
    if not os.path.exists(arriving) and _state(file) == "same":
        return True  # sealed before, and the answer got lost
    if os.path.getsize(arriving) != file["size"] or digest(arriving) != file["sha256"]:
        os.remove(arriving)
        return False
    with open(arriving, "rb") as stream:
        os.fsync(stream.fileno())
    os.replace(arriving, file["path"])
    return True


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.remove(path)


def _free_bytes(files: list[dict[str, Any]]) -> int:
    places = {os.path.dirname(file["path"]) for file in files}
    return min((shutil.disk_usage(place).free for place in places), default=0)


def arriving_path(path: str) -> str:
    """What a file is called until all of it is there."""
    folder, name = os.path.split(path)
    return os.path.join(folder, ARRIVING % name)


def digest(path: str) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    state = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            state.update(block)
    return state.hexdigest()


if __name__ == "__main__":
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
