"""Download of a published file.

Law: the file appears under its name only when it is complete and has its checksum. A partial
download is kept beside it and resumed by the next call; two at once exclude each other.

The published weights of a model zoo folder, as described in its readme.

    ---
    name: BAIR/BVLC CaffeNet Model
    caffemodel: bvlc_reference_caffenet.caffemodel
    caffemodel_url: http://dl.caffe.berkeleyvision.org/bvlc_reference_caffenet.caffemodel
    sha1: 4c8d77deb20ea792f84eb5e6d0a11ca0a8660a46
    ---

Law: a model appears under its name only after its checksum has been verified.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import re
import shlex
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from poseidon.base.durable import replace_durably
from poseidon.base.paths import own_command, short_path
from poseidon.caffe.data.staging import DOWNLOADING, Report, silent
from poseidon.errors import DataError

CHUNK_BYTES = 1 << 16
# The number of attempts after a broken connection, as long as each receives something.
TRIES = 5
# The timeout of connecting and of each read. A first run without a network must not wait long.
TIMEOUT_S = 10.0
RANGE_NOT_SATISFIABLE = 416
# What servers answer for a file that they do not have; S3 answers 403 where it lists no folders.
NOT_THERE = (403, 404, 410)


class NotOnServerError(ConnectionError):
    """The server has no such file."""


def download(
    url: str,
    target: Path,
    *,
    md5: str = "",
    sha1: str = "",
    sha256: str = "",
    report: Report = silent,
) -> None:
    """Download `url` to `target`, and create its folder if needed.

    Args:
        md5, sha1, sha256: a checksum of the file, in hex; without any the file may be anything.
        report: called with the bytes received and the total (0 if the server does not send it).

    Raises:
        NotOnServerError: the server has no such file.
        ConnectionError: the network or the server cannot be reached, the connection broke, the
            checksum is wrong, or another process downloads it. A partial download is kept for the
            next call.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.partial")
    with _locked(part, url):
        _fetch_whole(url, part, report)
        for name, expected in (("md5", md5), ("sha1", sha1), ("sha256", sha256)):
            if expected and (found := file_digest(part, name)) != expected:
                part.unlink()
                raise ConnectionError(
                    f"{url} is not the published file: its {name} is {found}, not {expected}"
                )
        replace_durably(part, target)


@contextmanager
def _locked(part: Path, url: str) -> Iterator[None]:
    """Let no other process continue a partial download meanwhile; an empty one is removed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        lock = os.fdopen(os.open(part, flags, 0o666), "wb")
    except OSError as error:
        raise ConnectionError(f"{url} cannot be downloaded: {part}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConnectionError(
                f"{part} is being written by another process: wait for it, or stop it"
            ) from None
        except OSError:
            pass  # not every file system has locks
        try:
            yield
        finally:
            if not os.fstat(lock.fileno()).st_size:
                part.unlink(missing_ok=True)


def _fetch_whole(url: str, part: Path, report: Report) -> None:
    """Fetch what a partial download lacks, again while connections break."""
    for left in reversed(range(TRIES)):
        before = _size(part)
        try:
            _fetch(url, part, report)
            break
        except (OSError, ValueError, http.client.HTTPException) as error:
            # ValueError: it is not a URL
            if left == 0 or _size(part) <= before:
                kind = NotOnServerError if _is_not_there(error) else ConnectionError
                raise kind(f"{url} cannot be downloaded: {_reason(error)}") from error


def file_digest(path: Path, kind: str) -> str:
    """Return a checksum of a file, in hex; `kind` is a name of `hashlib`."""
    with path.open("rb") as file:
        digest = hashlib.new(kind, usedforsecurity=False)
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_not_there(error: Exception) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code in NOT_THERE
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return isinstance(reason, FileNotFoundError)  # of a file: address


def _reason(error: Exception) -> str:
    reason: object = error
    if isinstance(error, urllib.error.URLError) and not isinstance(error, urllib.error.HTTPError):
        reason = error.reason
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror  # without its number
    return str(reason) or type(error).__name__


def _fetch(url: str, part: Path, report: Report) -> None:
    """Append the rest of `url` to `part`, or download it anew from a server without ranges."""
    done = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == RANGE_NOT_SATISFIABLE:
                return  # the file is complete; the checksum decides whether it is the right one
            raise
    with response:
        if response.status != http.client.PARTIAL_CONTENT:
            done = 0
        expected = done + int(response.headers.get("Content-Length") or 0)
        with part.open("ab" if done else "wb") as file:
            while chunk := response.read(CHUNK_BYTES):
                file.write(chunk)
                done += len(chunk)
                report(DOWNLOADING, done, expected)
    if done < expected:
        raise ConnectionError(f"the connection broke after {done} of {expected} bytes")


README_NAMES = ("readme.md", "README.md", "Readme.md")
NEEDED = ("caffemodel", "caffemodel_url", "sha1")
MARK = "---"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """The path and the URL of a model's weights, and their checksum in hex."""

    path: Path
    url: str
    sha1: str


def read_model_folder(folder: Path) -> PublishedModel:
    """Read the description of a model from the readme of its folder.

    Raises:
        DataError: there is no readme, or it lacks a field.
    """
    readme = next((folder / name for name in README_NAMES if (folder / name).is_file()), None)
    if readme is None:
        raise DataError(f"{folder} is not a model folder: it has no readme.md")
    fields = front_matter(readme.read_text(encoding="utf-8-sig", errors="backslashreplace"))
    missing = [name for name in NEEDED if not fields.get(name)]
    if missing:
        raise DataError(
            f"{readme} has no {missing[0]}: expected {', '.join(NEEDED)} between two lines of "
            f"{MARK} at its start"
        )
    name, sha1 = fields["caffemodel"], fields["sha1"].lower()
    if Path(name).name != name:
        raise DataError(
            f"{readme}: caffemodel is '{name}', expected the name of a file in this folder"
        )
    if not re.fullmatch(r"[0-9a-f]{40}", sha1):
        raise DataError(f"{readme}: sha1 is '{sha1}', expected 40 hexadecimal digits")
    return PublishedModel(path=folder / name, url=fields["caffemodel_url"], sha1=sha1)


def how_to_fetch(path: Path) -> str:
    """Return the end of a sentence about a model that is missing: the command that fetches it.

    It is empty if no readme in its folder says where it is published.
    """
    try:
        model = read_model_folder(path.parent)
    except (DataError, OSError):
        return ""
    if model.path != path:
        return ""
    return f"; fetch it with: {own_command()} download_model_binary {shlex.quote(short_path(path.parent))}"


def front_matter(text: str) -> dict[str, str]:
    """Return the `key: value` lines between the first two lines of `---`."""
    parts = re.split(rf"^{MARK}[ \t]*$", text, maxsplit=2, flags=re.MULTILINE)
    if len(parts) < 3:
        return {}
    found = (line.partition(":") for line in parts[1].splitlines() if ":" in line)
    return {key.strip(): value.strip().strip("'\"") for key, _, value in found}


def is_complete(model: PublishedModel) -> bool:
    """Return whether the file exists and has the right checksum."""
    return model.path.is_file() and file_digest(model.path, "sha1") == model.sha1


def fetch_model(model: PublishedModel, report: Report = silent) -> None:
    """Download a model.

    Raises:
        DataError: the network or the server cannot be reached, or the checksum is wrong.
    """
    try:
        download(model.url, model.path, sha1=model.sha1, report=report)
    except (ConnectionError, ValueError) as error:
        raise DataError(str(error)) from error
