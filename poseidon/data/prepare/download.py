"""Fetching one published file.

Law: the file appears under its name only when its checksum is right. What a broken connection left behind is kept
beside it and gone on from the next time.
"""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from pathlib import Path

from poseidon.data.progress import DOWNLOADING, Report, silent

CHUNK_BYTES = 1 << 16
# A connection that is cut is taken up again this often, as long as each try brings something.
TRIES = 5
# Name look-up and connecting; a first run without a network must not wait long for its pictures.
TIMEOUT_S = 10.0
RANGE_NOT_SATISFIABLE = 416


def download(
    url: str,
    target: Path,
    *,
    md5: str = "",
    sha1: str = "",
    report: Report = silent,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Fetch `url` to `target`, which need not have a folder yet.

    Args:
        md5: checksum of the whole file, in hex; or
        sha1: that one.
        report: told how many bytes have come, of how many (0 when the server does not say).
        timeout_s: for connecting, and for every wait for more bytes.

    Raises:
        ConnectionError: the network or the server is not there, broke off, or sent another file. Bytes that
            may still be of use are kept for the next call.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.partial")
    for left in reversed(range(TRIES)):
        before = _size(part)
        try:
            _fetch(url, part, report, timeout_s)
            break
        except (OSError, http.client.HTTPException) as error:
            if left == 0 or _size(part) <= before:
                raise ConnectionError(f"{url} cannot be fetched: {_reason(error)}") from error
    kind, expected = ("sha1", sha1) if sha1 else ("md5", md5)
    found = file_digest(part, kind)
    if found != expected:
        part.unlink()
        raise ConnectionError(f"{url} is not the published file: its {kind} is {found}, not {expected}")
    part.replace(target)


def file_md5(path: Path) -> str:
    """Return the md5 of a file, in hex."""
    return file_digest(path, "md5")


def file_digest(path: Path, kind: str) -> str:
    """Return a checksum of a file, in hex; `kind` is `md5` or `sha1`."""
    with path.open("rb") as file:
        digest = hashlib.new(kind, usedforsecurity=False)
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: Exception) -> str:
    reason: object = error
    if isinstance(error, urllib.error.URLError) and not isinstance(error, urllib.error.HTTPError):
        reason = error.reason
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror  # without its number
    return str(reason) or type(error).__name__


def _fetch(url: str, part: Path, report: Report, timeout_s: float) -> None:
    """Append to `part` what is missing of `url`; start anew when the server cannot go on in the middle."""
    done = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == RANGE_NOT_SATISFIABLE:
                return  # nothing is missing; if it is the wrong file, the checksum will tell
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
        raise ConnectionError(f"the connection broke off after {done} of {expected} bytes")
