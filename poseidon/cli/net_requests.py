"""From flags to a net that a command loads in its own process, and to its model and device."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from poseidon.cluster.job_plan import devices_from_flag
from poseidon.data.prepare.model_folder import how_to_fetch
from poseidon.engine.tools.solo import NetRequest
from poseidon.errors import SnapshotError, UsageError
from poseidon.hints import own_command
from poseidon.layers.user_modules import import_modules
from poseidon.proto.caffe_pb2 import Phase


def net_request(flags: argparse.Namespace) -> NetRequest:
    """Return what `test` or `time` is asked for; the modules that it names are imported.

    Raises:
        UsageError: fewer than one iteration, a GPU that is not there, or a module that fails.
        SnapshotError: there is no such model.
    """
    if flags.iterations < 1:
        raise UsageError(f"-iterations is {flags.iterations}, expected 1 or more")
    import_modules(flags.imports)
    return NetRequest(
        model=Path(flags.model),
        weights=weight_files(flags.weights),
        phase=Phase.Value(flags.phase),
        level=flags.level,
        stages=flags.stage,
        device=one_device(flags.gpu),
    )


def weight_files(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return the models of a -weights flag.

    Raises:
        SnapshotError: one does not exist.
    """
    for path in paths:
        if not path.is_file():
            raise SnapshotError(f"-weights: there is no file {path}{how_to_fetch(path)}")
    return paths


def missing_weights(flag: str) -> UsageError:
    """Return the error for a command without a model, which names where models come from."""
    return UsageError(
        f"{flag} is missing: name a trained model, such as the .caffemodel in a job's folder, or a "
        f"published one: {own_command()} download_model_binary FOLDER fetches it"
    )


def one_device(gpu: str) -> torch.device:
    """Return the device of a -gpu flag; of several, the first, as in Caffe.

    Raises:
        UsageError: there is no such GPU.
    """
    return torch.device(devices_from_flag(gpu, count_gpus=torch.cuda.device_count)[0])
