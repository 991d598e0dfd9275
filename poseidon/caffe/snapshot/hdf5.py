"""`.caffemodel.h5` and `.solverstate.h5`: Caffe's HDF5 snapshots.

    /data/<layer>/<i>     blob i of a layer        /iter /current_step    one int32 each
    /diff/<layer>/<i>     its gradient, if asked   /learned_net           the weights' file
                                                   /history/<i>           as in the binary state, in its order

Law: the layout is Caffe's (Net::ToHDF5, SGDSolver::SnapshotSolverStateToHDF5). A shared blob is
stored under /data only for its owner, so a reader treats a missing blob as shared. State that Caffe
does not know is in one dataset of bytes, /poseidon, which Caffe ignores.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from poseidon.base.foreign_files import open_regular
from poseidon.caffe.proto.blob import from_array, to_array
from poseidon.caffe.proto.caffe_pb2 import SolverState
from poseidon.engine.snapshot_files import write_atomically
from poseidon.errors import SnapshotError

Array = NDArray[np.float32]
NamedBlobs = Iterable[tuple[str, str, Sequence[Array]]]
"""The name, the type and the blobs of every layer, in order."""

SIGNATURE = b"\x89HDF\r\n\x1a\n"
SUFFIX = ".h5"
# HDF5's best compression ratio; a dataset that claims more is meant to exhaust the memory.
LARGEST_RATIO = 1100


def is_hdf5(path: Path) -> bool:
    """Return whether a file is HDF5 by its first bytes or its suffix.

    If it cannot be read, the suffix decides.
    """
    try:
        with open_regular(path) as file:
            return file.read(len(SIGNATURE)) == SIGNATURE or path.suffix == SUFFIX
    except OSError:
        return path.suffix == SUFFIX


def write_model(
    path: Path, blobs: NamedBlobs, *, owned: Collection[str], diffs: NamedBlobs | None = None
) -> None:
    """Write a model atomically.

    Args:
        blobs: (layer name, layer type, arrays) of every layer, in order.
        owned: the names `<layer>.<index>` of the blobs that are not shared from another layer.
        diffs: the gradients in the same form, repeated for shared blobs (snapshot_diff); None: no
            gradients.

    Raises:
        SnapshotError: the file cannot be written.
    """
    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        data = file.create_group("data")
        for name, _, arrays in blobs:
            wanted = [f"{name}.{index}" in owned for index in range(len(arrays))]
            _write_layer(data, name, arrays, wanted)
        if diffs is not None:
            group = file.create_group("diff")
            for name, _, arrays in diffs:
                _write_layer(group, name, arrays, [True] * len(arrays))
    write_atomically(path, image.getvalue())


def check_layers(blobs: Iterable[tuple[str, int]]) -> None:
    """Check that a model can hold the layers, given the name and the number of blobs of each.

    Raises:
        SnapshotError: HDF5 cannot keep the name of a layer apart from the others.
    """
    with h5py.File(io.BytesIO(), "w") as file:
        data = file.create_group("data")
        for name, count in blobs:
            _write_layer(data, name, [np.zeros(0, np.float32)] * count, [True] * count)


def _write_layer(parent: Any, name: str, arrays: Sequence[Array], wanted: Sequence[bool]) -> None:
    try:
        group = parent.require_group(name)
        if group.name != f"{parent.name}/{name}":
            raise ValueError(f"it is the name of {group.name}")
        _write_arrays(group, arrays, wanted)
    except (TypeError, ValueError) as error:
        raise SnapshotError(
            f"HDF5 cannot keep the layer '{name}' apart from others, as a slash in a name puts "
            "groups inside each other: rename it, or use snapshot_format: BINARYPROTO"
        ) from error


def read_model(path: Path) -> list[tuple[str, list[Array | None]]]:
    """Read the name and the blobs of each layer; None for a shared blob that the file does not
    repeat.

    Raises:
        SnapshotError: the file is missing, damaged or not a model.
    """
    with _opened(path, "model") as file:
        data = _data(path, file)
        return [(name, _blobs(path, group)) for name, group in _layers(data, "", {data})]


def check_model(path: Path) -> None:
    """Check that a file has the groups of a model.

    Raises:
        SnapshotError: the file is damaged, or no model.
    """
    with _opened(path, "model") as file:
        _data(path, file)


def _data(path: Path, file: Any) -> Any:
    data = file.get("data")
    if not isinstance(data, h5py.Group):
        raise SnapshotError(f"{path} is not a model: it has no group /data")
    return data


def write_state(path: Path, state: SolverState) -> None:
    """Write a solver state atomically.

    Raises:
        SnapshotError: the file cannot be written.
    """
    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        file["iter"] = np.array([state.iter], np.int32)
        # With a final zero, because Caffe reads a C string.
        name = state.learned_net.encode()
        file["learned_net"] = np.array(name, dtype=f"S{len(name) + 1}")
        file["current_step"] = np.array([state.current_step], np.int32)
        histories = [to_array(blob) for blob in state.history]
        _write_arrays(file.create_group("history"), histories, [True] * len(histories))
        if state.HasField("poseidon"):
            file["poseidon"] = np.frombuffer(state.poseidon.SerializeToString(), np.uint8)
    write_atomically(path, image.getvalue())


def read_state(path: Path) -> SolverState:
    """Read a solver state as the message of the binary format.

    Raises:
        SnapshotError: the file is missing, damaged or not a solver state.
    """
    with _opened(path, "solver state") as file:
        history = file.get("history")
        if "iter" not in file or not isinstance(history, h5py.Group):
            raise SnapshotError(f"{path} is not a solver state: it has no /iter and /history")
        state = SolverState(
            iter=_integer(path, file, "iter"),
            learned_net=_text(path, file, "learned_net"),
            current_step=_integer(path, file, "current_step"),
        )
        for number, array in enumerate(_blobs(path, history)):
            if array is None:
                raise SnapshotError(f"{path} is damaged: it has no /history/{number}")
            state.history.append(from_array(array))
        if "poseidon" in file:
            _read_poseidon_state(path, file, state)
    return state


def _write_arrays(group: Any, arrays: Sequence[Array], wanted: Sequence[bool]) -> None:
    for index, (array, keep) in enumerate(zip(arrays, wanted, strict=True)):
        if keep:
            group.create_dataset(str(index), data=np.asarray(array, np.float32))


@contextmanager
def _opened(path: Path, kind: str) -> Iterator[Any]:
    """Open a file and translate errors of the library about damaged files."""
    try:
        raw = open_regular(path)
    except OSError as error:
        raise SnapshotError(f"cannot read the {kind} {path}: {error.strerror}") from error
    try:
        with raw, h5py.File(raw, "r") as file:
            yield file
    except SnapshotError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        reason = str(error).partition(" (")[0]
        raise SnapshotError(
            f"{path} is not a {kind} in HDF5, or it is damaged: {reason}"
        ) from error


def _items(group: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and items of a group; None for a dangling link.

    Raise ValueError for a name that is not text.
    """
    for name, item in group.items():
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is not a name")
        yield name, item


