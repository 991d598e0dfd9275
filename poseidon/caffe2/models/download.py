"""Download of trained models of Caffe2: two nets and the shapes of the inputs.

    python -m poseidon.caffe2.models.download --install squeezenet

A model comes from `$CAFFE2_MODELS_URL/<model>`, by default Caffe2's zoo; `file:///...` is legal.

Law: a folder of a model has all its files, or is not there. A file must have its checksum in the
`SHA256SUMS` beside it (as `sha256sum` writes it), where the server has that, and be a net.

The folder of trained models: `$CAFFE2_MODELS`, by default `~/.caffe2/models`.

A model is a folder with `init_net.pb`, `predict_net.pb` and, except for old ones,
`value_info.json`, the types and shapes of its inputs.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from poseidon.base.settings import model_zoo
from poseidon.base.text_files import visible_line
from poseidon.caffe.data.prepare.download import NotOnServerError, download
from poseidon.caffe2.proto.caffe2_pb2 import NetDef
from poseidon.errors import DataError, PoseidonError, UsageError

NETS = ("predict_net.pb", "init_net.pb")
VALUE_INFO = "value_info.json"
ZOO = (
    *("bvlc_alexnet", "bvlc_googlenet", "bvlc_reference_caffenet", "bvlc_reference_rcnn_ilsvrc13"),
    *("densenet121", "finetune_flickr_style", "inception_v1", "inception_v2", "mobilenet_v2"),
    *("resnet50", "squeezenet", "vgg16", "vgg19", "zfnet512"),
)
"""Models of Caffe2's zoo, whose absence is explained where a script imports them."""


def models_folder(variable: str = "CAFFE2_MODELS") -> Path:
    """Return the folder of trained models that a variable names; see the module."""
    return model_zoo(variable)[0]


def is_name(name: str) -> bool:
    """Return whether a name may be a model's: letters, digits, `_`, `-`, and `/` inside."""
    return name != "__init__" and re.fullmatch(r"[\w-]+(/[\w-]+)*", name, re.ASCII) is not None


def is_model(folder: Path) -> bool:
    """Return whether a folder has the nets of a model."""
    return all((folder / name).is_file() for name in NETS)


def read_model(folder: Path) -> tuple[NetDef, NetDef, dict[str, Any]]:
    """Return the init net of a model, the net that predicts, and the types and shapes of its
    inputs, as in {"data": [1, [1, 3, 224, 224]]}; empty where the model has none.

    Raises:
        DataError: a file is missing or damaged.
    """
    info = folder / VALUE_INFO
    try:
        shapes = json.loads(info.read_bytes()) if info.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{info} cannot be read as shapes of inputs: {error}") from error
    return read_net(folder / "init_net.pb"), read_net(folder / "predict_net.pb"), shapes


