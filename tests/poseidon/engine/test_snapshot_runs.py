"""Which job may write with a prefix, and which run a snapshot belongs to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from poseidon.caffe.snapshot.caffemodel import model_path, state_path
from poseidon.engine.snapshot_files import Run, run_of, seal, sums_path
from poseidon.engine.snapshot_runs import (
    COPIES,
    Prefixes,
    later_of_others,
    newest_intact,
    newest_state,
    remove_older,
)
from poseidon.errors import SnapshotError
from tests.support.training_processes import ROOT

ENDING = ".pt"
HOLDER = """
import sys
from pathlib import Path
from poseidon.engine.snapshot_runs import Prefixes
prefixes = Prefixes(sys.argv[2])
prefixes.take(Path(sys.argv[1]), ".pt")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as own:
        yield own


def other_process(stack: ExitStack, prefix: Path, job: str) -> subprocess.Popen[str]:
    """Return a process that writes with a prefix until its standard input ends."""
    words = [sys.executable, "-c", HOLDER, str(prefix), job]
    pipe = subprocess.PIPE
    other = stack.enter_context(
        subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    )
    stack.callback(other.kill)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    return other


@pytest.mark.parametrize("job", ["lenet-1", ""])
def test_a_prefix_is_of_one_job_at_a_time(tmp_path: Path, stack: ExitStack, job: str) -> None:
    prefix, mine = tmp_path / "net", Prefixes("lenet-2")
    other = other_process(stack, prefix, job)
    holder = "the job 'lenet-1'" if job else "another process"
    end = "kill lenet-1" if job else "or end it first"
    with pytest.raises(SnapshotError, match=rf"{holder}, which runs \(pid {other.pid} on .*{end}"):
        mine.take(prefix, ENDING)
    mine.take(tmp_path / "other", ENDING)
    if job:
        Prefixes(job).take(prefix, ENDING)  # a start of the same job
    other.communicate("")
    assert [path.name for path in tmp_path.iterdir()] == [".other.running"]
    mine.take(prefix, ENDING)
    assert {path.name for path in tmp_path.iterdir()} == {".other.running", ".net.running"}
    del mine
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_has_left_refuses_nobody(tmp_path: Path, stack: ExitStack) -> None:
    other = other_process(stack, tmp_path / "net", "lenet-1")
    other.kill()
    other.wait()
    assert (tmp_path / ".net.running").exists()
    Prefixes("lenet-2").take(tmp_path / "net", ENDING)


def test_a_lock_whose_file_was_removed_is_taken_again(tmp_path: Path) -> None:
    mine = Prefixes("lenet-1")
    for _ in range(2):
        mine.take(tmp_path / "net", ENDING)
        record = tmp_path / ".net.running"
        assert record.read_text().startswith("lenet-1\n")
        record.unlink()


def write(prefix: Path, iteration: int, run: Run) -> Path:
    state = prefix.with_name(f"{prefix.name}_iter_{iteration}{ENDING}")
    state.write_text(f"{iteration} {run}")
    seal(state, run=run)
    return state


OLD = Run(number=0)
A, B = Run(number=1, job="a"), Run(number=2, job="b")


@pytest.mark.parametrize(
    ("before", "job", "resumed", "expected", "beside"),
    [
        ([], "b", None, 1, None),
        ([(3, A), (6, A)], "b", None, 2, 6),
        ([(3, A), (6, A)], "a", None, 1, None),
        ([(3, A), (6, A)], "b", 6, 1, None),
        ([(3, A), (6, A)], "b", 3, 2, 6),
        ([(9, A), (3, B)], "c", 3, 2, None),
        ([(9, A), (3, B)], "a", None, 3, 3),
        ([(9, OLD)], "b", None, 1, 9),
        ([(9, OLD)], "", 9, 0, None),
        ([(9, Run(number=1))], "", None, 2, 9),
    ],
    ids=str,
)
def test_the_run_that_a_job_begins_or_continues(
    tmp_path: Path,
    before: list[tuple[int, Run]],
    job: str,
    resumed: int | None,
    expected: int,
    beside: int | None,
) -> None:
    states = {iteration: write(tmp_path / "net", iteration, run) for iteration, run in before}
    continued, told = None if resumed is None else states[resumed], list[Path]()
    prefixes = Prefixes(job)
    for _ in range(2):
        run = prefixes.take(tmp_path / "net", ENDING, continued, told.append)
        assert run == Run(number=expected, job=job)
    assert told == ([] if beside is None else [states[beside]])


