"""Projects (`poseidon init`): new folders with a net of the model zoo, to edit and to train; and
definitions as one text, for hosts that lack the files.

Law: a project needs only this package; the paths in its definitions are relative to its folder. No
file is overwritten.

Serialization of a solver and its nets to one text, for hosts that do not have the files.

Law: the remote host reads the same bytes. The text also holds the path of each file's folder,
relative to the current folder if it is below it, so that the remote host resolves a relative
`source` by the same rule (`poseidon.base.paths`).
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from poseidon.base.paths import portable, shipped_folder
from poseidon.caffe.proto.definition import (
    NetDefinition,
    SolverDefinition,
    parse_net,
    parse_solver,
    read_solver,
)
from poseidon.caffe.proto.text import read_content
from poseidon.errors import DataError, DefinitionError, UsageError

EXAMPLES = {
    "accelerate": ("poseidon run --ddp --hostfile=machinefile train.py",),
    "ddp": ("poseidon run --ddp --hostfile=machinefile train.py",),
    "huggingface": ("poseidon run --ddp --hostfile=machinefile train.py",),
    "lightning": ("poseidon run --hostfile=machinefile train.py",),
    "net_surgery": (
        "python convolve.py     # or: python convolve.py LENET.caffemodel OUT.caffemodel",
    ),
    "ray_train": ("python train.py",),
    "resnet50": (
        "poseidon make_db --generate=two_class data/",
        "python resnet50_trainer.py --train_data data/two_class_train --test_data "
        "data/two_class_val --num_labels 2 --epoch_size 640 --num_epochs 3 --batch_size 16 "
        "--base_learning_rate 0.001 --num_layers 18 --image_size 64 --image_scale 72",
    ),
    "torch_cnn": ("poseidon run --hostfile=machinefile train.py",),
    "torch_resume": ("poseidon run --hostfile=machinefile --max_restarts=1 train.py --lose_at=45",),
    "transformer": ("poseidon run --hostfile=machinefile train.py",),
}
"""The examples that are projects of their own, each with its commands."""
ZOO_FILES = {"net_surgery": ("lenet/lenet.prototxt",)}
"""The files of the zoo that an example needs."""
FIRST_SOLVER = {"cifar10": "cifar10_quick", "fcn": "fcn32s", "ssd": "shapes_ssd"}
"""The solver to train first in a folder with several; by default the one with the shortest name."""
DATA_COMMANDS = {
    "cifar10": "poseidon prepare_cifar10 --folder=.     # --data=DIR if you have CIFAR-10",
    "lenet": "poseidon convert_mnist --folder=. MNIST   # MNIST: the folder of the four published "
    "files",
    "mnist_autoencoder": "poseidon convert_mnist --folder=. MNIST   # MNIST: the folder of the "
    "four published files",
    "siamese": "poseidon convert_mnist_siamese --folder=. MNIST   # MNIST: the folder of the four "
    "published files",
    "lstm": "python make_data.py",
    "hdf5_classification": "python make_data.py",
    "ssd": "python make_data.py",
}
CROPPED = 0.875
"""The part of an image that a crop takes: 224 of 256."""
WINDOWS = (
    "The definitions read a window file, `data/*_windows.txt`. `poseidon convert_voc` writes one "
    "of PASCAL VOC as `trainval_windows.txt`."
)
LISTS = "The definitions read the lists `data/*.txt`. A line has the paths of an image and of its label image."
DATA_NOTES = {
    "faster_rcnn": f"{WINDOWS}\nTraining starts from VGG-16 for ImageNet: `--weights=MODEL`.",
    "rfcn": f"{WINDOWS}\nTraining starts from ResNet-50 for ImageNet: `--weights=MODEL`.",
    "segnet": f"{LISTS}\nTraining starts from VGG-16 for ImageNet: `--weights=MODEL`.",
    "pspnet": LISTS,
    "fcn": "The definitions read databases of `poseidon convert_imageset`. Record k of a label "
    "database is one channel of class numbers\n(255: ignored), as large as image k. Training "
    "starts from VGG-16 as convolutions: `--weights=MODEL`.",
}
"""What nets read that need other data than a database of images with a label."""
SCRIPT_NOTES = {
    "net_surgery": "`convolve.py` turns LeNet's fully-connected layers into convolutions with the "
    "same weights\n(`lenet_conv.prototxt`), and compares both nets on a larger image. Without a "
    "model the weights are random.",
    "resnet50": "The log is written to this folder, a checkpoint of each epoch to "
    "`--file_store_path` (`/tmp`).\n"
    "`poseidon run --hostfile=machinefile resnet50_trainer.py` with the same flags trains on all "
    "hosts of `machinefile`,\none a line: `<id> <host> <port>`. `python resnet50_trainer.py --help` lists the flags.",
}
"""What the scripts do that start no job of themselves."""
CHECKOUT_LINES = re.compile(
    r"^(?:# A checkout works[^\n]*\n)?sys\.path(?:\.insert|\[:0\]).*?^use_environment\(\)\n\n",
    re.DOTALL | re.MULTILINE,
)
"""The lines with which a script finds its checkout; they are removed from a project's script."""


