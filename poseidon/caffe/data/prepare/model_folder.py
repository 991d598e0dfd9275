"""The published weights of a model zoo folder, as described in its readme.

    ---
    name: BAIR/BVLC CaffeNet Model
    caffemodel: bvlc_reference_caffenet.caffemodel
    caffemodel_url: http://dl.caffe.berkeleyvision.org/bvlc_reference_caffenet.caffemodel
    sha1: 4c8d77deb20ea792f84eb5e6d0a11ca0a8660a46
    ---

Law: a model appears under its name only after its checksum has been verified.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from poseidon.base.hints import own_command, short_path
from poseidon.caffe.data.prepare.download import download, file_digest
from poseidon.caffe.data.progress_reports import Report, silent
from poseidon.errors import DataError

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
