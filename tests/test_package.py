"""The source archive and the wheel: what they hold, and a project that trains from an installed
wheel.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.shadowing_files import write_shadowing_files

pytest.importorskip(
    "setuptools", minversion="77", reason="building the wheel takes setuptools 77 or newer"
)

pytestmark = pytest.mark.timeout(300)  # the first test builds the wheel

CHECKED = (
    *(
        "torch",
        "numpy",
        "zmq",
        "msgpack",
        "google.protobuf",
        "lmdb",
        "cv2",
        "h5py",
        "matplotlib",
        "pydot",
        "paramiko",
        "cloudpickle",
    ),
    *("psutil", "shtab", "tqdm"),
)
"""The packages that Poseidon imports, by the names of their modules."""
COMPILER = """
import shutil, sys
shutil.copy({library!r}, sys.argv[sys.argv.index("-o") + 1])
"""
"""Stands for the C compiler, which takes ten seconds: its library is the checkout's, which is
refused unless the archive has the same sources.
"""
BUILD = (
    "from setuptools.build_meta import build_editable, build_sdist, build_wheel; build_{}('dist')"
)


def run(folder: Path, *words: str | Path, **variables: str) -> str:
    environment = {
        **os.environ,
        **variables,
        "PYTHONDONTWRITEBYTECODE": "1",
        "POSEIDON_HOME": str(folder / "home"),
    }
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel that the source archive builds, installed."""
    folder = tmp_path_factory.mktemp("package")
    skipped = shutil.ignore_patterns(
        ".*",
        "*.egg-info",
        "build",
        "dist",
        "output",
        "__pycache__",
        "*_lmdb",
        "*_leveldb",
        "data",
        "tests",
    )
    shutil.copytree(
        repository,
        folder / "checkout",
        ignore=lambda at, names: (
            skipped(at, names) - ({"data"} if at.endswith("poseidon/caffe") else set())
        ),
    )
    run(folder / "checkout", sys.executable, "-c", BUILD.format("sdist"))
    (archive,) = (folder / "checkout" / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    (source,) = folder.glob("poseidon-*")
    run(source, sys.executable, "-c", BUILD.format("wheel"), **_compiler(repository, folder))
    (wheel,) = (source / "dist").glob("*.whl")
    run(folder, sys.executable, "-m", "venv", "--without-pip", "venv")
    python = folder / "venv" / "bin" / "python"
    site = Path(
        run(folder, python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    quiet = ("--quiet", "--no-deps", "--no-index")
    run(folder, sys.executable, "-m", "pip", f"--python={python}", "install", *quiet, wheel)
    # The dependencies come from this environment; what its own .pth files add, such as a
    # checkout, is left out.
    (site / "dependencies.pth").write_text(
        "\n".join(sorted({str(path) for path in _dependencies()}))
    )
    return folder / "venv"


def _compiler(repository: Path, folder: Path) -> dict[str, str]:
    """Return the variable of a compiler that has the checkout's library ready, if there is one."""
    library, program = repository / "ps_server" / "native" / "codecs.so", folder / "cc.py"
    if not library.exists():
        return {}
    program.write_text(COMPILER.format(library=str(library)), encoding="utf-8")
    return {"CC": f"{sys.executable} {program}"}


def _dependencies() -> Iterator[Path]:
    """Yield the folders in which the packages are that Poseidon imports."""
    for name in CHECKED:
        found = find_spec(name)
        if found is not None and found.origin is not None:
            parents = Path(found.origin).parents
            yield parents[1] if found.submodule_search_locations else parents[0]


def site_of(installed: Path) -> Path:
    (site,) = installed.glob("lib/python*/site-packages")
    return site


def contents(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for name in ("poseidon", "ps_server")
        for path in sorted((folder / name).rglob("*"))
    }


def test_the_metadata_is_complete(installed: Path) -> None:
    (info,) = site_of(installed).glob("poseidon-*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text(encoding="utf-8"))
    assert (metadata["Author"], metadata["License"]) == ("The Poseidon authors", "BSD-3-Clause")
    assert "Redistribution and use" in (info / "licenses" / "LICENSE").read_text(encoding="utf-8")
    versions = {
        name.rpartition(" ")[2] for name in metadata.get_all("Classifier") if "Python :: 3." in name
    }
    assert versions == {"3.10", "3.11", "3.12", "3.13", "3.14"}
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["Keywords"] and "# Poseidon" in metadata.get_payload()
    core = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    extras = (
        "tensorboard",
        "redis",
        "starlette",
        "uvicorn",
        "onnx",
        "safetensors",
        "ray",
        "pytest",
    )
    assert not [line for line in core if line.startswith(extras)]
    for version in versions:
        needed = [
            one
            for one in map(Requirement, core)
            if not one.marker or one.marker.evaluate({"python_version": version})
        ]
        assert len([one.name for one in needed if one.name.startswith("plyvel")]) == 1, version
    assert set(metadata.get_all("Provides-Extra")) == {
        *(
            "all",
            "dashboard",
            "dev",
            "dev-all",
            "docs",
            "export",
            "gpu",
            "huggingface",
            "lightning",
            "ray",
            "ray-train",
            "redis",
            "tensorboard",
        )
    }


def test_the_wheel_has_what_the_checkout_has(installed: Path, repository: Path) -> None:
    site = site_of(installed)
    packages = ("poseidon", "ps_server")
    own = {
        path.relative_to(repository)
        for package in packages
        for path in (repository / package).rglob("*")
        if path.is_file() and path.suffix not in (".c", ".h", ".md", ".pyc", ".so")
    }
    assert {path for path in own if not (site / path).is_file()} == set()
    assert all((site / package / "py.typed").is_file() for package in packages)
    zoo = {path.relative_to(repository) for path in repository.glob("prototxt/**/*.prototxt")}
    assert all((site / "poseidon" / "templates" / path).is_file() for path in zoo)
    assert not (site / "tests").exists()


@pytest.mark.needs("native")
def test_the_wheel_has_compiled_codecs_for_every_python(installed: Path, tmp_path: Path) -> None:
    (info,) = site_of(installed).glob("poseidon-*.dist-info")
    wheel = Parser().parsestr((info / "WHEEL").read_text(encoding="utf-8"))
    assert re.fullmatch(r"py3-none-linux_\w+", wheel["Tag"])
    assert wheel["Root-Is-Purelib"] == "false"
    said = run(tmp_path, installed / "bin" / "python", "-m", "ps_server.native")
    assert said.startswith("the codecs are compiled")


def test_help_and_version_import_nothing_heavy(installed: Path, tmp_path: Path) -> None:
    python = installed / "bin" / "python"
    assert re.fullmatch(
        r"poseidon \d+\.\d+\.\d+\n", run(tmp_path, installed / "bin" / "poseidon", "--version")
    )
    for command in ("--help", "train --help", "completion bash"):
        program = (
            "import sys; from poseidon.cli.main import main\ntry: main(sys.argv[1:])\nexcept "
            "SystemExit: pass\n"
            f"print(sorted(set({CHECKED!r}) & set(sys.modules) - {{'shtab'}}), len(sys.modules), "
            "file=sys.__stdout__)"
        )
        last = run(tmp_path, python, "-c", program, *command.split()).splitlines()[-1]
        heavy, count = re.fullmatch(r"(\[.*\]) (\d+)", last).groups()  # type: ignore[union-attr]
        assert heavy == "[]", command
        assert int(count) < 250


@pytest.mark.processes
def test_a_project_trains_from_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    site, poseidon = site_of(installed), installed / "bin" / "poseidon"
    before = contents(site)
    where = run(
        tmp_path, installed / "bin" / "python", "-c", "import poseidon; print(poseidon.__file__)"
    )
    assert where.startswith(str(site))
    assert "cifar10 " in run(tmp_path, poseidon, "init", "--list")
    run(tmp_path, poseidon, "init", "hdf5_classification", "mine")
    mine = tmp_path / "mine"
    run(mine, installed / "bin" / "python", "make_data.py")
    flags = ("--max_iter=3", "--set", "test_iter=3")
    write_shadowing_files(tmp_path, packages=True)
    run(tmp_path, poseidon, "train", f"--solver={mine / 'solver.prototxt'}", *flags)
    assert [path.name for path in tmp_path.rglob("*iter_3.caffemodel")]
    assert list(tmp_path.glob("output/*/worker_0.log"))
    assert contents(site) == before


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.parametrize("name", ["cifar10", "torch_cnn"])
def test_the_commands_of_a_project_run_from_an_installed_wheel(
    installed: Path, tmp_path: Path, name: str
) -> None:
    """What README.md of the project names, with fewer iterations."""
    run(tmp_path, installed / "bin" / "poseidon", "init", name, "mine")
    readme = (tmp_path / "mine" / "README.md").read_text(encoding="utf-8")
    commands = [
        line.split("#")[0].split() for line in readme.splitlines() if line.startswith("    ")
    ]
    assert commands
    for command, *words in commands:
        more = ["--max_iter=4"] if words[0] == "train" else []
        more += ["--url="] if words[0] == "prepare_cifar10" else []
        run(tmp_path / "mine", installed / "bin" / command, *words, *more)
    assert list(tmp_path.glob("mine/output/*/worker_0.log"))


def test_a_checkout_named_poseidon_is_no_package_in_the_folder_that_has_it(
    repository: Path, tmp_path: Path
) -> None:
    checkout, site = tmp_path / "poseidon", tmp_path / "site"
    (checkout / "poseidon" / "base").mkdir(parents=True)
    for name in (
        "setup.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "poseidon/__init__.py",
        "poseidon/__init__.pyi",
        "poseidon/binding.py",
        "poseidon/errors.py",
        "poseidon/base/__init__.py",
        "poseidon/base/text_files.py",
        "poseidon/base/settings.py",
        "poseidon/version.py",
    ):
        shutil.copy(repository / name, checkout / name)
    run(checkout, sys.executable, "-c", BUILD.format("editable"))
    (wheel,) = (checkout / "dist").glob("*.whl")
    shutil.unpack_archive(wheel, site, "zip")
    code = "import site, sys; site.addsitedir(sys.argv[1]); import poseidon; print(poseidon.__version__)"
    assert run(tmp_path, sys.executable, "-S", "-c", code, str(site)).strip()
