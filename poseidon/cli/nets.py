"""The commands that run a net: test, time and extract_features; and device_query.

Each runs in its own process. Only extract_features can also be a job of many workers.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

from poseidon.base import glog
from poseidon.caffe.data.staging import EXTRACTING
from poseidon.caffe.launch.extraction_job import check_extraction, run_extraction_job
from poseidon.caffe.layers.registry import import_modules
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import Phase
from poseidon.caffe.tools.benchmark import time_net
from poseidon.caffe.tools.extractor import run_extraction
from poseidon.caffe.tools.preflight import Extraction
from poseidon.caffe.tools.solo import NetRequest, open_net, score
from poseidon.cli.entry import on_ctrl_c
from poseidon.cli.progress_bar import CommandProgress, progress_bar
from poseidon.cluster.job_plan import devices_from_flag
from poseidon.errors import JobError, UsageError
from poseidon.exchange.compute_options import ComputeOptions
from poseidon.exchange.device import choose_fastest, compute_on
from poseidon.flags.flag import values_of
from poseidon.flags.values import parts, paths
from poseidon.launcher.request import ExtractionRequest
from poseidon.observe.metrics.glog_lines import GlogSink, running, using
from ps_server.numerics import prepare_process


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Return, within the block, whether Ctrl-C was pressed; a second Ctrl-C raises
    KeyboardInterrupt. See `on_ctrl_c`.
    """
    pressed = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            signal.default_int_handler(number, frame)
        pressed.set()

    with on_ctrl_c(note):
        yield pressed.is_set


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
        compute=ComputeOptions(**values_of(ComputeOptions, flags)),
    )


def one_device(gpu: str) -> torch.device:
    """Return the device of a -gpu flag; of several, the first, as in Caffe.

    Raises:
        UsageError: there is no such GPU.
    """
    return torch.device(devices_from_flag(gpu, count_gpus=torch.cuda.device_count)[0])


class RunningNet(NamedTuple):
    """A net that a command runs.

    Attributes:
        stopped: whether Ctrl-C was pressed.
    """

    net: Net
    sink: GlogSink
    progress: CommandProgress
    stopped: Callable[[], bool]


@contextmanager
def running_net(arguments: argparse.Namespace, logger: logging.Logger) -> Iterator[RunningNet]:
    """Open the net of `test` or `time` for the block."""
    prepare_process()
    request = net_request(arguments)
    compute_on(request.device, request.compute)
    sink = GlogSink(logger)
    with (
        progress_bar(arguments.progress) as progress,
        glog.setup(stream=sys.stderr),
        asked_to_stop() as stopped,
    ):
        name = torch.cuda.get_device_name(request.device) if request.device.type == "cuda" else ""
        sink.write(*using(str(request.device), gpu_name=name))
        with closing(open_net(request)) as net:
            choose_fastest(request.compute, shapes_change=bool(net.changing_slots))
            yield RunningNet(net, sink, progress, stopped)


TEST_LOGGER = logging.getLogger("poseidon.test")


def run_test(arguments: argparse.Namespace) -> int:
    """Score; 0 when all batches have been, 130 when Ctrl-C came before."""
    with running_net(arguments, TEST_LOGGER) as (net, sink, progress, stopped):
        sink.write(running(arguments.iterations))
        write = progress.without_details(sink.write)
        scores = score(net, arguments.iterations, write, report=progress, stopped=stopped)
    return 0 if scores.batches == arguments.iterations else 128 + signal.SIGINT


TIME_LOGGER = logging.getLogger("poseidon.time")


def run_time(arguments: argparse.Namespace) -> int:
    """Measure; 0 when done, 130 when Ctrl-C came before."""
    with running_net(arguments, TIME_LOGGER) as (net, sink, progress, stopped):
        write = progress.without_details(sink.write)
        times = time_net(net, arguments.iterations, write, report=progress, stopped=stopped)
    return 0 if times.iterations == arguments.iterations else 128 + signal.SIGINT


# Caffe's words and torch's names; not every torch knows all of them.
PROPERTIES = (
    ("Major revision number:         ", "major"),
    ("Minor revision number:         ", "minor"),
    ("Name:                          ", "name"),
    ("Total global memory:           ", "total_memory"),
    ("Total shared memory per block: ", "shared_memory_per_block"),
    ("Total registers per multiprocessor: ", "regs_per_multiprocessor"),
    ("Warp size:                     ", "warp_size"),
    ("Maximum threads per multiprocessor: ", "max_threads_per_multi_processor"),
    ("Clock rate:                    ", "clock_rate"),
    ("Number of multiprocessors:     ", "multi_processor_count"),
)


def run_device_query(arguments: argparse.Namespace) -> int:
    """Show them."""
    available = torch.cuda.device_count()
    if not available:
        raise JobError(
            f"there is no CUDA device on this machine that torch {torch.__version__} can use"
        )
    devices = devices_from_flag(arguments.gpu or "all", count_gpus=lambda: available)
    if devices == ("cpu",):
        raise UsageError("-gpu=cpu: the CPU is not a CUDA device; expected device numbers or all")
    print(f"Querying GPUs {arguments.gpu or 'all'}")
    for device in devices:
        print(f"Device id:                     {device.partition(':')[2]}")
        found = torch.cuda.get_device_properties(device)
        for words, name in PROPERTIES:
            if hasattr(found, name):
                print(f"{words}{getattr(found, name)}")
    return 0


def run_extract_features(flags: argparse.Namespace) -> int:
    """Extract; return 0 when every database is in place."""
    if flags.caffe_arguments:
        extraction = replace(from_caffe_arguments(flags.caffe_arguments), imports=flags.imports)
        return _run_alone(extraction, flags.progress)
    return run_extraction_job(ExtractionRequest(**values_of(ExtractionRequest, flags)))


def from_caffe_arguments(arguments: Sequence[str]) -> Extraction:
    """Return what the arguments of Caffe's tool, which have been checked, ask for."""
    weights, model, blobs, databases, count, kind = arguments[:6]
    mode = arguments[6] if len(arguments) > 6 else "CPU"
    number = arguments[7].removeprefix("DEVICE_ID=") if len(arguments) > 7 else "0"
    return Extraction(
        model=model,
        weights=tuple(map(str, paths(weights))),
        blobs=parts(blobs),
        databases=parts(databases),
        backend=kind.lower(),
        batches=int(count),
        device=str(one_device(number if mode == "GPU" else "")),
    )


def _run_alone(extraction: Extraction, progress: str) -> int:
    check_extraction(extraction, extraction.paths())
    prepare_process()
    with progress_bar(progress) as report, glog.setup(stream=sys.stderr):
        run_extraction(extraction, lambda done, total, _: report(EXTRACTING, done, total))
    return 0
