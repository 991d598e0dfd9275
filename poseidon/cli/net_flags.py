"""The flags that `test`, `time` and `extract_features` have in common, as Caffe's tools name them."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from poseidon.cluster.plan import devices_from_flag
from poseidon.engine.tools.solo import NetRequest
from poseidon.errors import SnapshotError, UsageError
from poseidon.layers.user_modules import import_modules, module_names
from poseidon.proto.caffe_pb2 import Phase


def net_request(arguments: argparse.Namespace) -> NetRequest:
    """What the flags ask for; the modules that they name are imported.

    Raises:
        UsageError: fewer than one iteration, a GPU that is not there, or a module that fails.
        SnapshotError: there is no such model.
    """
    if arguments.iterations < 1:
        raise UsageError(f"-iterations is {arguments.iterations}, expected 1 or more")
    import_modules(module_names(arguments.imports))
    return NetRequest(
        model=Path(arguments.model),
        weights=weight_files(arguments.weights),
        phase=Phase.Value(arguments.phase),
        level=arguments.level,
        stages=tuple(stage for stage in arguments.stage.split(",") if stage),
        device=one_device(arguments.gpu),
    )


def weight_files(text: str) -> tuple[Path, ...]:
    """The models of a -weights flag, parted by commas.

    Raises:
        SnapshotError: one is not there.
    """
    paths = tuple(Path(part.strip()) for part in text.split(",") if part.strip())
    for path in paths:
        if not path.is_file():
            raise SnapshotError(f"-weights: there is no file {path}")
    return paths


def one_device(gpu: str) -> torch.device:
    """The device of a -gpu flag; of several, the first, as in Caffe.

    Raises:
        UsageError: there is no such GPU.
    """
    return torch.device(devices_from_flag(gpu, available=torch.cuda.device_count())[0])
