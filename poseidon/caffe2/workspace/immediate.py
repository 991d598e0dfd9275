"""The immediate mode: operators run as they are created, in a workspace of their own."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.workspace.current import ResetWorkspace, WorkspaceGuard, log
from poseidon.caffe2.workspace.feeding import Blobs, FeedBlob, FetchBlob
from poseidon.caffe2.workspace.nets import RunOperatorOnce

WORKSPACE = "_CAFFE2_IMMEDIATE"


class _Mode:
    """Whether the mode is on, and the folder of its workspace."""

    active = False
    folder = ""


def IsImmediate() -> bool:
    """Return whether operators run as they are created."""
    return _Mode.active


def StartImmediate(i_know: bool = False) -> None:
    """Run operators as they are created; `i_know` keeps the warning away that this is for
    experiments only.
    """
    if IsImmediate():
        return
    _Mode.active = True
    with WorkspaceGuard(WORKSPACE):
        _Mode.folder = tempfile.mkdtemp()
        ResetWorkspace(_Mode.folder)
    if not i_know:
        log.warning(
            "Immediate mode: operators run as they are created, until StopImmediate(). For "
            "experiments only."
        )


def StopImmediate() -> None:
    """End the mode; its blobs are lost."""
    if not IsImmediate():
        return
    with WorkspaceGuard(WORKSPACE):
        ResetWorkspace()
    shutil.rmtree(_Mode.folder, ignore_errors=True)
    _Mode.folder = ""
    _Mode.active = False


def ImmediateBlobs() -> list[str]:
    """Return the names of the mode's blobs."""
    with WorkspaceGuard(WORKSPACE):
        return Blobs()


def RunOperatorImmediate(op: caffe2_pb2.OperatorDef) -> None:
    """Run an operator in the mode's workspace."""
    with WorkspaceGuard(WORKSPACE):
        RunOperatorOnce(op)


def FetchImmediate(*args: Any, **kwargs: Any) -> Any:
    """Return a blob of the mode's workspace; see `FetchBlob`."""
    with WorkspaceGuard(WORKSPACE):
        return FetchBlob(*args, **kwargs)


def FeedImmediate(*args: Any, **kwargs: Any) -> bool:
    """Set a blob of the mode's workspace; see `FeedBlob`."""
    with WorkspaceGuard(WORKSPACE):
        return FeedBlob(*args, **kwargs)
