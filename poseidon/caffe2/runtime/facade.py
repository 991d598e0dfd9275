"""Workspaces as `workspace.C` gives them: objects with blobs and nets."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2.proto.caffe2_pb2 import NetDef, OperatorDef, PlanDef
from poseidon.caffe2.runtime.net import Net
from poseidon.caffe2.runtime.plan_runner import run_plan
from poseidon.caffe2.runtime.views import BlobView
from poseidon.caffe2.runtime.workspace import Workspace


class WorkspaceView:
    """A workspace; without an argument a new one of its own."""

    def __init__(self, workspace: Workspace | None = None) -> None:
        self._workspace = Workspace() if workspace is None else workspace

    @property
    def blobs(self) -> dict[str, BlobView]:
        return {name: BlobView(name, blob) for name, blob in self._workspace.blobs.items()}

    @property
    def nets(self) -> dict[str, Net]:
        return dict(self._workspace.nets)

    def create_blob(self, name: str) -> BlobView:
        """Return the blob of a name, made where there is none."""
        return BlobView(name, self._workspace.create(name))

    def has_blob(self, name: str) -> bool:
        """Return whether there is a blob of a name, here or in the workspace around."""
        return self._workspace.find(name) is not None

    def remove_blob(self, name: str) -> None:
        self._workspace.blobs.pop(name, None)

    def fetch_blob(self, name: str) -> Any:
        return BlobView(name, self._workspace.get(name)).fetch()

    def create_net(self, net: Any, overwrite: bool = False) -> Net:
        """Compile a net, given as a net or a NetDef.

        Raises:
            TypeError: it is neither.
        """
        return self._workspace.create_net(_proto(net, NetDef), overwrite)

    def run(self, runnable: Any) -> None:
        """Run a net, an operator or a plan once.

        Raises:
            TypeError: it has a different type.
        """
        proto = _proto(runnable, NetDef, OperatorDef, PlanDef)
        if isinstance(proto, NetDef):
            self._workspace.run_once(proto)
        elif isinstance(proto, OperatorDef):
            self._workspace.run_operator(proto)
        else:
            run_plan(proto, self._workspace)


def _proto(given: Any, *kinds: type) -> Any:
    proto = given.Proto() if hasattr(given, "Proto") else given
    if not isinstance(proto, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{type(given).__name__} is not a {names}")
    return proto