def _layers(group: Any, prefix: str, seen: set[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the layers below a group. A layer name with slashes consists of nested groups."""
    for name, item in _items(group):
        # A damaged file can link a group to itself.
        if not isinstance(item, h5py.Group) or item in seen:
            continue
        seen.add(item)
        inner = [child for child in item.values() if isinstance(child, h5py.Group)]
        if not inner or len(inner) < len(item):
            yield prefix + name, item
        yield from _layers(item, f"{prefix}{name}/", seen)


def _blobs(path: Path, group: Any) -> list[Array | None]:
    """Return the datasets 0, 1, ... of a group, None for missing ones before the last."""
    named = {int(name): item for name, item in _items(group) if name.isdecimal()}
    if max(named, default=-1) >= 2 * len(named) + 64:
        raise SnapshotError(
            f"{path}: {group.name} has a blob {max(named)}, but only {len(named)} blobs"
        )
    return [
        _numbers(path, named[index]) if index in named else None
        for index in range(max(named, default=-1) + 1)
    ]


def _numbers(path: Path, dataset: Any) -> Array:
    if (
        not isinstance(dataset, h5py.Dataset)
        or dataset.dtype.kind not in "fiu"
        or dataset.shape is None
    ):
        raise SnapshotError(
            f"{path}: {getattr(dataset, 'name', 'a blob')} is not an array of numbers"
        )
    return np.asarray(_stored(path, dataset), dtype=np.float32)


def _stored(path: Path, dataset: Any) -> Any:
    """Return what a dataset holds in this file: another file that it names may be a secret."""
    if not isinstance(dataset, h5py.Dataset) or dataset.external or dataset.is_virtual:
        raise SnapshotError(
            f"{path}: {getattr(dataset, 'name', 'a value')} is not in the file itself"
        )
    limit = path.stat().st_size * (LARGEST_RATIO if dataset.chunks else 1)
    if dataset.nbytes > limit or (dataset.nbytes and not dataset.id.get_storage_size()):
        raise SnapshotError(
            f"{path}: {dataset.name} claims {dataset.nbytes} bytes, more than the file can hold"
        )
    return dataset[()]


def _integer(path: Path, file: Any, name: str) -> int:
    if name not in file:
        return 0
    numbers = _numbers(path, file[name])
    if numbers.size != 1:
        raise SnapshotError(f"{path}: /{name} has {numbers.size} values, expected 1")
    return int(np.asarray(file[name][()]).reshape(()))


def _text(path: Path, file: Any, name: str) -> str:
    if name not in file:
        return ""
    value = _stored(path, file[name])
    if not isinstance(value, bytes):
        raise SnapshotError(f"{path}: /{name} is not text")
    return value.rstrip(b"\0").decode(errors="backslashreplace")


def _read_poseidon_state(path: Path, file: Any, state: SolverState) -> None:
    try:
        state.poseidon.ParseFromString(
            np.asarray(_stored(path, file["poseidon"]), np.uint8).tobytes()
        )
    except DecodeError as error:
        raise SnapshotError(f"{path} is damaged: its /poseidon cannot be parsed") from error
