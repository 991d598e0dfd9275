"""`poseidon plan` on two real hosts with slow links: it reports the hosts' rates and processors,
and leaves nothing there.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.testbed import links
from poseidon.cli.main import main
from poseidon.observe.plan import cluster_probe
from tests.support.polling import until
from tests.support.ssh_hosts import SshHosts

pytestmark = [pytest.mark.timeout(300), pytest.mark.needs("hosts")]
NET = Path(__file__).parents[2] / "prototxt" / "cifar10" / "cifar10_quick.prototxt"
RATE_MBIT = 50.0


def test_the_hosts_of_a_machinefile_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr(cluster_probe, "COSTS_S", 0.1)
    monkeypatch.setattr(cluster_probe, "START_S", 200.0)
    with SshHosts(tmp_path, 2) as hosts:
        monkeypatch.setenv("HOME", str(hosts.home))
        for host in hosts:
            links.shape(host.network, RATE_MBIT)
        lines = [f"{number} {host.address} 9999" for number, host in enumerate(hosts)]
        (tmp_path / "cluster").write_text("\n".join(lines))
        words = [
            "plan",
            f"--net={NET}",
            "--hostfile=cluster",
            "--compute=20",
            "--seconds=5",
            "--json",
        ]
        assert main(words) == 0
        found = json.loads(capsys.readouterr().out)
        until(lambda: all(not host.processes() for host in hosts), "a probe is left", 30.0)
    assert (found["workers"], found["servers"]) == (2, 0)
    assert found["network"]["measured"]
    assert 0 < found["network"]["bits_per_s"] < 1.1e6 * RATE_MBIT
    assert found["costs"]["flops"] > 0
    assert all(scheme["iteration_s"] >= 0.02 for scheme in found["schemes"])
