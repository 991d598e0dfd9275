"""Results of operators and nets on several devices against each other."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from poseidon.caffe2 import workspace
from poseidon.caffe2.proto import caffe2_pb2

log = logging.getLogger(__name__)


class DeviceChecker:
    """Runs the same on each device and compares with the first."""

    def __init__(self, threshold: float, device_options: Sequence[caffe2_pb2.DeviceOption]) -> None:
        """Set up a checker: how far results may be apart, and the devices."""
        self._threshold = threshold
        self._device_options = device_options

    def CheckSimple(
        self,
        op: caffe2_pb2.OperatorDef,
        inputs: Sequence[Any],
        outputs_to_check: Sequence[int],
        input_device_options: Mapping[str, Any] | None = None,
    ) -> bool:
        """Return whether the outputs of an operator are alike on all devices."""
        placed = copy.deepcopy(op)
        results = []
        for device in self._device_options:
            placed.device_option.CopyFrom(device)
            with workspace.WorkspaceGuard("_device_check_"):
                workspace.ResetWorkspace()
                for name, value in zip(op.input, inputs, strict=False):
                    workspace.FeedBlob(name, value, (input_device_options or {}).get(name, device))
                workspace.RunOperatorOnce(placed)
                results.append([workspace.FetchBlob(op.output[i]) for i in outputs_to_check])
                workspace.ResetWorkspace()
        names = [op.output[index] for index in outputs_to_check]
        return self._alike(names, results)

    def CheckNet(
        self,
        net: caffe2_pb2.NetDef,
        inputs: Mapping[str, Any] | None = None,
        blobs_to_check: Iterable[str] | None = None,
        ignore: Iterable[str] | None = None,
    ) -> bool:
        """Return whether blobs of a net, by default all that it makes, are alike on all devices."""
        made = (
            sorted({name for op in net.op for name in op.output})
            if blobs_to_check is None
            else blobs_to_check
        )
        names = [name for name in made if name not in set(ignore or ())]
        results = []
        for device in self._device_options:
            placed = copy.deepcopy(net)
            placed.device_option.CopyFrom(device)
            for op in placed.op:
                op.device_option.CopyFrom(device)
            with workspace.WorkspaceGuard("_device_check_"):
                for name, value in (inputs or {}).items():
                    workspace.FeedBlob(name, value, device)
                workspace.RunNetOnce(placed)
                results.append([workspace.FetchBlob(name) for name in names])
                workspace.ResetWorkspace()
        return self._alike(names, results)

    def _alike(self, names: Sequence[str], results: Sequence[Sequence[Any]]) -> bool:
        alike = True
        for other in results[1:]:
            for name, a, b in zip(names, results[0], other, strict=True):
                if not np.allclose(a, b, atol=self._threshold, rtol=self._threshold):
                    log.warning("%s differs between devices: %s, %s", name, a, b)
                    alike = False
        return alike
