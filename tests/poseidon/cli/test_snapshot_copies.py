"""Snapshots of another machine come here whole, or not at all; those that are here stay where they are."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from poseidon.cli.snapshot_copies import KEPT, SnapshotCopies
from poseidon.errors import JobError
from poseidon.snapshot.checksums import check, seal, sums_path
from poseidon.snapshot.files import model_path, state_path

FAR = Path("/far")


class Session:
    """A machine on which the folder `root` is called /far."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def stat(self, path: str) -> object:
        return self._here(path).stat()

    def get(self, remotepath: str, localpath: str) -> None:
        shutil.copy(self._here(remotepath), localpath)

    def close(self) -> None: ...

    def _here(self, path: str) -> Path:
        return self._root / Path(path).relative_to(FAR)


def write(folder: Path, iteration: int) -> Path:
    state, model = state_path(folder / "snap", iteration), model_path(folder / "snap", iteration)
    state.write_bytes(b"state %d" % iteration)
    model.write_bytes(b"model %d" % iteration)
    seal(state, model)
    return state


class Site:
    """Copies from a far folder, and what they said."""

    def __init__(self, folder: Path) -> None:
        self.far, self.here = folder / "far", folder / "here"
        self.far.mkdir()
        self.arrived: list[Path] = []
        self.warnings: list[str] = []
        self.copies = SnapshotCopies(self.here, lambda: Session(self.far), self.warnings.append)

    def bring(self, state: Path) -> None:
        self.copies.want(str(FAR / state.name), self.arrived.append)
        self.copies.settle()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.copies.close()
    site.copies._thread.join(10)
    assert not site.copies._thread.is_alive()


def test_a_snapshot_comes_whole_and_older_ones_go(site: Site) -> None:
    states = [write(site.far, iteration) for iteration in (10, 20, 30)]
    for state in states:
        site.bring(state)
    assert site.arrived == [site.here / state.name for state in states]
    assert site.warnings == []
    for state in states[-KEPT:]:
        check(site.here / state.name)
        assert (site.here / state.name).read_bytes() == state.read_bytes()
    assert len(list(site.here.iterdir())) == 3 * KEPT


def test_one_that_does_not_come_whole_is_passed_over(site: Site) -> None:
    state = write(site.far, 10)
    state.write_bytes(b"cut")
    site.bring(state)
    assert site.arrived == []
    assert "did not come whole" in site.warnings[0]


def test_one_that_is_here_is_not_copied(site: Site, tmp_path: Path) -> None:
    state = write(tmp_path, 10)
    site.copies.want(str(state), site.arrived.append)
    site.copies.settle()
    assert site.arrived == [state]
    assert not site.here.exists()


@contextmanager
def broken(site: Site, error: Exception) -> Iterator[None]:
    def refuse() -> Session:
        raise error

    site.copies._connect = refuse
    yield


@pytest.mark.parametrize(
    "error", [JobError("no line"), OSError("no line"), EOFError("no line"), KeyError("no line")]
)
def test_what_cannot_be_had_is_a_warning(site: Site, error: Exception) -> None:
    with broken(site, error):
        site.bring(write(site.far, 10))
    assert site.arrived == []
    assert "no line" in site.warnings[0]


def test_nothing_but_plain_small_files_is_taken(site: Site) -> None:
    state = write(site.far, 10)
    sums_path(state).write_bytes(b"x" * 5000)
    site.bring(state)
    sums_path(state).unlink()
    sums_path(state).mkdir()
    site.bring(state)
    sums_path(state).rmdir()
    sums_path(state).write_text(f"{'0' * 64}  ../../escape\n")
    site.bring(state)
    assert site.arrived == []
    assert len(site.warnings) == 3
    assert not list(site.here.parent.glob("escape"))
