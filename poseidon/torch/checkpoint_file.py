"""Checkpoints of a script's group: `<prefix>_iter_<N>.pt`, with its checksums beside it.

Laws:
* A checkpoint holds tensors, numbers, strings, lists, tuples and dicts, nothing else. It is read
  with `torch.load(weights_only=True)`, so reading one runs no code.
* A checkpoint with checksums is complete. An older one is removed only once a newer one is
  complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poseidon.base.durable import replacing
from poseidon.base.foreign_files import open_regular
from poseidon.engine.leaf import mapped, unpacked
from poseidon.engine.snapshot_files import (
    NO_RUN,
    Run,
    check,
    seal,
    sums_path,
    write_atomically,
)
from poseidon.engine.snapshot_runs import CHECKPOINT, remove_older
from poseidon.errors import SnapshotError, described
from ps_server.json_fields import value_of

FORMAT = 1


def checked(state: Any, source: str) -> dict[str, Any]:
    """Return a value that is a group's state.

    Raises:
        SnapshotError: it is not, or it is of a later version.
    """
    if not isinstance(state, Mapping) or "poseidon" not in state:
        raise SnapshotError(
            f"{source} is not a checkpoint of a group; expected what group.state_dict() gives, or "
            "group.save() writes"
        )
    if state["poseidon"] != FORMAT:
        raise SnapshotError(
            f"{source} has format {state['poseidon']}; this version of Poseidon reads format "
            f"{FORMAT}"
        )
    return dict(state)


def checkpoint_path(prefix: Path, steps: int | str) -> Path:
    """Return `<prefix>_iter_<N>.pt`."""
    return prefix.with_name(f"{prefix.name}_iter_{steps}{CHECKPOINT}")


def write_checkpoint(
    path: Path,
    content: bytes,
    keep: int,
    write_others: Callable[[Path], Sequence[Path]] = lambda _: (),
    run: Run = NO_RUN,
) -> None:
    """Write a checkpoint and its checksums, and remove the oldest.

    Args:
        path: made by `checkpoint_path`. Until it is complete, an older one there counts for nothing.
        keep: how many with its prefix stay, the newest; 0: all.
        write_others: writes its other files, and returns them.
        run: that it belongs to.

    Raises:
        SnapshotError: it cannot be written; earlier ones are untouched.
    """
    try:
        sums_path(path).unlink(missing_ok=True)
    except OSError as error:
        raise SnapshotError(f"cannot write {path}: {error.strerror}") from error
    others = write_others(path)
    write_atomically(path, content)
    seal(path, *others, run=run)
    remove_older(path, keep)


def read_checkpoint(path: Path) -> bytes:
    """Return the bytes of a checkpoint.

    Raises:
        SnapshotError: it is missing, or does not match its checksums.
    """
    check(path)
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise SnapshotError(f"cannot read the checkpoint {path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointHead:
    """The parts of a checkpoint that a launcher needs.

    Attributes:
        steps: finished.
        workers: virtual workers of the job that has written it; by default its workers.
        has_virtual: whether the job was told their number.
        exchange_plan: that `--exchange=auto` or `hybrid` has chosen, as `RecordedPlan.to_json`; empty:
            none.
    """

    steps: int
    workers: int = 0
    has_virtual: bool
    exchange_plan: str = ""


def read_head(path: Path) -> CheckpointHead:
    """Read a checkpoint without its tensors.

    Raises:
        SnapshotError: it is missing or damaged, or is not a checkpoint of a group.
    """
    state = checked(unpacked(read_checkpoint(path), str(path)), str(path))
    told = state.get("told", "random" in state)
    try:
        return value_of(CheckpointHead, {**state, "has_virtual": told})
    except ValueError as error:
        raise SnapshotError(f"{path} is damaged: {error}") from error


def consolidate(parts: Path, output: Path) -> int:
    """Write one file of a checkpoint of torch.distributed.checkpoint, and return the number of its
    tensors. The file is for `torch.load`.

    Raises:
        SnapshotError: the folder has no such checkpoint, or the file cannot be written; an earlier
            one is unchanged.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    if not (parts / ".metadata").is_file():
        raise SnapshotError(
            f"{parts} has no .metadata; expected a folder of torch.distributed.checkpoint, whose "
            "save() has ended"
        )
    state: dict[str, Any] = {}
    try:
        _load_state_dict(
            state,
            storage_reader=FileSystemReader(parts),
            planner=_EmptyStateDictLoadPlanner(),
            no_dist=True,
        )
    except (
        Exception,
        CheckpointException,
    ) as error:  # whatever pickle, torch and the file system raise
        raise SnapshotError(f"{parts} is damaged: {described(error)}") from error
    found = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal found
        found += 1
        return tensor

    mapped(state, count)
    try:
        with replacing(output) as file:
            torch.save(state, file)
    except OSError as error:
        raise SnapshotError(f"cannot write {output}: {error.strerror}") from error
    return found
