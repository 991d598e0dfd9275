"""What every job has in common: whether its hosts may change while it runs."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from poseidon.cluster.dial.dialer import LocalDialer
from poseidon.cluster.machinefile import parse_machinefile
from poseidon.errors import UsageError
from poseidon.exchange.options import ExchangeOptions
from poseidon.launcher.request import Balance, JobRequest
from poseidon.launcher.site import Site
from tests.support.fake_job import FakeJob

TWO = "0 node0 0\n1 node1 0"


ALONE = "it has one host with workers and no --elastic=every=N"


class FreeJob(FakeJob):
    """A job whose hosts can do the same."""

    bound_because = ""


class BoundJob(FreeJob):
    """A job whose hosts cannot."""

    bound_because = "each host has data of its own"


@pytest.mark.parametrize(
    ("kind", "hosts", "flags", "reason"),
    [
        (FreeJob, TWO, {}, ""),
        (BoundJob, TWO, {}, "each host has data of its own"),
        (FreeJob, "0 node0 0", {}, ALONE),
        (FreeJob, TWO + " role=server", {}, ALONE),
        (FreeJob, "0 node0 0", {"memory_snapshot_every": 5}, ""),
        (FreeJob, "0 node0 0", {"memory_snapshot_every": 0}, "--elastic=every is 0"),
        (FreeJob, "0 127.0.0.1 0\n1 127.0.0.1 0", {}, "--max_restarts is 0"),
        (FreeJob, "0 127.0.0.1 0\n1 127.0.0.1 0", {"max_restarts": 1}, ""),
        (FreeJob, TWO, {"max_restarts": 0}, "--max_restarts is 0"),
        (FreeJob, TWO, {"elastic": 0}, "--elastic is 0"),
        (FreeJob, TWO, {"memory_snapshot_every": 0}, "--elastic=every is 0"),
        (FreeJob, TWO, {"memory_snapshot_every": 5}, ""),
        (FreeJob, TWO, {"exchange": ExchangeOptions(staleness=1)}, "--staleness is not 0"),
        (FreeJob, TWO, {"exchange": ExchangeOptions(local_steps=8)}, ""),
        (
            FreeJob,
            TWO,
            {"exchange": ExchangeOptions(local_steps=8, sync_fragments=2)},
            "--local_steps has fragments",
        ),
        (
            FreeJob,
            TWO,
            {"exchange": ExchangeOptions(local_steps=8, sync_delay=1)},
            "--local_steps has a delay",
        ),
    ],
)
def test_why_the_hosts_of_a_job_stay(
    kind: type[FreeJob], hosts: str, flags: dict[str, Any], reason: str
) -> None:
    site = Site(parse_machinefile(hosts, source="hosts"), LocalDialer())
    request = JobRequest(output=Path("out"), **flags)
    job = kind(request, site, title="", stem="j", devices=("cpu",))
    assert (job.fixed_because, job.elastic) == (reason, not reason)
    request = replace(request, balance=Balance(measured=True))
    sentence = f"at snapshots in memory, but this job takes none: {reason}; start"
    with pytest.raises(UsageError, match=re.escape(sentence)) if reason else nullcontext():
        kind(request, site, title="", stem="j", devices=("cpu",))


@pytest.mark.parametrize(
    ("hosts", "flags", "refusal"),
    [
        ("0 node0 0", {"elastic": 1}, "--elastic=1: each copy of a memory snapshot needs a"),
        (TWO, {"elastic": 2}, "this job has 2 hosts with workers; expected 1 or less"),
        (
            TWO,
            {"min_workers": 3},
            "--elastic=min_workers=3: this job has 2 workers; expected 2 or less",
        ),
        (TWO, {"elastic": 1, "min_workers": 2}, ""),
    ],
)
def test_a_job_with_too_few_hosts_is_refused(
    hosts: str, flags: dict[str, Any], refusal: str
) -> None:
    site = Site(parse_machinefile(hosts, source="hosts"), LocalDialer())
    with pytest.raises(UsageError, match=re.escape(refusal)) if refusal else nullcontext():
        FreeJob(JobRequest(output=Path("out"), **flags), site, title="", stem="j", devices=("cpu",))