def read_net(path: Path) -> NetDef:
    """Return the net of a file.

    Raises:
        DataError: it is missing or damaged.
    """
    try:
        net = NetDef.FromString(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except DecodeError as error:
        raise DataError(f"{path} is not a net of Caffe2") from error
    if not net.op:
        raise DataError(f"{path} is not a net of Caffe2: it has no operators")
    return net


SUMS = "SHA256SUMS"
_COLUMNS = 70


def getURLFromName(name: str, filename: str) -> str:
    """Return the address of a file of a model."""
    return f"{model_zoo()[1]}/{name}/{filename}"


def validModelName(name: str) -> bool:
    """Return whether a name may be a model's."""
    return is_name(name)


def progressBar(percentage: float) -> None:
    """Draw a bar over the earlier one.

    Args:
        percentage: 0 to 100; the line ends at 100.
    """
    full = int(_COLUMNS * percentage / 100)
    end = "\n" if percentage >= 100 else ""
    print(f"\r|{'#' * full}{' ' * (_COLUMNS - full)}| {percentage:3.0f} %", end=end, flush=True)


def downloadFromURLToFile(
    url: str, filename: str | Path, show_progress: bool = True, *, sha256: str = ""
) -> None:
    """Download a file. A connection that breaks is taken up again.

    Args:
        url: its address.
        filename: where it is written.
        show_progress: draw a bar on standard output.
        sha256: its checksum in hex; empty: it is not checked.

    Raises:
        ConnectionError: the server cannot be reached or has no such file, or the checksum is wrong.
        OSError: the file cannot be written.
    """
    drawn = -1

    def draw(_: str, done: int, total: int) -> None:
        nonlocal drawn
        share = 100 * done // total if total else 0
        if show_progress and share > drawn:
            progressBar(share)
            drawn = share

    if show_progress:
        print(f"Downloading {visible_line(url)}")
    download(url, Path(filename), sha256=sha256, report=draw)


def deleteDirectory(top_dir: str | Path) -> None:
    """Delete a folder with all that it contains."""
    shutil.rmtree(top_dir)


def fetch_model(model: str, folder: Path, *, force: bool = False, progress: bool = True) -> bool:
    """Download a model, unless it is there already.

    Args:
        model: its name.
        folder: has its files afterwards.
        force: replace what is there.
        progress: draw bars on standard output.

    Returns:
        whether something was downloaded.

    Raises:
        DataError: a file cannot be downloaded or written, or is not what it should be.
        UsageError: the name is not legal.
    """
    if not is_name(model):
        raise UsageError(f"'{model}' is not the name of a model; use one such as squeezenet")
    if is_model(folder) and not force:
        return False
    if folder.exists() and not force:
        raise DataError(f"{folder} exists and is not a model; remove it, or use --force")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as partial:
            made = Path(partial, folder.name)
            made.mkdir()
            _fetch(model, made, progress)
            read_model(made)
            if folder.is_dir():
                deleteDirectory(folder)
            made.replace(folder)
    except ConnectionError as error:
        raise DataError(
            f"{error}; set CAFFE2_MODELS_URL to an address that has {model}/{NETS[0]}, or copy the "
            f"model's files to {folder}"
        ) from error
    except OSError as error:
        raise DataError(f"cannot write {folder}: {error.strerror or error}") from error
    return True


def _fetch(model: str, folder: Path, progress: bool) -> None:
    """Download the files of a model to an empty folder, and check them."""
    sums = _checksums(model, folder)
    for name in (*NETS, VALUE_INFO):
        try:
            downloadFromURLToFile(
                getURLFromName(model, name), folder / name, progress, sha256=sums.get(name, "")
            )
        except NotOnServerError:
            if name in NETS or name in sums:
                raise


def _checksums(model: str, folder: Path) -> dict[str, str]:
    """Return the published checksums by file; none where the server has none."""
    path = folder / SUMS
    try:
        downloadFromURLToFile(getURLFromName(model, SUMS), path, False)
    except NotOnServerError:
        return {}
    text = path.read_text(encoding="utf-8", errors="replace")
    sums = {
        name: digest.lower()
        for digest, name in re.findall(r"^([0-9a-fA-F]{64}) [ *](\S+)$", text, re.MULTILINE)
    }
    missing = [name for name in NETS if name not in sums]
    if missing:
        raise ConnectionError(f"{getURLFromName(model, SUMS)} has no checksum of {missing[0]}")
    return sums


class ModelDownloader:
    """Trained models from their folder, downloaded at their first use."""

    def __init__(self, model_env_name: str = "CAFFE2_MODELS") -> None:
        """Name the environment variable that has the folder of the models."""
        self._models = models_folder(model_env_name)

    def get_c2_model(self, model: str) -> tuple[NetDef, NetDef, dict[str, Any]]:
        """Return the init net of a model, the net that predicts, and the types and shapes of its
        inputs, as in {"data": [1, [1, 3, 224, 224]]}; empty where the model has none.

        Raises:
            DataError: the model is not there and cannot be downloaded, or a file is damaged.
            UsageError: the name is not legal.
        """
        fetch_model(model, self._models / model, progress=False)
        return read_model(self._models / model)


def main(arguments: Sequence[str] | None = None) -> int:
    """Download models; return the exit code."""
    parser = argparse.ArgumentParser(
        description="Download trained models of Caffe2",
        epilog="$CAFFE2_MODELS_URL is the address of the models (http, https or file), in place of "
        "Caffe2's own.",
    )
    parser.add_argument("model", nargs="+", help="names of models, such as squeezenet")
    parser.add_argument(
        "-i",
        "--install",
        action="store_true",
        help="keep them in $CAFFE2_MODELS (default: ~/.caffe2/models), where scripts import them "
        "from; else in the current folder",
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace what is there")
    given = parser.parse_args(arguments)
    try:
        for model in given.model:
            folder = (models_folder() if given.install else Path()) / model
            fresh = fetch_model(model, folder, force=given.force)
            where = visible_line(str(folder))
            print(f"{model} is in {where}" if fresh else f"{model} is in {where} already")
    except PoseidonError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
