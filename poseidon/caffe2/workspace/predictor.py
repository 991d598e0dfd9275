"""A predictor: an init net and a net to run, in a workspace of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.runtime.facade import WorkspaceView
from poseidon.caffe2.runtime.workspace import Workspace
from poseidon.caffe2.workspace.current import current
from poseidon.caffe2.workspace.nets import parsed


class Predictor:
    """Runs a net on inputs; its parameters come from the init net, and from the current
    workspace where it has them.
    """

    def __init__(self, init_net: Any, predict_net: Any) -> None:
        """Run the init net and create the other.

        Args:
            init_net, predict_net: NetDefs, their bytes, or nets.
        """
        self._workspace = Workspace(parent=current())
        self._net = parsed(caffe2_pb2.NetDef, predict_net)
        init = parsed(caffe2_pb2.NetDef, init_net)
        self._workspace.run_once(init)
        self._inputs = list(self._net.external_input)
        for name in self._inputs:
            self._workspace.create(name)
        self._compiled = self._workspace.create_net(self._net, overwrite=True)

    def run(self, inputs: Sequence[np.ndarray] | Mapping[str, np.ndarray]) -> list[Any]:
        """Return the net's external outputs for inputs, given in the order of the external
        inputs or by name.

        Inputs that are not given keep their values from the init net or from the run before.

        Raises:
            TypeError: the inputs are one array, not a list of arrays.
            RuntimeError: there are more inputs than the net has or others, or an operator has
                failed.
        """
        if isinstance(inputs, (np.ndarray, torch.Tensor)):
            raise TypeError(
                "run: expected a list with an array for each input, such as [data], found one array"
            )
        named = (
            dict(inputs)
            if isinstance(inputs, Mapping)
            else dict(zip(self._inputs, inputs, strict=False))
        )
        if len(named) < len(inputs):
            raise RuntimeError(f"{len(inputs)} inputs are given, the net has {len(self._inputs)}")
        unknown = [name for name in named if name not in self._inputs]
        if unknown:
            raise RuntimeError(
                f"The net has no input {unknown[0]}: expected {', '.join(self._inputs)}"
            )
        view = WorkspaceView(self._workspace)
        for name, value in named.items():
            view.create_blob(name).feed(value)
        self._compiled.run()
        return [view.fetch_blob(name) for name in self._net.external_output]
