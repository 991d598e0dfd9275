"""Old snapshots go, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from poseidon.caffe.snapshot.caffemodel import model_path, state_path
from poseidon.engine.snapshots.checksums import seal, sums_path
from poseidon.engine.snapshots.rotation import COPIES, newest_state, remove_older
from poseidon.errors import SnapshotError


def write(prefix: Path, iteration: int, *, hdf5: bool = False, sealed: bool = True) -> Path:
    model, state = (
        model_path(prefix, iteration, hdf5=hdf5),
        state_path(prefix, iteration, hdf5=hdf5),
    )
    model.write_bytes(b"model")
    state.write_bytes(b"state")
    if sealed:
        seal(state, model)
    return state


@pytest.mark.parametrize(
    ("keep", "left"), [(0, [5, 10, 15, 20]), (1, [20]), (2, [15, 20]), (9, [5, 10, 15, 20])]
)
def test_the_newest_stay(tmp_path: Path, keep: int, left: list[int]) -> None:
    prefix = tmp_path / "snap"
    newest = [write(prefix, iteration) for iteration in (5, 10, 15, 20)][-1]
    removed = remove_older(newest, keep)
    kept = [state_path(prefix, iteration) for iteration in left]
    files = (
        {model_path(prefix, iteration) for iteration in left}
        | set(kept)
        | set(map(sums_path, kept))
    )
    assert set(tmp_path.iterdir()) == files
    assert removed == [
        state_path(prefix, iteration) for iteration in (5, 10, 15, 20) if iteration not in left
    ]


def test_links_in_the_folder_of_a_job_are_passed_over(tmp_path: Path) -> None:
    outside, job = tmp_path / "outside", tmp_path / "job"
    for folder in (outside, job):
        folder.mkdir()
    foreign, own = write(outside / "snap", 30), write(job / "snap", 5)
    (job / "snap_iter_20.solverstate").symlink_to(foreign)
    (job / COPIES).symlink_to(outside)
    os.mkfifo(job / "snap_iter_40.solverstate")
    assert newest_state(job) == own
    (tmp_path / "named").symlink_to(job)  # what the user names is hers
    assert newest_state(tmp_path / "named").name == own.name


def test_what_is_not_of_this_run_stays(tmp_path: Path) -> None:
    write(tmp_path / "snap", 5)
    newest = write(tmp_path / "snap", 10)
    others = [
        write(tmp_path / "snap", 15),  # a later iteration: another run's
        write(tmp_path / "snap", 1, sealed=False),  # of Caffe
        write(tmp_path / "snap", 2, hdf5=True),  # of another form
        write(tmp_path / "snap_iter_3", 4),  # of a longer prefix
        write(tmp_path / "my_snap", 5),
    ]
    (tmp_path / "notes.solverstate").write_bytes(b"")
    assert remove_older(newest, 1) == [state_path(tmp_path / "snap", 5)]
    assert all(path.exists() for path in (*others, newest))


def test_a_file_that_cannot_be_removed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "snap", 5)
    newest = write(tmp_path / "snap", 10)

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(
        SnapshotError, match=r"cannot remove the old snapshot .*snap_iter_5.*: Permission denied"
    ):
        remove_older(newest, 1)


def test_the_newest_of_a_folder(tmp_path: Path) -> None:
    """Of the highest iteration, wherever it lies and in either form; one without checksums only
    where no other is.
    """
    with pytest.raises(SnapshotError, match=f"{tmp_path} has no snapshot"):
        newest_state(tmp_path)
    (tmp_path / "snap.solverstate").write_bytes(b"not of this form")
    old = write(tmp_path / "snap", 30, sealed=False)
    assert newest_state(tmp_path) == old
    write(tmp_path / "snap", 9)
    ten = write(tmp_path / "snap", 10, hdf5=True)
    assert newest_state(tmp_path) == ten
    (tmp_path / COPIES).mkdir()
    copied = write(tmp_path / COPIES / "snap", 11)
    assert newest_state(tmp_path) == copied
