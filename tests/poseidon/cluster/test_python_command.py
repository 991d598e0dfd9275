"""What a Python process finds in a folder whose files have the names of other modules."""

from __future__ import annotations

import ast
import json
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

import poseidon
from poseidon.cluster import python_command
from poseidon.cluster.machinefile import Host
from poseidon.cluster.python_command import (
    LauncherEnvironment,
    agent_arguments,
    checkout,
    module_arguments,
    module_folders,
    remote_command,
)
from poseidon.cluster.ssh.config import shell_command
from tests.support.shadowing_files import write_shadowing_files

PROGRAM = """
import json, numbers, queue, random, sys, tempfile
import poseidon, own_module
print(json.dumps([__name__, sys.argv[1:], poseidon.__file__, own_module.__file__]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shadowing_files(tmp_path, packages=True)
    (tmp_path / "own_module.py").touch()
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def run(folder: Path, *arguments: str) -> str:
    root = str(Path(poseidon.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_module_finds_python_and_poseidon_before_the_current_folder(folder: Path) -> None:
    answer = run(folder, *module_arguments("program", "a b", "--job", ""))
    expected = (
        f'["__main__", ["a b", "--job", ""], "{poseidon.__file__}", "{folder}/own_module.py"]'
    )
    assert answer.strip() == expected


def test_an_agent_finds_python_and_poseidon_before_the_current_folder(folder: Path) -> None:
    """It has written nothing, and ends, since its launcher is gone."""
    root = str(Path(poseidon.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, *agent_arguments("job-1")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root, "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_an_agent_carries_the_mark_of_its_job() -> None:
    assert agent_arguments("job-1")[-2:] == ("--job", "job-1")
    assert "--job" not in agent_arguments("")


def test_an_old_python_can_say_why_it_runs_no_agent() -> None:
    """Python reads the whole program before it runs the first line."""
    program = ast.parse(agent_arguments("")[1], feature_version=(3, 7))
    (call,) = [node for node in ast.walk(program) if isinstance(node, ast.Call)]
    (source,) = call.args
    assert isinstance(source, ast.Constant)
    ast.parse(str(source.value), feature_version=(3, 7))


@pytest.mark.parametrize(
    ("package", "usage"), [("poseidon", "poseidon COMMAND"), ("ps_server", "python -m ps_server")]
)
def test_a_typed_module_prefers_python(tmp_path: Path, package: str, usage: str) -> None:
    write_shadowing_files(tmp_path, packages=False)
    assert f"usage: {usage}" in run(tmp_path, "-m", package, "--help")


def test_a_package_of_the_current_folder_is_the_one_that_is_typed(tmp_path: Path) -> None:
    (tmp_path / "poseidon").mkdir()
    (tmp_path / "poseidon" / "__init__.py").touch()
    (tmp_path / "poseidon" / "__main__.py").write_text("import sys; print(sys.path[0])")
    assert run(tmp_path, "-m", "poseidon").strip() == str(tmp_path)


@pytest.mark.parametrize(
    ("packages", "inherited", "expected"),
    [
        (
            "/checkout",
            f"/mine{os.pathsep}{os.pathsep}/checkout",
            "/checkout:/added/site-packages:/mine",
        ),
        (site.getsitepackages()[0], os.pathsep, "/added/site-packages"),
    ],
    ids=["checkout", "installed"],
)
def test_folders_of_modules(
    packages: str, inherited: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter finds its own packages by itself, after Python's library."""
    monkeypatch.setattr(python_command, "_PACKAGES", Path(packages))
    monkeypatch.setattr(
        sys, "path", ["", "/lib", site.getsitepackages()[0], "/added/site-packages"]
    )
    assert module_folders(inherited) == expected
    assert checkout() == ("/checkout" if packages == "/checkout" else "")


SHOW = "import json, os, sys; print(json.dumps([sys.argv[0] and os.environ.get('MARK'), os.getcwd(), sys.argv[1:]]))"


def own(folder: Path, *, python: str = sys.executable, checkout: str = "") -> LauncherEnvironment:
    return LauncherEnvironment(python=python, checkout=checkout, folder=str(folder))


def client(python: str | None = None, workdir: str | None = None) -> Host:
    return Host(id=0, address="h", port=0, python=python, workdir=workdir)


def module_command(host: Host, launcher: LauncherEnvironment, *module: str) -> tuple[str, ...]:
    return remote_command(host, launcher, *module_arguments(*module))


def run_of_remote_python(home: Path, argv: tuple[str, ...]) -> list[object]:
    done = subprocess.run(
        shell_command(argv),
        shell=True,
        cwd=home,
        env={**os.environ, "HOME": str(home), "PYTHONPATH": str(home)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    answer: list[object] = json.loads(done.stdout) if done.returncode == 0 else [done.returncode]
    return answer


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "it's home"
    for folder in (home / "work dir", home / "bin"):
        folder.mkdir(parents=True)
    (home / "show.py").write_text(SHOW)
    marked = home / "bin" / "marked"
    marked.write_text(f'#!/bin/sh\nMARK=marked exec {sys.executable} "$@"\n')
    marked.chmod(0o755)
    return home


def test_the_launchers_own_where_the_host_has_them(home: Path, tmp_path: Path) -> None:
    argv = module_command(client(), own(tmp_path), "show", "a b", "$HOME", "")
    assert run_of_remote_python(home, argv) == [None, str(tmp_path), ["a b", "$HOME", ""]]


def test_python3_and_home_where_it_has_not(home: Path) -> None:
    argv = module_command(client(), own(home / "absent", python="/absent/python"), "show")
    assert run_of_remote_python(home, argv) == [None, str(home), []]


def test_the_machinefile_comes_first(home: Path, tmp_path: Path) -> None:
    argv = module_command(client("~/bin/marked", "~/work dir"), own(tmp_path), "show")
    assert run_of_remote_python(home, argv) == ["marked", str(home / "work dir"), []]
    argv = module_command(client(str(home / "bin" / "marked")), own(tmp_path), "show")
    assert run_of_remote_python(home, argv) == ["marked", str(tmp_path), []]


def test_the_checkout_is_found_with_our_own_interpreter_alone(home: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "poseidon").mkdir(parents=True)
    (checkout / "other.py").write_text(SHOW)
    launcher = own(tmp_path, checkout=str(checkout))
    assert run_of_remote_python(home, module_command(client(), launcher, "other"))[1:] == [
        str(tmp_path),
        [],
    ]
    assert run_of_remote_python(
        home, module_command(client("~/bin/marked"), launcher, "other")
    ) == [1]
    assert run_of_remote_python(home, module_command(client(), launcher, "show"))[1:] == [
        str(tmp_path),
        [],
    ]


def test_a_folder_or_a_python_that_is_not_there_is_a_failure(home: Path, tmp_path: Path) -> None:
    assert run_of_remote_python(
        home, module_command(client(workdir="/absent/x"), own(tmp_path), "show")
    ) == [125]
    assert run_of_remote_python(
        home, module_command(client("~/bin/absent"), own(tmp_path), "show")
    ) == [125]
