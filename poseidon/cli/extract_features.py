"""`poseidon extract_features`: features of a trained net into databases, by the arguments of
Caffe's tool or as a job.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from poseidon import log
from poseidon.cli.net_requests import missing_weights, one_device, weight_files
from poseidon.cli.progress_bar import progress_bar
from poseidon.data.progress_reports import EXTRACTING
from poseidon.engine.tools.extraction import Extraction
from poseidon.engine.tools.extractor import run_extraction
from poseidon.errors import UsageError, counted
from poseidon.flags.flag import values_of
from poseidon.flags.values import parts, paths
from poseidon.launcher.extraction_job import check_extraction, run_extraction_job
from poseidon.launcher.request import ExtractionRequest
from ps_server.numerics import prepare_process

CAFFE_ARGUMENTS = "WEIGHTS NET BLOBS DATABASES NUM_MINI_BATCHES DB_TYPE [CPU/GPU] [DEVICE_ID]"
NEEDED = ("model", "weights", "extract_feature_blob_names", "save_feature_dataset_names")


def run(flags: argparse.Namespace) -> int:
    """Extract; return 0 when every database is in place."""
    if flags.caffe_arguments:
        if any(getattr(flags, name) for name in NEEDED):
            raise UsageError("give either the arguments of Caffe's tool or flags, not both")
        extraction = replace(from_caffe_arguments(flags.caffe_arguments), imports=flags.imports)
        return _run_alone(extraction, flags.progress)
    for name in NEEDED:
        if name == "weights" and not flags.weights and flags.model:
            raise missing_weights("--weights")
        if not getattr(flags, name):
            raise UsageError(
                f"--{name} is missing; or give the arguments of Caffe's tool: {CAFFE_ARGUMENTS}"
            )
    weight_files(flags.weights)
    return run_extraction_job(ExtractionRequest(**values_of(ExtractionRequest, flags)))


def from_caffe_arguments(arguments: Sequence[str]) -> Extraction:
    """Return what the arguments of Caffe's tool ask for.

    Raises:
        UsageError: too few or too many of them, or one that is out of range.
        SnapshotError: there is no such model.
    """
    if not 6 <= len(arguments) <= 8:
        given = counted(len(arguments), "argument")
        raise UsageError(f"expected {CAFFE_ARGUMENTS}, found {given}")
    weights, model, blobs, databases, count, kind = arguments[:6]
    if weights.endswith(".prototxt"):
        raise UsageError(f"WEIGHTS is the definition {weights}; the order is {CAFFE_ARGUMENTS}")
    if not count.isdecimal() or int(count) < 1:
        raise UsageError(f"NUM_MINI_BATCHES is '{count}', expected 1 or more")
    mode = arguments[6] if len(arguments) > 6 else "CPU"
    number = arguments[7].removeprefix("DEVICE_ID=") if len(arguments) > 7 else "0"
    if mode not in ("CPU", "GPU"):
        raise UsageError(f"'{mode}' is neither CPU nor GPU")
    return Extraction(
        model=model,
        weights=tuple(map(str, weight_files(paths(weights)))),
        blobs=parts(blobs),
        databases=parts(databases),
        backend=kind.lower(),
        batches=int(count),
        device=str(one_device(number if mode == "GPU" else "")),
    )


def _run_alone(extraction: Extraction, progress: str) -> int:
    check_extraction(extraction, extraction.paths())
    prepare_process()
    with progress_bar(progress) as report, log.setup(stream=sys.stderr):
        run_extraction(extraction, lambda done, total, _: report(EXTRACTING, done, total))
    return 0
