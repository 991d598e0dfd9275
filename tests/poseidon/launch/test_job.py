"""Going on with the hosts that are left, as far as a job decides it."""

from __future__ import annotations

from typing import Any

import pytest

from poseidon.cluster.machinefile import Host, parse_machinefile
from poseidon.cluster.plan import JobPlan, plan_job
from poseidon.cluster.ssh.config import SshSettings
from poseidon.launch.job import Job
from poseidon.launch.ssh_site import SshSite


class Site(SshSite):
    """Host 0 does not answer any more."""

    def leave_out_missing(self) -> tuple[Host, ...]:
        """See `SshSite`."""
        missing, self._clients = self._clients[:1], self._clients[1:]
        return missing


class Sharing(Job):
    """A job whose data every machine has, or not."""

    def __init__(self, machinefile: str, *, shared: bool) -> None:
        self._site = Site(parse_machinefile(machinefile, source="hosts"), SshSettings())
        self._shared, self._devices = shared, ("cpu",)

    def document(self, role: object) -> Any: ...

    def shares_data(self) -> bool:
        """See `Job`."""
        return self._shared

    def _make_plan(self, devices: tuple[str, ...]) -> JobPlan:
        assert self._site is not None
        return plan_job(self._site.clients, devices_per_host=devices, channels=1)


@pytest.mark.parametrize(
    ("machinefile", "shared", "says"),
    [
        ("0 a 0\n1 b 0\n2 c 0", True, "going on without client 0 (a): 2 clients, 2 workers, 2 shards from here on"),
        ("0 a 0\n1 b 0\n2 c 0", False, ""),
        ("0 a 0 role=server\n1 b 0 role=worker\n2 c 0 role=worker", True, ""),
    ],
)  # fmt: skip
def test_a_job_goes_on_where_the_data_is_shared_and_somebody_serves(
    machinefile: str, shared: bool, says: str
) -> None:
    assert Sharing(machinefile, shared=shared)._do_without() == says
