"""The feature-extraction example, as its README has it, and the names that the old wiki gives to
its parts.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from poseidon.caffe.data.prepare.download import read_model_folder
from tests.support.cifar10 import make_pictures

SHELL_BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
PARTS = ("data", "examples", "machinefiles", "poseidon", "prototxt", "ps_server", "scripts")


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> Path:
    """A checkout with 10 drawn pictures as its CIFAR-10, whose example trains for two
    iterations.
    """
    folder = tmp_path / "checkout"
    for part in PARTS:
        ignored = (
            "__pycache__",
            "*_lmdb",
            "*_leveldb",
            "_temp",
            "images",
            "mean.binaryproto",
            "SOURCE.txt",
        )
        shutil.copytree(repository / part, folder / part, ignore=shutil.ignore_patterns(*ignored))
    cifar10 = folder / "examples" / "cifar10"
    make_pictures(cifar10, 10)
    shutil.copytree(cifar10 / "train_lmdb", cifar10 / "cifar10_test_lmdb")
    (cifar10 / "train_lmdb").rename(cifar10 / "cifar10_train_lmdb")
    solver = folder / "examples" / "feature_extraction" / "cifar10_solver.prototxt"
    solver.write_text(re.sub(r"max_iter: \d+", "max_iter: 2", solver.read_text(encoding="utf-8")))
    (folder / "bin").mkdir()
    (folder / "bin" / "poseidon").write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m poseidon "$@"\n'
    )
    (folder / "bin" / "poseidon").chmod(0o755)
    return folder


@pytest.mark.thorough  # five commands, each of which has its tests
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_the_readme_works_line_by_line(checkout: Path) -> None:
    readme = (checkout / "examples" / "feature_extraction" / "README.md").read_text(
        encoding="utf-8"
    )
    commands = re.sub(r"_iter_\d+", "_iter_2", SHELL_BLOCK.findall(readme)[0])
    environment = {
        **os.environ,
        "PATH": f"{checkout / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{checkout}:{os.environ.get('PYTHONPATH', '')}",
        "POSEIDON_HOME": str(checkout / "home"),
        "POSEIDON_DATA": "",
    }
    done = subprocess.run(
        ["sh", "-e"], input=commands, cwd=checkout, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 pictures with 64 features each" in done.stdout
    features = sorted(path.name for path in (checkout / "examples" / "_temp").glob("features*"))
    assert features == ["features_0_0", "features_1_0"]


def test_the_models_folder_names_the_weights(repository: Path) -> None:
    folder = repository / "models" / "bvlc_reference_caffenet"
    model = read_model_folder(folder)
    assert model.path == folder / "bvlc_reference_caffenet.caffemodel"
    script = (repository / "scripts" / "extract_features.sh").read_text(encoding="utf-8")
    assert str(model.path.relative_to(repository)) in script


def test_the_mean_image_is_fetched_whole_or_not_at_all(repository: Path, tmp_path: Path) -> None:
    names = ["imagenet_mean.binaryproto", "synset_words.txt"]
    for name in (*names, "train.txt"):
        (tmp_path / name).write_text(name)
    with tarfile.open(tmp_path / "aux.tar.gz", "w:gz") as archive:
        for name in (*names, "train.txt"):
            archive.add(tmp_path / name, name)
    script = tmp_path / "ilsvrc12" / "get_ilsvrc_aux.sh"
    script.parent.mkdir()
    shutil.copy(repository / "data" / "ilsvrc12" / script.name, script)

    def fetch(name: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "URL": (tmp_path / name).as_uri()}
        return subprocess.run(
            ["sh", script], env=environment, capture_output=True, text=True, check=False
        )

    failed = fetch("absent.tar.gz")
    assert failed.returncode == 1
    assert re.fullmatch(
        r"get_ilsvrc_aux.sh: \S+ cannot be fetched; mean_value: .*\n", failed.stderr
    )
    assert [path.name for path in script.parent.iterdir()] == [script.name]
    assert fetch("aux.tar.gz").returncode == 0
    assert sorted(path.name for path in script.parent.iterdir()) == sorted([*names, script.name])