def projects() -> dict[str, Path]:
    """Return the folders of the model zoo and of the examples by name.

    Raises:
        UsageError: this installation has no model zoo.
    """
    shipped = shipped_folder()
    found = {path.parent.name: path.parent for path in sorted(shipped.glob("prototxt/*/README.md"))}
    if not found:
        raise UsageError(
            f"this installation has no model zoo: {shipped / 'prototxt'} is missing; install "
            "Poseidon again"
        )
    return {**found, **{name: shipped / "examples" / name for name in EXAMPLES}}


def project_files(name: str, source: Path) -> dict[str, str]:
    """Return the texts of a project's files by name."""
    texts = {path.name: _adapted(path) for path in sorted(source.glob("*.prototxt"))}
    for path in sorted(
        (shipped_folder() / "examples" / name).glob("*.py" if name in EXAMPLES else "make_data.py")
    ):
        texts[path.name] = CHECKOUT_LINES.sub("", _adapted(path))
    for file in ZOO_FILES.get(name, ()):
        path = shipped_folder() / "prototxt" / file
        texts[path.name] = _adapted(path)
    if name != "net_surgery":
        machinefile = shipped_folder() / "machinefiles" / "localserver"
        texts["machinefile"] = machinefile.read_text(encoding="utf-8")
    return {**texts, "README.md": _readme(name, source)}


def write_project(folder: Path, files: Mapping[str, str]) -> None:
    """Write files to a new or empty folder, all or none.

    Raises:
        UsageError: the folder is not empty or not a folder.
        DataError: it cannot be made.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists already and is not overwritten: name a different folder")
    try:
        _write_whole(folder.absolute(), files)
    except OSError as error:
        raise DataError(f"cannot make {folder}: {error.strerror}") from error


def _write_whole(folder: Path, files: Mapping[str, str]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        for name, text in files.items():
            (stage / name).write_text(text, encoding="utf-8")
        stage.chmod(0o755)
        stage.rename(folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _adapted(path: Path) -> str:
    """Return the text of a file of the zoo, with all paths relative to its folder."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"\b(?:prototxt|examples)/\w+/", "", text)
    text = text.replace("machinefiles/localserver", "machinefile")
    text = text.replace(
        "relative to the repository root; put absolute ones",
        "relative to this file; put absolute ones",
    )
    return text.replace(
        "a path from the repository root or an absolute one does as well",
        "an absolute path does as well",
    )


