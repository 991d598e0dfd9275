"""`.solverstate`: where a run stands, beside its weights.

Law: the file is Caffe's SolverState, so Caffe can go on from it. What Caffe has no place for (each worker's place in its
data, random state, history at staleness > 0) is in one extra field that its reader skips. A path that ends in `.h5` is
written as HDF5, and either form is read, told apart by content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from poseidon.errors import SnapshotError
from poseidon.proto.blob import from_array, to_array
from poseidon.proto.caffe_pb2 import BlobProto, PoseidonState, SolverState
from poseidon.snapshot import hdf5
from poseidon.snapshot.files import read_message, write_atomically

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands.

    Attributes:
        iteration: iterations finished.
        model: file of the weights.
        histories: for each learnable blob in Caffe's order, its history arrays (one or two, all alike).
        current_step: stepvalues reached (Caffe's multistep).
        poseidon: what Caffe has no place for; empty in a file that Caffe wrote.
    """

    iteration: int
    model: str
    histories: tuple[tuple[Array, ...], ...]
    current_step: int = 0
    poseidon: PoseidonState = field(default_factory=PoseidonState)


def write_state(path: Path, state: RunState) -> None:
    """Write a state, atomically.

    Raises:
        SnapshotError: it cannot be written.
    """
    message = SolverState(iter=state.iteration, learned_net=state.model, current_step=state.current_step)
    # All first arrays, then all second ones: Caffe's order for AdaDelta and Adam.
    for column in zip(*state.histories, strict=True):
        message.history.extend(from_array(array) for array in column)
    message.poseidon.CopyFrom(state.poseidon)
    if path.suffix == hdf5.SUFFIX:
        hdf5.write_state(path, message)
    else:
        write_atomically(path, message.SerializeToString())


def read_state(path: Path, blobs: Sequence[tuple[str, tuple[int, ...]]], arrays_per_blob: int) -> RunState:
    """Read a state and match its histories to a net.

    Args:
        path: the file.
        blobs: name and shape of each learnable blob, in Caffe's order.
        arrays_per_blob: history arrays that the solver keeps for each blob.

    Raises:
        SnapshotError: the file is missing, cut short, or of another net or kind of solver.
    """
    message = _read(path)
    expected = len(blobs) * arrays_per_blob
    if len(message.history) != expected:
        raise SnapshotError(
            f"{path} has {len(message.history)} history blobs; this net and solver type need {expected}"
        )
    columns = []
    for start in range(0, expected, max(len(blobs), 1)):
        column = zip(blobs, message.history[start : start + len(blobs)], strict=True)
        columns.append([_shaped(path, name, shape, blob) for (name, shape), blob in column])
    return RunState(
        iteration=message.iter,
        model=message.learned_net,
        histories=tuple(tuple(arrays) for arrays in zip(*columns, strict=True)),
        current_step=message.current_step,
        poseidon=message.poseidon,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHead:
    """What a launcher needs of a state.

    Attributes:
        iteration: iterations finished.
        seed: the random seed of the job that wrote it; None when Caffe wrote it.
        model: file of the weights, as the state names it.
    """

    iteration: int
    seed: int | None
    model: str


def head_of(path: Path) -> StateHead:
    """Return a state without its histories.

    Raises:
        SnapshotError: the file is missing, or is no solver state.
    """
    message = _read(path)
    seed = message.poseidon.random_seed if message.poseidon.HasField("random_seed") else None
    return StateHead(iteration=message.iter, seed=seed, model=message.learned_net)


def _read(path: Path) -> SolverState:
    if hdf5.is_hdf5(path):
        return hdf5.read_state(path)
    message = read_message(path, SolverState(), "solver state")
    if not message.HasField("iter"):  # a model parses as an empty one
        raise SnapshotError(
            f"{path} is not a solver state: it has no iteration (weights alone, a .caffemodel, go to --weights)"
        )
    return message


def _shaped(path: Path, name: str, shape: tuple[int, ...], blob: BlobProto) -> Array:
    try:
        array = to_array(blob)
    except ValueError as error:
        raise SnapshotError(f"{path}: the history of '{name}': {error}") from error
    # Old files pad shapes to four axes: (1, 1, 1, 10) is a bias of 10.
    stripped = tuple(n for n in array.shape if n != 1)
    if stripped != tuple(n for n in shape if n != 1):
        raise SnapshotError(f"{path}: the history of '{name}' has shape {array.shape}; the net has {shape}")
    return array.reshape(shape)


def learned_net(state: RunState | StateHead, path: Path) -> Path:
    """Return the file of the weights that belong to the state in `path`.

    Raises:
        SnapshotError: it is neither where the state says nor beside the state.
    """
    return _weights_of(state.model, path)


def weights_of(path: Path) -> Path:
    """Return the file of the weights that belong to the state in `path`; see `learned_net`.

    Raises:
        SnapshotError: there is none, or `path` is missing or is no solver state.
    """
    return _weights_of(_read(path).learned_net, path)


def _weights_of(model: str, path: Path) -> Path:
    named = Path(model)
    own_name = path.with_name(path.name.replace(".solverstate", ".caffemodel"))
    choices = [named, path.parent / named.name, own_name]
    for choice in choices:
        if choice.is_file():
            return choice
    raise SnapshotError(f"the weights of {path} are missing: there is no {model}, nor {choices[1]}")