def test_a_new_short_run_in_an_old_folder(tmp_path: Path) -> None:
    old = [write(tmp_path / "net", iteration, run) for iteration, run in ((90, OLD), (100, A))]
    new = [write(tmp_path / "net", iteration, B) for iteration in (3, 6, 9)]
    assert remove_older(new[-1], 2) == new[:1]
    assert all(path.exists() for path in old)
    assert newest_intact(tmp_path / "net", ENDING) == new[-1]
    assert newest_state(tmp_path, ENDING) == new[-1]
    assert later_of_others(new[-1]) == old[-1]
    assert run_of(new[-1]) == B
    new[-1].write_text("damaged")
    assert newest_intact(tmp_path / "net", ENDING) == new[1]
    later = write(tmp_path / "net", 101, B)
    assert remove_older(later, 1) == new[1:]
    assert all(path.exists() for path in old)
    assert later_of_others(later) is None


def write_sealed(prefix: Path, iteration: int, *, hdf5: bool = False, sealed: bool = True) -> Path:
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
    newest = [write_sealed(prefix, iteration) for iteration in (5, 10, 15, 20)][-1]
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
    foreign, own = write_sealed(outside / "snap", 30), write_sealed(job / "snap", 5)
    (job / "snap_iter_20.solverstate").symlink_to(foreign)
    (job / COPIES).symlink_to(outside)
    os.mkfifo(job / "snap_iter_40.solverstate")
    assert newest_state(job) == own
    (tmp_path / "named").symlink_to(job)  # what the user names is hers
    assert newest_state(tmp_path / "named").name == own.name


def test_what_is_not_of_this_run_stays(tmp_path: Path) -> None:
    write_sealed(tmp_path / "snap", 5)
    newest = write_sealed(tmp_path / "snap", 10)
    others = [
        write_sealed(tmp_path / "snap", 15),  # a later iteration: another run's
        write_sealed(tmp_path / "snap", 1, sealed=False),  # of Caffe
        write_sealed(tmp_path / "snap", 2, hdf5=True),  # of another form
        write_sealed(tmp_path / "snap_iter_3", 4),  # of a longer prefix
        write_sealed(tmp_path / "my_snap", 5),
    ]
    (tmp_path / "notes.solverstate").write_bytes(b"")
    assert remove_older(newest, 1) == [state_path(tmp_path / "snap", 5)]
    assert all(path.exists() for path in (*others, newest))


def test_a_file_that_cannot_be_removed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sealed(tmp_path / "snap", 5)
    newest = write_sealed(tmp_path / "snap", 10)

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(SnapshotError, match=r"cannot remove the old snapshot .*snap_iter_5"):
        remove_older(newest, 1)


def test_the_newest_of_a_folder(tmp_path: Path) -> None:
    """Of the highest iteration, wherever it lies and in either form; one without checksums only
    where no other is.
    """
    with pytest.raises(SnapshotError, match=f"{tmp_path} has no snapshot"):
        newest_state(tmp_path)
    (tmp_path / "snap.solverstate").write_bytes(b"not of this form")
    old = write_sealed(tmp_path / "snap", 30, sealed=False)
    assert newest_state(tmp_path) == old
    write_sealed(tmp_path / "snap", 9)
    ten = write_sealed(tmp_path / "snap", 10, hdf5=True)
    assert newest_state(tmp_path) == ten
    (tmp_path / COPIES).mkdir()
    copied = write_sealed(tmp_path / COPIES / "snap", 11)
    assert newest_state(tmp_path) == copied
