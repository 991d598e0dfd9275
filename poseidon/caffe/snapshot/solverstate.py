"""`.solverstate`: the state of a run except its weights.

Law: the file is Caffe's SolverState, so Caffe can resume from it. State that Caffe does not know
(each worker's position in its data, random states, histories at staleness > 0) is in an additional
field, which Caffe ignores. A path with the suffix `.h5` is written as HDF5. Both formats can be
read; they are recognized by content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from poseidon.base.text_files import escaped
from poseidon.caffe.proto.blob import from_array, to_array
from poseidon.caffe.proto.caffe_pb2 import BlobProto, PoseidonState, SolverState
from poseidon.caffe.snapshot import hdf5
from poseidon.caffe.snapshot.caffemodel import read_message
from poseidon.engine.snapshot_files import write_atomically
from poseidon.errors import SnapshotError

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run.

    Attributes:
        iteration: the number of finished iterations.
        model: the file of the weights.
        histories: the history arrays (the same number, one or two) of each learnable blob in
            Caffe's order; empty if they were not read.
        current_step: the number of stepvalues reached (Caffe's multistep).
        poseidon: the state that Caffe does not know; empty in a file by Caffe.
    """

    iteration: int
    model: str
    histories: tuple[tuple[Array, ...], ...] = ()
    current_step: int = 0
    poseidon: PoseidonState = field(default_factory=PoseidonState)

    @property
    def seed(self) -> int | None:
        """The random seed of the job; None in a file by Caffe."""
        return self.poseidon.random_seed if self.poseidon.HasField("random_seed") else None


def write_state(path: Path, state: RunState) -> None:
    """Write a state atomically.

    Raises:
        SnapshotError: the file cannot be written.
    """
    # A path that is not UTF-8 cannot stand in a message; the file is then found beside the state.
    model = escaped(state.model)
    message = SolverState(iter=state.iteration, learned_net=model, current_step=state.current_step)
    # All first arrays, then all second ones, which is Caffe's order for AdaDelta and Adam.
    for column in zip(*state.histories, strict=True):
        message.history.extend(from_array(array) for array in column)
    message.poseidon.CopyFrom(state.poseidon)
    if path.suffix == hdf5.SUFFIX:
        hdf5.write_state(path, message)
    else:
        write_atomically(path, message.SerializeToString())


def read_state(
    path: Path, blobs: Sequence[tuple[str, tuple[int, ...]]], arrays_per_blob: int
) -> RunState:
    """Read a state and check its histories against a net.

    Args:
        blobs: the name and the shape of each learnable blob in Caffe's order.
        arrays_per_blob: the number of history arrays of the solver for each blob.

    Raises:
        SnapshotError: the file is missing or truncated, or is the state of a different net or type
            of solver.
    """
    message = _read(path)
    expected = len(blobs) * arrays_per_blob
    if len(message.history) != expected:
        raise SnapshotError(
            f"{path} has {len(message.history)} history blobs; this net and solver type need "
            f"{expected}: resume with "
            "the net and the type of solver that wrote it, or start from its model with --weights"
        )
    columns = []
    for start in range(0, expected, max(len(blobs), 1)):
        column = zip(blobs, message.history[start : start + len(blobs)], strict=True)
        columns.append([_shaped(path, name, shape, blob) for (name, shape), blob in column])
    return _run_state(message, tuple(tuple(arrays) for arrays in zip(*columns, strict=True)))


def read_head(path: Path) -> RunState:
    """Read a state without its histories.

    Raises:
        SnapshotError: the file is missing or not a solver state.
    """
    message = _read(path)
    for worker in message.poseidon.worker:
        for part in ("history", "outer_history", "held_back"):
            worker.ClearField(part)
    return _run_state(message)


def _run_state(message: SolverState, histories: tuple[tuple[Array, ...], ...] = ()) -> RunState:
    return RunState(
        iteration=message.iter,
        model=message.learned_net,
        histories=histories,
        current_step=message.current_step,
        poseidon=message.poseidon,
    )


def _read(path: Path) -> SolverState:
    if hdf5.is_hdf5(path):
        return hdf5.read_state(path)
    message = read_message(path, SolverState(), "solver state")
    if not message.HasField("iter"):  # a model parses as an empty one
        raise SnapshotError(
            f"{path} is not a solver state: it has no iteration (for weights, a .caffemodel, use "
            "--weights)"
        )
    return message


def _shaped(path: Path, name: str, shape: tuple[int, ...], blob: BlobProto) -> Array:
    try:
        array = to_array(blob)
    except ValueError as error:
        raise SnapshotError(f"{path}: the history of '{name}': {error}") from error
    # Old files extend shapes to four axes: (1, 1, 1, 10) is a bias of 10.
    stripped = tuple(n for n in array.shape if n != 1)
    if stripped != tuple(n for n in shape if n != 1):
        raise SnapshotError(
            f"{path}: the history of '{name}' has shape {array.shape}; the net has {shape}"
        )
    return array.reshape(shape)


def learned_net(state: RunState, path: Path) -> Path:
    """Return the file of the weights that belong to the state in `path`.

    Raises:
        SnapshotError: the file is neither at the path in the state nor beside the state.
    """
    named = Path(state.model)
    own_name = path.with_name(path.name.replace(".solverstate", ".caffemodel"))
    choices = [named, path.parent / named.name, own_name]
    for choice in choices:
        if choice.is_file():
            return choice
    paths = ", nor ".join(dict.fromkeys(str(choice) for choice in choices))
    raise SnapshotError(f"the weights of {path} are missing: there is no {paths}")
