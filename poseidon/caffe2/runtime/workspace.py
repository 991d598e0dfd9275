"""A workspace: blobs by name and the nets that run over them."""

from __future__ import annotations

from poseidon.caffe2.proto.caffe2_pb2 import NetDef, OperatorDef
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.runtime.net import Net, compile_operator, failure
from poseidon.caffe2.runtime.values import Blob


class Workspace:
    """Blobs and nets by name.

    Attributes:
        blobs: the workspace's own blobs.
        nets: its compiled nets.
        root_folder: the folder that operators with files start from.
        parent: the workspace whose blobs are seen too, where this one has none of the name.
    """

    def __init__(self, root_folder: str = ".", parent: Workspace | None = None) -> None:
        self.blobs: dict[str, Blob] = {}
        self.nets: dict[str, Net] = {}
        self.root_folder = root_folder
        self.parent = parent

    def find(self, name: str) -> Blob | None:
        """Return the blob of a name, None where there is none."""
        blob = self.blobs.get(name)
        if blob is None and self.parent is not None:
            return self.parent.find(name)
        return blob

    def get(self, name: str) -> Blob:
        """Return the blob of a name.

        Raises:
            RuntimeError: there is none.
        """
        blob = self.find(name)
        if blob is None:
            raise EnforceNotMet(f"Can't find blob: {name}")
        return blob

    def create(self, name: str) -> Blob:
        """Return the blob of a name; an empty one is made where there is none."""
        blob = self.find(name)
        if blob is None:
            blob = self.blobs[name] = Blob()
        return blob

    def create_net(self, definition: NetDef, overwrite: bool = False) -> Net:
        """Compile a net and keep it under its name.

        Raises:
            RuntimeError: there is a net of this name and `overwrite` is not set.
            RuntimeError: an operator cannot be made.
        """
        if definition.name in self.nets and not overwrite:
            raise EnforceNotMet(
                f"A net of the name {definition.name} exists already; overwrite=True replaces it"
            )
        self.nets[definition.name] = net = Net(definition, self)
        return net

    def run_once(self, definition: NetDef) -> None:
        """Compile a net, run it, and forget it."""
        Net(definition, self).run()

    def run_operator(self, definition: OperatorDef) -> None:
        call = compile_operator(definition, self)
        try:
            call()
        except Exception as error:
            raise failure(
                error, definition, [self.get(name) for name in definition.input]
            ) from error

    def reset(self, root_folder: str | None = None) -> None:
        """Drop all blobs and nets; the root folder stays unless one is given."""
        self.nets.clear()
        self.blobs.clear()
        if root_folder is not None:
            self.root_folder = root_folder