def project_title(folder: Path) -> str:
    """Return the first line of a folder's README."""
    return (folder / "README.md").read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def _solvers(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the solvers of a folder, each with the first line of its comment."""
    for path in sorted(
        folder.glob("*solver*.prototxt"), key=lambda path: (len(path.name), path.name)
    ):
        yield (
            path.name,
            path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ").rstrip(":."),
        )


def training_commands(name: str, folder: Path) -> list[str]:
    """Return the commands that train a project, to be run in its folder."""
    if name in EXAMPLES:
        return list(EXAMPLES[name])
    solvers = [solver for solver, _ in _solvers(folder)]
    first = next(
        (solver for solver in solvers if solver == f"{FIRST_SOLVER.get(name)}_solver.prototxt"),
        solvers[0],
    )
    data = [DATA_COMMANDS[name]] if name in DATA_COMMANDS else []
    return [*data, f"poseidon train --solver={first} --hostfile=machinefile"]


def _readme(name: str, folder: Path) -> str:
    """Return the README of a project, with the commands and the list of solvers."""
    commands = "\n".join(f"    {line}" for line in training_commands(name, folder))
    solvers = list(_solvers(folder))
    parts = [
        f"# {project_title(folder)}",
        f"Created by `poseidon init {name}`. Edit the files as you like. In this folder run:",
        commands,
    ]
    if solvers and name not in DATA_COMMANDS:
        parts.append(DATA_NOTES.get(name) or _own_data(folder))
    if solvers:
        rows = [f"| `{solver}` | {line} |" for solver, line in solvers]
        parts.append("\n".join(["| solver | |", "|---|---|", *rows]))
        parts.append(
            "A solver names its net; a net names its data and its batch size, which is per worker."
        )
        if any(
            "solver_mode: GPU" in (folder / solver).read_text(encoding="utf-8")
            for solver, _ in solvers
        ):
            parts[-1] += "\nOn a machine without a GPU add `--solver_mode=CPU`."
    parts.append(SCRIPT_NOTES.get(name) or _job_notes(trains=bool(solvers)))
    return "\n\n".join(parts) + "\n"


def _own_data(folder: Path) -> str:
    """Return what a README says of databases of images: the commands that make those that the
    definitions read.
    """
    texts = [_adapted(path) for path in sorted(folder.glob("*train*.prototxt"))]
    sources, means, crops = (
        list(dict.fromkeys(value for text in texts for value in re.findall(pattern, text)))
        for pattern in (r'source: "(.*)"', r'mean_file: "(.*)"', r"crop_size: (\d+)")
    )
    crop = max(map(int, crops), default=0)
    size = 256 if crop <= 256 else math.ceil(crop / CROPPED)
    resize = f"poseidon convert_imageset --resize_height={size} --resize_width={size}"
    commands = [
        f"{resize} {'PICTURES/ val.txt' if 'val' in source else '--shuffle PICTURES/ train.txt'} "
        f"{source}"
        for source in sources
    ]
    commands += [f"poseidon compute_image_mean {sources[0]} {mean}" for mean in means]
    return "\n\n".join(
        [
            "The definitions read databases of pictures. Make them first:",
            "\n".join(f"    {command}" for command in commands),
            "A line of the lists `train.txt` and `val.txt` has a path below PICTURES, a space and "
            "a class number from 0."
            + (f"\nPictures may not be smaller than `crop_size`, {crop}." if crop else ""),
        ]
    )


def _job_notes(*, trains: bool) -> str:
    """Return a README's notes on jobs of `poseidon train`, or of `poseidon run`, which has no
    curves to draw.
    """
    files = "Logs and snapshots" if trains else "Logs and checkpoints"
    curves = "; `poseidon plot -o curves.png` draws the curves of the last one" if trains else ""
    return (
        f"`machinefile` lists the hosts, one a line: `<id> <host> <port>`. {files} are in "
        f"`output/<job>/`.\n`poseidon {'train' if trains else 'run'} --help` lists the flags; "
        "`poseidon ps`, `logs` and `kill` manage running jobs.\n`poseidon dashboard` shows them on "
        f"a page{curves}.\nBefore you train on other hosts, `poseidon doctor "
        "--hostfile=machinefile` examines them."
    )


_NET_FILES = ("net", "train_net")


def pack_solver(path: Path, settings: Sequence[str] = ()) -> str:
    """Return a solver file and the net files that it names as one text.

    Args:
        settings: overrides for fields of the solver, which can name other nets. They are not part
            of the text.

    Raises:
        DefinitionError: one of them cannot be read.
    """
    solver = read_solver(path).with_settings(settings)
    named = [getattr(solver.param, name) for name in _NET_FILES if solver.param.HasField(name)]
    nets = {name: _packed(solver.resolve(name)) for name in [*named, *solver.param.test_net]}
    return json.dumps({**_packed(path), "nets": nets})


def unpack_solver(text: str) -> SolverDefinition:
    """Return the solver in a text that `pack_solver` returned.

    Raises:
        DefinitionError: the text is damaged, or a definition is wrong.
    """
    try:
        fields = json.loads(text)
        nets = {name: _net(net) for name, net in fields["nets"].items()}
        source, folder, content = _unpacked(fields)
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise DefinitionError("the definitions that the launcher sent are damaged") from error
    return parse_solver(content, source=source, folder=folder, nets=nets)


def _packed(path: Path) -> dict[str, str]:
    content = base64.b64encode(read_content(path)).decode()
    return {"source": str(path), "folder": portable(path.absolute().parent), "content": content}


def _unpacked(fields: Mapping[str, Any]) -> tuple[str, Path, bytes]:
    content = base64.b64decode(fields["content"], validate=True)
    return str(fields["source"]), Path(fields["folder"]).absolute(), content


def _net(fields: Mapping[str, Any]) -> NetDefinition:
    source, folder, content = _unpacked(fields)
    return parse_net(content, source=source, folder=folder)
