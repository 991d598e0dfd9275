"""From flags to values: the one place that reads a parsed command line for several commands.

Law: a field of a request declares its flag. So a new flag changes nothing here.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypeVar

import torch

from poseidon.cluster.job_plan import devices_from_flag
from poseidon.data.prepare.model_folder import how_to_fetch
from poseidon.engine.tools.solo import NetRequest
from poseidon.errors import SnapshotError, UsageError
from poseidon.exchange.kinds import ExchangeKind
from poseidon.exchange.options import DEFAULT_OPTIONS, ExchangeOptions
from poseidon.flags.flag import values_of
from poseidon.hints import own_command
from poseidon.launch.request import ExtractionRequest, JobRequest
from poseidon.layers.user_modules import import_modules
from poseidon.proto.caffe_pb2 import Phase

AnyJobRequest = TypeVar("AnyJobRequest", bound=JobRequest)

KIND_OF_SVB = {
    "auto": ExchangeKind.HYBRID,
    "true": ExchangeKind.FACTORS,
    "1": ExchangeKind.FACTORS,
    "yes": ExchangeKind.FACTORS,
    "false": ExchangeKind.SERVER,
    "0": ExchangeKind.SERVER,
    "no": ExchangeKind.SERVER,
}
"""The values of --svb, the flag of the original Poseidon."""


def job_request(kind: type[AnyJobRequest], flags: argparse.Namespace) -> AnyJobRequest:
    """Return what a command line asks of a job.

    Args:
        kind: of the request.
        flags: of the command.

    Raises:
        UsageError: a value is out of range, or two flags exclude each other.
    """
    exchange = {**values_of(ExchangeOptions, flags), "kind": exchange_kind(flags)}
    return kind(
        argv=tuple(flags.argv),
        exchange=ExchangeOptions(**exchange),
        server_requested=flags.exchange not in (None, ExchangeKind.AUTO, ExchangeKind.LOCAL),
        **values_of(kind, flags),
    )


def extraction_request(flags: argparse.Namespace) -> ExtractionRequest:
    """Return what a command line asks of a job of feature extraction.

    Raises:
        UsageError: a value is out of range.
        SnapshotError: there is no such model.
    """
    weight_files(flags.weights)
    return ExtractionRequest(**values_of(ExtractionRequest, flags))


def exchange_kind(flags: argparse.Namespace) -> ExchangeKind:
    """Return what --exchange and --svb ask for together.

    Raises:
        UsageError: they contradict each other.
    """
    by_svb = KIND_OF_SVB[flags.svb] if flags.svb else None
    if flags.exchange is None:
        return by_svb or DEFAULT_OPTIONS.kind
    kind: ExchangeKind = flags.exchange
    if by_svb not in (None, kind):
        raise UsageError(
            f"--svb={flags.svb} means --exchange={by_svb.value}, and --exchange={kind.value} is "
            "asked for too; give one of them"
        )
    return kind


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
        f"{flag} is missing: name a trained model, such as the .caffemodel in a job's folder, or "
        "a published "
        f"one: {own_command()} download_model_binary FOLDER fetches it"
    )


def one_device(gpu: str) -> torch.device:
    """Return the device of a -gpu flag; of several, the first, as in Caffe.

    Raises:
        UsageError: there is no such GPU.
    """
    return torch.device(devices_from_flag(gpu, available=torch.cuda.device_count())[0])
