"""The shell blocks of a page, run from top to bottom as a reader types them.

A page runs in a copy of the checkout, with a home folder of its own. Each block begins at the top
of the copy; the blocks of `CONTINUED` begin where the last one ended. What differs from a reader's
machine:

* The reader's own files (`solver.prototxt`, `net.prototxt`, `cluster`, `train.py`, ...) are small
  ones, made here.
* All machines are this one: `machinefiles/four_nodes.example` has two clients on it.
* `poseidon train` gets flags for two iterations without tests, unless the job is `BACKGROUND`.
* `pip install` installs nothing: what it asks for must be installed.
* `REPLACED`: names that stand for the reader's job or file, and numbers that are large.
* `BEFORE`: commands that the page expects to have been run.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import cv2
import numpy as np
import torch

import poseidon.pycaffe as caffe
from website.blocks import ROOT, Block, blocks

WAIT_S = 1200
COPIED = (
    "poseidon",
    "ps_server",
    "prototxt",
    "examples",
    "machinefiles",
    "scripts",
    "data",
    "models",
)
CONTINUED = {"docs/tutorial.md"}
BACKGROUND = "python -m poseidon train --solver=solver.prototxt --hostfile=machinefile --max_iter=10000000 --background"
NEWEST = "$(ls -t output | head -1)"
OLDEST = "$(ls -t output | tail -1)"
OR_NOTHING = "|| test $? = 1"
"""Where there is no GPU, or no job is left."""
CIFAR10 = "python -m poseidon prepare_cifar10"
TRAINED = "poseidon train --solver=solver.prototxt"
BEFORE = {
    "docs/caffe_jobs.md": (TRAINED,),
    "docs/from_poseidon.md": (BACKGROUND,),
    "docs/operations.md": (
        "python -m poseidon train --solver=solver.prototxt --max_iter=110 --trace",
        BACKGROUND,
    ),
    "docs/reliability.md": (TRAINED,),
    "docs/schedulers/README.md": (CIFAR10,),
    "docs/spreading_data.md": (CIFAR10,),
}
REPLACED: dict[str, tuple[tuple[str, str], ...]] = {
    "docs/caffe2.md": (("two_class data/", "two_class data/ --count=8 --test_count=4"),),
    "docs/caffe_jobs.md": (("JOB", NEWEST), ("device_query", f"device_query {OR_NOTHING}")),
    "docs/from_poseidon.md": (("kill JOB", f"kill {NEWEST} {OR_NOTHING}"),),
    "docs/metrics.md": (("--metrics_port=9400", "--metrics_port=0"),),
    "docs/operations.md": (
        ("kill FILE", f"kill FILE {OR_NOTHING}"),
        ("kill JOB --hostfile=FILE", f"kill JOB --hostfile=FILE {OR_NOTHING}"),
        ("kill --all", f"kill --all {OR_NOTHING}"),
        ("JOB --trace", f"{OLDEST} --trace"),
        ("JOB --picture", f"{OLDEST} --picture"),
        ("JOB", NEWEST),
        ("FILE", "machinefile"),
        ("--worker=3", "--worker=1"),
    ),
    "docs/reliability.md": (("JOB", NEWEST),),
    "docs/schedulers/README.md": (
        (
            "quick_solver.prototxt",
            "quick_solver.prototxt --max_iter=2 --set=test_initialization=false",
        ),
    ),
    "docs/torch_resume.md": (("output/JOB", f"output/{NEWEST}"),),
    "docs/tutorial.md": (
        ("kill JOB", f"kill {NEWEST} {OR_NOTHING}"),
        ("--snapshot=JOB", f"--snapshot={NEWEST}"),
        ("MODEL", "$(ls -t output/*/*.caffemodel | head -1)"),
        ("-iterations 100", "-iterations 1"),
        ("--hostfile=cluster", '--hostfile="$TOP/cluster"'),
    ),
    "examples/torch_cnn/README.md": (("run.sh", "run.sh --epochs=1 --records=128"),),
    "examples/transformer/README.md": (("run.sh", "run.sh --steps=2 --width=32"),),
}
HOSTS = "0 127.0.0.1 0\n1 127.0.0.1 0\n"
DATA = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 4 dim: 3 dim: 8 dim: 8 } shape { dim: 4 } data_filler { type: "gaussian" } data_filler { type: "constant" } } }
"""
INPUT = 'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 8 dim: 8 } } }\n'
BODY = """
layer { name: "pool" type: "Pooling" bottom: "data" top: "pool" pooling_param { pool: AVE global_pooling: true } }
layer { name: "fc8" type: "InnerProduct" bottom: "pool" top: "fc8"
  inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
"""
LOSS = 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "fc8" bottom: "label" top: "loss" }\n'
SOFTMAX = 'layer { name: "prob" type: "Softmax" bottom: "fc8" top: "prob" }\n'
FROM_DATABASE = """
layer { name: "data" type: "Data" top: "data" top: "label" data_param { source: "train_lmdb" batch_size: 4 backend: LMDB } }
"""
SOLVER = 'net: "net.prototxt" base_lr: 0.01 lr_policy: "fixed" max_iter: 4 display: 1 random_seed: 1 solver_mode: CPU\n'
PROGRAM = """
from collections import OrderedDict

import torch
from torch.utils.data import DataLoader

import poseidon

torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(128, 4), torch.arange(128) % 2)
criterion = torch.nn.CrossEntropyLoss()


def build_model():
    return torch.nn.Sequential(OrderedDict(body=torch.nn.Linear(4, 4), head=torch.nn.Linear(4, 2)))


def example():
    return build_model(), (torch.randn(32, 4),)


"""
TRAINING = """
if __name__ == "__main__":
    model = build_model()
    with poseidon.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1)) as group:
        for x, y in DataLoader(dataset, batch_size=32, sampler=group.sampler(dataset)):
            criterion(model(x), y).backward()
            group.step()
"""
TRAINED_BY_PAGE = {"README.md", "docs/torch_modules.md", "docs/torch_resume.md"}
"""Pages whose first block of Python is the program."""
POSEIDON = """#!{python}
import sys
from pathlib import Path

words = sys.argv[1:]
if words[:1] == ["train"]:
    trained = Path("{folder}/trained")
    last = int(trained.read_text()) + 2 if trained.exists() else 2
    trained.write_text(str(last))
    words += [f"--max_iter={{last}}", "--display=1"]
    (solver,) = [word.partition("=")[2] for word in words if word.startswith("--solver=")]
    if "test_iter" in Path(solver).read_text():
        words += ["--test_interval=1000", "--set=test_initialization=false"]
from poseidon.cli.main import main

sys.exit(main(words))
"""


