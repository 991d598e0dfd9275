"""What scripts take from `workspace.C`, the compiled part of Caffe2."""

from __future__ import annotations

from typing import Any

import torch

from poseidon.caffe2.operators import registry
from poseidon.caffe2.runtime.facade import WorkspaceView
from poseidon.caffe2.runtime.workspace import Workspace as RuntimeWorkspace
from poseidon.caffe2.workspace.current import current


class _WithCurrent(type):
    @property
    def current(cls) -> WorkspaceView:
        """The current workspace."""
        return WorkspaceView(current())


class Workspace(WorkspaceView, metaclass=_WithCurrent):
    """A workspace of its own, or inside another, whose blobs it sees; `Workspace.current` is the current one."""

    def __init__(self, parent: WorkspaceView | None = None) -> None:
        super().__init__(RuntimeWorkspace(parent=None if parent is None else parent._workspace))


use_mkldnn = torch.backends.mkldnn.is_available()
has_fbgemm = False


def nearby_opnames(name: str) -> list[str]:
    """Return the names of operators that are most like a name."""
    return registry.nearest(name)


def registered_operators() -> list[str]:
    """Return the names of all operators."""
    return registry.registered()


def is_numa_enabled() -> bool:
    """Return False: blobs are not bound to NUMA nodes."""
    return False


def get_stats() -> dict[str, Any]:
    """Return an empty dictionary: there are no counters."""
    return {}
