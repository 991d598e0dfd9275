"""`poseidon run`: start a script of the user's on every worker of a machinefile, and stay with
the job.

In the script `poseidon.distribute` connects the workers.
"""

from __future__ import annotations

import argparse

from poseidon.cli.requests import job_request
from poseidon.launcher.request import ScriptRequest
from poseidon.launcher.runner import launch
from poseidon.launcher.site import Site, site_of
from poseidon.torch.script_job import ScriptJob


def run(flags: argparse.Namespace, site: Site | None = None) -> int:
    """Run a script on every worker; return the exit code.

    Args:
        site: the hosts; None: the machinefile's.
    """

    def make_job() -> ScriptJob:
        request = job_request(ScriptRequest, flags)
        return ScriptJob(request, site or site_of(request))

    return launch(make_job)