PIP = """#!/bin/sh
shift
exec python -m pip install --quiet --dry-run --no-index "$@"
"""


def run_page(page: str, folder: Path) -> list[Block]:
    """Run the blocks of a page that are not marked.

    Returns:
        these blocks.

    Raises:
        AssertionError: a command fails; the text has the block and the end of the output.
    """
    top = folder / "checkout"
    found = [block for block in blocks(page) if not block.reason and not block.test]
    prepare(page, top, folder)
    (folder / "page.sh").write_text("\n".join(script(page, found)), encoding="utf-8")
    shell = subprocess.Popen(
        ["bash", str(folder / "page.sh")],
        cwd=top,
        env=environment(folder, top),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = shell.communicate(timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(shell.pid, signal.SIGTERM)  # a job's launcher ends its processes
        output, _ = shell.communicate(timeout=60)
    place = re.findall(r"^@@ (.*)$", output, re.MULTILINE)[-1:]
    assert shell.returncode == 0, f"{place}: exit code {shell.returncode}\n{output[-3000:]}"
    return found


def script(page: str, found: Iterable[Block]) -> list[str]:
    """Return the lines of the page's program for bash."""
    lines = [
        "set -e",
        "trap 'python -m poseidon kill --all || true' EXIT",
        'TOP="$PWD"',
        *BEFORE.get(page, ()),
    ]
    for block in found:
        text = block.text
        for old, new in REPLACED.get(page, ()):
            text = text.replace(old, new)
        lines += ["" if page in CONTINUED else 'cd "$TOP"', f"echo '@@ {page}:{block.line}'", text]
    return lines


def prepare(page: str, top: Path, folder: Path) -> None:
    """Make the copy of the checkout, with the reader's files."""
    for name in COPIED:
        shutil.copytree(ROOT / name, top / name)
    (top / "tests").symlink_to(ROOT / "tests")
    (top / "machinefiles" / "four_nodes.example").write_text(HOSTS, encoding="utf-8")
    program = PROGRAM + TRAINING
    if page in TRAINED_BY_PAGE:
        (code, *_) = re.findall(
            r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL
        )
        program = PROGRAM + code.replace("90", "2")
    texts = {
        **dict.fromkeys(("machinefile", "cluster", "hosts", "machines"), HOSTS),
        "net.prototxt": 'name: "small"' + DATA + BODY + LOSS,
        "train_val.prototxt": FROM_DATABASE + BODY + LOSS,
        "deploy.prototxt": 'name: "small"\n' + INPUT + BODY + SOFTMAX,
        "solver.prototxt": SOLVER,
        "train.py": program,
    }
    for name, text in texts.items():
        (top / name).write_text(text, encoding="utf-8")
    net = caffe.Net(str(top / "deploy.prototxt"), caffe.TEST)
    for name in ("model.caffemodel", "net.caffemodel"):
        net.save(str(top / name))
    torch.save({"fc.weight": torch.ones(2, 3), "fc8.bias": torch.ones(2)}, top / "weights.pth")
    for kind in ("cats", "dogs"):
        (top / "pictures" / "train" / kind).mkdir(parents=True)
        cv2.imwrite(str(top / "pictures" / "train" / kind / "1.png"), np.zeros((8, 8, 3), np.uint8))
    programs = folder / "bin"
    programs.mkdir()
    (programs / "poseidon").write_text(
        POSEIDON.format(python=sys.executable, folder=folder), encoding="utf-8"
    )
    (programs / "pip").write_text(PIP, encoding="utf-8")
    for program in programs.iterdir():
        program.chmod(0o755)


def environment(folder: Path, top: Path) -> dict[str, str]:
    """Return the environment of a page: the programs, a home folder, and one thread a process."""
    home = folder / "home"
    home.mkdir()
    path = os.pathsep.join(
        (str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"])
    )
    own = {
        "HOME": str(home),
        "POSEIDON_HOME": str(home / ".poseidon"),
        "PYTHONPATH": str(top),
        "PATH": path,
    }
    return {**os.environ, **own, "OMP_NUM_THREADS": "1"}
