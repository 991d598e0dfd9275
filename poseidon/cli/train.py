"""`poseidon train`: start a job from a solver and a machinefile, and stay with it."""

from __future__ import annotations

import argparse
import sys

from poseidon.caffe.launch.training_job import TrainingJob
from poseidon.cli.jobs import job_request
from poseidon.launcher.request import TrainRequest
from poseidon.launcher.runner import launch
from poseidon.launcher.site import Site, site_of


def run_train(flags: argparse.Namespace, site: Site | None = None) -> int:
    """Train; return the exit code.

    Args:
        site: the hosts; None: the machinefile's.
    """
    if flags.client_id:
        print(
            f"client {flags.client_id} is started by the command of client 0; nothing to do",
            file=sys.stderr,
        )
        return 0

    def make_job() -> TrainingJob:
        request = job_request(TrainRequest, flags)
        return TrainingJob(request, site or site_of(request))

    return launch(make_job)
