"""From flags to a net that a command loads in its own process, and to its model and device."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from poseidon.caffe.layers.user_modules import import_modules
from poseidon.caffe.proto.caffe_pb2 import Phase
from poseidon.caffe.tools.solo import NetRequest
from poseidon.cluster.job_plan import devices_from_flag


def net_request(flags: argparse.Namespace) -> NetRequest:
    """Return what `test` or `time` is asked for; the modules that it names are imported.

    Raises:
        UsageError: a GPU that is not there, or a module that fails.
    """
    import_modules(flags.imports)
    return NetRequest(
        model=Path(flags.model),
        weights=flags.weights,
        phase=Phase.Value(flags.phase),
        level=flags.level,
        stages=flags.stage,
        device=one_device(flags.gpu),
    )


def one_device(gpu: str) -> torch.device:
    """Return the device of a -gpu flag; of several, the first, as in Caffe.

    Raises:
        UsageError: there is no such GPU.
    """
    return torch.device(devices_from_flag(gpu, count_gpus=torch.cuda.device_count)[0])
