"""`poseidon join`: add a host to a running job."""

from __future__ import annotations

import argparse

from poseidon.cli.leave import ask
from poseidon.cluster.jobs.requests import HostRequest
from poseidon.errors import UsageError

ANSWER_S = 300.0
"""The host is reached, and its processes are prepared, before the answer."""


def run(arguments: argparse.Namespace) -> int:
    """Let a host take part in a job."""
    if not arguments.host:
        raise UsageError("expected --host=ADDRESS, the host that is to take part")
    print(ask(arguments.job, HostRequest(do="join", host=arguments.host), ANSWER_S))
    return 0
