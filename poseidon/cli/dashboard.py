"""`poseidon dashboard`: a live page of jobs, running or ended, from their output folders."""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path

from poseidon.base.settings import read_settings
from poseidon.cluster.jobs.registry import Registry
from poseidon.cluster.machinefile import HIGHEST_PORT, is_loopback
from poseidon.errors import UsageError
from poseidon.launcher.job_folder import OUTPUT, local_records


def run(arguments: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    try:
        from poseidon.observe.dashboard.serve import serve
    except ImportError as error:
        raise UsageError(
            f"the dashboard needs packages that are not installed ({error}): pip install "
            "'poseidon[dashboard]'"
        ) from error
    if not 0 <= arguments.port <= HIGHEST_PORT:
        raise UsageError(f"--port={arguments.port}: expected 0 (a free port) to {HIGHEST_PORT}")
    folders = [Path(folder) for folder in arguments.folders]
    if not folders:
        records = local_records(Registry(read_settings().state_folder))
        folders = [OUTPUT, *(Path(record.output) for record in records)]
    token = "" if is_loopback(arguments.host) else secrets.token_urlsafe(24)
    return serve(folders, host=arguments.host, port=arguments.port, token=token)
