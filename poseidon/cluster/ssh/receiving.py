"""The receiving side of a delivery, which runs on the host: inspects files, and gives complete
ones their names.

It is sent to the interpreter's standard input (`sent_program_arguments`), so it uses the standard
library only: no package need be installed. The request follows as one JSON document, and the answer
goes to standard output as one. Paths are in the request only, never in argv.

Law: a file gets its name when it is complete and its SHA-256 equals the request's; until then it is
`.<name>.arriving` in the same folder. A file that is there and differs is reported, and removed
only on request.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from typing import Any

ARRIVING = ".%s.arriving"
# Files that databases keep while they are open.
TRANSIENT = ("lock.mdb", "LOCK", "LOG", "LOG.old")


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Carry out a request.

    Args:
        request: `do` is `inspect` or `seal`; `files` lists `path`, `size` and `sha256` of each;
            `folders` those that hold nothing but these files; `replace` whether to remove files
            that differ.

    Returns:
        `problem`, a sentence; or, to `inspect`, `files` with `path`, `state` and `arrived` bytes
        with their `sha256` of each, and `free` bytes; or, to `seal`, `bad`, the numbers of files
        with a wrong checksum.
    """
    try:
        if request["do"] == "seal":
            return {
                "bad": [number for number, file in enumerate(request["files"]) if not _seal(file)]
            }
        return _inspect(request)
    except OSError as error:
        return {"problem": f"{error.filename or 'a file'}: {error.strerror or error}"}


def _inspect(request: dict[str, Any]) -> dict[str, Any]:
    files = [
        dict(file, path=os.path.abspath(os.path.expanduser(file["path"])))
        for file in request["files"]
    ]
    others = _other_files(request["folders"], {file["path"] for file in files})
    states = [_state(file) for file in files]
    others += [file["path"] for file, state in zip(files, states, strict=True) if state == "other"]
    if others and not request["replace"]:
        return {"problem": f"{others[0]} is there already and differs; --replace overwrites it"}
    for path in others:
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
    same = (
        os.path.isfile(path)
        and os.path.getsize(path) == file["size"]
        and digest(path) == file["sha256"]
    )
    return "same" if same else "other"


def _other_files(folders: list[str], expected: set[str]) -> list[str]:
    """List the other files in folders that are to hold the expected files only."""
    found = []
    for folder in folders:
        folder = os.path.abspath(os.path.expanduser(folder))
        if os.path.lexists(folder) and not os.path.isdir(folder):
            found.append(folder)
        for place, _, names in os.walk(folder):
            paths = [os.path.join(place, name) for name in names if name not in TRANSIENT]
            found += [
                path for path in paths if path not in expected and not path.endswith(".arriving")
            ]
    return sorted(found)


def _seal(file: dict[str, Any]) -> bool:
    """Give a file its name; return False where its checksum is wrong, and remove it then."""
    arriving = arriving_path(file["path"])
    if not os.path.exists(arriving) and _state(file) == "same":
        return True  # sealed by a request whose answer was lost
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
    """Return the path of a file until it is complete."""
    folder, name = os.path.split(path)
    return os.path.join(folder, ARRIVING % name)


def digest(path: str) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    state = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            state.update(block)
    return state.hexdigest()


if __name__ == "__main__":
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
