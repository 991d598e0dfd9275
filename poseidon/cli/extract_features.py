"""`poseidon extract_features`: features of a trained net into databases, by the arguments of
Caffe's tool or as a job.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from poseidon.base import glog
from poseidon.caffe.data.staging import EXTRACTING
from poseidon.caffe.launch.extraction_job import check_extraction, run_extraction_job
from poseidon.caffe.tools.extractor import run_extraction
from poseidon.caffe.tools.preflight import Extraction
from poseidon.cli.nets import one_device
from poseidon.cli.progress_bar import progress_bar
from poseidon.flags.flag import values_of
from poseidon.flags.values import parts, paths
from poseidon.launcher.request import ExtractionRequest
from ps_server.numerics import prepare_process


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
