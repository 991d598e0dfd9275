"""The source archive and the wheel: what they hold, and a project that trains from an installed wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from email.parser import Parser
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77", reason="building the wheel takes setuptools 77 or newer")

pytestmark = pytest.mark.timeout(300)  # the first test builds the wheel

BUILD = "from setuptools.build_meta import build_sdist, build_wheel; build_{}('dist')"


def run(folder: Path, *words: str | Path, path: Path | None = None) -> str:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "POSEIDON_HOME": str(folder / "home")}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel that the source archive builds, installed."""
    folder = tmp_path_factory.mktemp("package")
    skipped = shutil.ignore_patterns(
        ".*", "*.egg-info", "build", "dist", "output", "__pycache__", "*_lmdb", "*_leveldb", "data", "tests"
    )
    shutil.copytree(
        repository,
        folder / "checkout",
        ignore=lambda at, names: skipped(at, names) - ({"data"} if at.endswith("poseidon") else set()),
    )
    run(folder / "checkout", "-c", BUILD.format("sdist"))
    (archive,) = (folder / "checkout" / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    (source,) = folder.glob("poseidon-*")
    run(source, "-c", BUILD.format("wheel"))
    (wheel,) = (source / "dist").glob("*.whl")
    run(
        folder,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        f"--target={folder / 'site'}",
        wheel,
    )
    return folder / "site"


def contents(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def test_the_metadata_is_complete(installed: Path) -> None:
    (info,) = installed.glob("poseidon-*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text(encoding="utf-8"))
    assert (metadata["Author"], metadata["License"]) == ("The Poseidon authors", "BSD-3-Clause")
    assert "Redistribution and use" in (info / "licenses" / "LICENSE").read_text(encoding="utf-8")
    versions = {name.rpartition(" ")[2] for name in metadata.get_all("Classifier") if "Python :: 3." in name}
    assert versions == {"3.10", "3.11", "3.12", "3.13"}
    assert metadata["Keywords"] and "# Poseidon" in metadata.get_payload()


@pytest.mark.processes
def test_a_project_trains_from_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    before = contents(installed)
    assert run(tmp_path, "-c", "import poseidon; print(poseidon.__file__)", path=installed).startswith(
        str(installed)
    )
    assert "cifar10 " in run(tmp_path, "-m", "poseidon", "init", path=installed)
    run(tmp_path, "-m", "poseidon", "init", "hdf5_classification", "mine", path=installed)
    mine = tmp_path / "mine"
    run(mine, "make_data.py", path=installed)
    solver = mine / "solver.prototxt"
    text = re.sub(
        r"^(max_iter|test_iter): \d+", r"\1: 3", solver.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    solver.write_text(text, encoding="utf-8")
    run(tmp_path, "-m", "poseidon", "train", f"--solver={solver}", path=installed)
    assert [path.name for path in tmp_path.rglob("*iter_3.caffemodel")]
    assert list(tmp_path.glob("output/*/worker_0.log"))
    assert contents(installed) == before
