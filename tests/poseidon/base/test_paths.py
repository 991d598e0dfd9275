"""Which file a path in a definition means."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.base import paths
from poseidon.base.paths import candidates, repository_root, resolve, resolve_prefix
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
