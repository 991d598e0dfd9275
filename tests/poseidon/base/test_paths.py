"""Which file a path in a definition means."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from poseidon.base import paths
from poseidon.base.paths import (
    candidates,
    module_file,
    own_command,
    own_python,
    repository_root,
    resolve,
    resolve_prefix,
    short_path,
)
from poseidon.errors import DefinitionError

PLACES = ("folder", "root", "cwd")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three folders, standing for the definition's, the repository root and the current one."""
    for place in PLACES:
        (tmp_path / place).mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(paths, "repository_root", lambda: tmp_path / "root")
    return tmp_path


@pytest.mark.parametrize(
    "folder, existing, expected",
    [
        ("folder", ("folder", "root", "cwd"), "folder"),
        ("folder", ("root", "cwd"), "cwd"),
        ("folder", ("root",), "root"),
        ("folder", (), "folder"),
        ("absent", ("root", "cwd"), "cwd"),
        ("root/zoo", ("root/zoo", "root", "cwd"), "root/zoo"),
        ("root/zoo", ("root", "cwd"), "root"),
        ("root/zoo", ("cwd",), "cwd"),
        ("root/zoo", (), "root"),
    ],
)
def test_the_first_that_exists(
    places: Path, folder: str, existing: tuple[str, ...], expected: str
) -> None:
    (places / "root" / "zoo").mkdir()
    for place in existing:
        (places / place / "data").mkdir()
    assert resolve("data", folder=places / folder) == places / expected / "data"
    found = resolve_prefix("data/snap", folder=places / folder)
    assert found == places / expected / "data" / "snap"


def test_each_place_that_is_looked_at_is_named_once(places: Path) -> None:
    expected = [places / place / "data" for place in ("folder", "cwd", "root")]
    assert candidates("data", folder=places / "folder") == expected
    assert candidates("data", folder=places / "root") == [
        places / "root" / "data",
        places / "cwd" / "data",
    ]


def test_an_absolute_path_is_itself(places: Path) -> None:
    assert resolve("/nowhere/x", folder=places / "folder") == Path("/nowhere/x")
    assert resolve_prefix("/nowhere/x", folder=places / "folder") == Path("/nowhere/x")


def test_a_relative_folder_gives_an_absolute_path(places: Path) -> None:
    (places / "cwd" / "sub").mkdir()
    (places / "cwd" / "sub" / "net").write_text("")
    assert resolve("net", folder=Path("sub")) == places / "cwd" / "sub" / "net"


def test_a_bare_prefix_is_in_the_folder_of_its_file(places: Path) -> None:
    assert resolve_prefix("lenet", folder=places / "folder") == places / "folder" / "lenet"
    assert resolve_prefix("lenet", folder=places / "absent") == Path.cwd() / "lenet"


@pytest.mark.parametrize("placeholder", ["POSEIDON_ROOT", "CAFFE_ROOT"])
def test_a_placeholder_means_the_repository_root(places: Path, placeholder: str) -> None:
    (places / "cwd" / "x").mkdir()
    assert resolve(f"{placeholder}/x", folder=places / "folder") == places / "root" / "x"


def test_an_empty_path_is_an_error(places: Path) -> None:
    with pytest.raises(DefinitionError, match="found an empty path"):
        resolve("", folder=places)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("folder/" + "n" * 256, "more than 255 bytes"),
        ("a\0b", "a NUL byte"),
        ("é" * 130, "more than 255 bytes"),
    ],
)
def test_a_path_that_no_file_can_have_is_an_error(places: Path, path: str, why: str) -> None:
    with pytest.raises(DefinitionError, match=f"is not a legal path: it has .*{why}"):
        resolve(path, folder=places)


def test_repository_root_is_the_checkout_or_the_current_folder(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert repository_root() == repository
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "site-packages" / "poseidon")
    monkeypatch.chdir(tmp_path)
    assert repository_root() == tmp_path


