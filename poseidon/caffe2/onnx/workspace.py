"""Workspaces as objects, and outputs by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from poseidon.caffe2 import workspace as workspaces
from poseidon.caffe2.runtime.views import WorkspaceView
from poseidon.caffe2.runtime.workspace import Workspace as Blobs


class Workspace:
    """A workspace of its own with the functions of the module `workspace`."""

    def __init__(self) -> None:
        self._view = WorkspaceView(Blobs())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(workspaces, name)

        def inside(*args: Any, **kwargs: Any) -> Any:
            with workspaces.WorkspaceGuard(self._view):
                return function(*args, **kwargs)

        return inside


def named_outputs(workspace: Workspace, names: Sequence[str]) -> Any:
    """Return the values of blobs as a named tuple, which takes names as keys too."""
    base = importlib.import_module("onnx.backend.base")
    return base.namedtupledict("Outputs", list(names))(*map(workspace.FetchBlob, names))
