"""Names of snapshot files are Caffe's, and a file that is not one is refused by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.caffe.proto.caffe_pb2 import SolverState
from poseidon.caffe.snapshot.files import model_path, read_message, state_path
from poseidon.errors import SnapshotError


def test_names_are_caffes() -> None:
    assert model_path(Path("a/quick"), 4000) == Path("a/quick_iter_4000.caffemodel")
    assert state_path(Path("a/v1.0"), 7) == Path("a/v1.0_iter_7.solverstate")


@pytest.mark.parametrize("content", [b"\xff\xff\xff", b"\x0a\x7fabc"])
def test_unparsable_content_is_reported(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state"
    path.write_bytes(content)
    with pytest.raises(SnapshotError, match="is not a solver state, or it is truncated"):
        read_message(path, SolverState(), "solver state")


def test_tensors_of_torch_are_no_model_and_the_command_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    path.write_bytes(b"\xff\xff\xff")
    with pytest.raises(
        SnapshotError,
        match=r"w\.pth is not a model: .* `poseidon import` makes a \.caffemodel of it",
    ):
        read_message(path, SolverState(), "model")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"cannot read the model .*absent: No such file"):
        read_message(tmp_path / "absent", SolverState(), "model")