FILES = (
    "alone.py",
    "package/__init__.py",
    "package/__main__.py",
    "package/train.py",
    "package/train/part.py",
    "package/inner/__init__.py",
    "plain/train.py",
    "plain/deep/train.py",
    "shadowed/__init__.py",
    "shadowed.py",
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("alone", "alone.py"),
        ("package", "package/__main__.py"),
        ("package.train", "package/train.py"),
        ("package.inner", None),
        ("package.none", None),
        ("package.train.part", None),
        ("plain.train", "plain/train.py"),
        ("plain.deep.train", "plain/deep/train.py"),
        ("plain.deep", None),
        ("shadowed", None),
        ("alone.part", None),
        ("none.train", None),
        ("", None),
        ("package.", None),
        ("package/train.py", None),
    ],
)
def test_the_file_is_the_one_that_python_runs(
    name: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in FILES:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    monkeypatch.chdir(tmp_path)
    found = module_file(name)
    assert found == (expected and tmp_path / expected)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {file.partition("/")[0].removesuffix(".py") for file in FILES}
    for module in [each for each in sys.modules if each.partition(".")[0] in own]:
        monkeypatch.delitem(sys.modules, module)  # of another test
    before = set(sys.modules)
    try:
        assert runpy.run_module(name)["__file__"] == str(found)
    except (ImportError, ValueError):
        assert found is None
    finally:
        for module in set(sys.modules) - before:
            del sys.modules[module]


def test_modules_of_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert module_file("poseidon") == Path(__file__).parents[3] / "poseidon" / "__main__.py"
    assert module_file("sys") is None


def _program(path: Path, says: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {says or path}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment `.venv` with the command, which is not on the path; the working folder is
    beside it.
    """
    monkeypatch.chdir(tmp_path)
    command = _program(tmp_path / ".venv" / "bin" / "poseidon")
    monkeypatch.setattr(sys, "executable", str(command.parent / "python"))
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return command


@pytest.mark.parametrize(
    ("folder", "expected"),
    [(".", ".venv/bin/poseidon"), ("mine", "../.venv/bin/poseidon"), (".venv/bin", "./poseidon")],
)
def test_without_an_activated_environment_the_hint_is_a_path(
    environment: Path, monkeypatch: pytest.MonkeyPatch, folder: str, expected: str
) -> None:
    Path(folder).mkdir(exist_ok=True)
    assert own_command(Path(folder)) == expected
    monkeypatch.chdir(folder)
    assert own_command() == expected
    said = subprocess.run(
        own_command(), shell=True, capture_output=True, text=True, check=True
    ).stdout
    assert said == f"{environment}\n"


def test_in_an_activated_environment_the_hint_is_the_name(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{environment.parent}:{os.environ['PATH']}")
    assert own_command() == "poseidon"


def test_another_installation_on_the_path_is_not_named(
    environment: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = _program(tmp_path / "other" / "poseidon")
    monkeypatch.setenv("PATH", f"{other.parent}:{os.environ['PATH']}")
    assert own_command() == ".venv/bin/poseidon"
    monkeypatch.setattr(sys, "argv", [str(other), "train"])  # the command that runs
    assert own_command() == "poseidon"


def test_without_a_command_the_hint_is_the_module(
    environment: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.unlink()
    assert own_command() == ".venv/bin/python -m poseidon"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "my env" / "python"))
    assert own_command() == "'my env/python' -m poseidon"


def test_python_is_the_one_of_this_environment(
    environment: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another environment's is a link to the same file."""
    own = environment.parent / "python"
    own.symlink_to(_program(tmp_path / "usr" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "usr"))
    assert own_python() == ".venv/bin/python"
    assert own_python(tmp_path / "mine") == "../.venv/bin/python"
    monkeypatch.setenv("PATH", str(own.parent))
    assert own_python() == "python"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/a/b/c/x", "x"),
        ("/a/b/c/d/x", "d/x"),
        ("d/x", "d/x"),
        ("/a/b/x", "../x"),
        ("/x", "/x"),
        ("/elsewhere/x", "/elsewhere/x"),
    ],
)
def test_a_path_is_as_short_as_can_be(
    path: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/a/b/c")
    assert short_path(Path(path)) == expected
