"""Download of a published file.

Law: the file appears under its name only when it is complete and has its checksum. A partial
download is kept beside it and resumed by the next call.
"""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from pathlib import Path

from poseidon.base.durable import replace_durably
from poseidon.caffe.data.progress_reports import DOWNLOADING, Report, silent

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
        ConnectionError: the network or the server cannot be reached, the connection broke, or the
            checksum is wrong. A partial download is kept for the next call.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.partial")
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
    for name, expected in (("md5", md5), ("sha1", sha1), ("sha256", sha256)):
        if expected and (found := file_digest(part, name)) != expected:
            part.unlink()
            raise ConnectionError(
                f"{url} is not the published file: its {name} is {found}, not {expected}"
            )
    replace_durably(part, target)


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
    """Append the rest of `url` to `part`, or download it again if the server does not support
    ranges.
    """
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
