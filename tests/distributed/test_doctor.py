"""`poseidon doctor` on four real hosts: a healthy cluster, and one with a firewall, a slow link,
a wrong clock, a wrong MTU.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed import links
from poseidon.cli.main import main
from tests.support.needs import find
from tests.support.polling import until
from tests.support.ssh_hosts import SshHost, SshHosts

pytestmark = [pytest.mark.timeout(170), pytest.mark.needs("hosts", "firewall", "clock")]
PORT = 9999


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SshHosts, Path]]:
    """Four hosts, and the folder of the command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with SshHosts(tmp_path, 4) as hosts:
        monkeypatch.setenv("HOME", str(hosts.home))
        lines = [f"{number} {host.address} {PORT}" for number, host in enumerate(hosts)]
        (tmp_path / "cluster").write_text("\n".join(lines))
        yield hosts, tmp_path


def examine(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--hostfile=cluster", "--json", "--seconds=0.3", *more])
    return code, json.loads(capsys.readouterr().out)


def about(survey: dict[str, Any], text: str) -> list[dict[str, str]]:
    """Return the findings whose sentence has a text."""
    return [finding for finding in survey["findings"] if text in finding["what"]]


def test_a_healthy_cluster_has_no_error_and_every_link_is_measured(
    desk: tuple[SshHosts, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    hosts, _ = desk
    code, survey = examine(capsys)
    assert code == 0
    assert [host["address"] for host in survey["hosts"]] == [host.address for host in hosts]
    assert sorted((link["source"], link["target"]) for link in survey["links"]) == [
        (a, b) for a in range(4) for b in range(4) if a != b
    ]
    for link in survey["links"]:
        assert set(link["ports"].values()) == {"open"}
        assert len(link["ports"]) == 2
        assert link["bytes_per_s"] > 0
        assert link["rtt_s"] > 0
        assert link["largest_packet"] == link["mtu"] == links.MTU_BYTES
    for text in ("clock", "MTU", "packets", "port", "resolve"):
        assert not about(survey, text)
    until(lambda: all(not host.processes() for host in hosts), "a probe is left", 30.0)


def test_each_injected_fault_is_named(
    desk: tuple[SshHosts, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    hosts, folder = desk
    _drop_port(hosts[1])
    links.shape(hosts[2].network, 2)
    hosts[0].run(["ip", "link", "set", "dev", links.INTERFACE, "mtu", "1400"])
    late = hosts[3].outside("/root/python")
    late.write_text(
        f"#!/bin/sh\nFAKETIME=+60s LD_PRELOAD='{_clock_library()}' exec {sys.executable} \"$@\"\n"
    )
    late.chmod(0o755)
    lines = (folder / "cluster").read_text().splitlines()
    (folder / "cluster").write_text("\n".join([*lines[:3], f"{lines[3]} python=/root/python"]))

    code, survey = examine(capsys)
    names = [host["label"] for host in survey["hosts"]]
    assert code == 1
    (port,) = about(survey, f"TCP port {PORT}:")
    assert (port["where"], port["severity"]) == (names[1], "error")
    assert "the other hosts cannot connect" in port["what"]
    assert "a firewall drops the packets" in port["what"]
    (clock,) = about(survey, "clock")
    assert clock["where"] == names[3]
    ahead = re.search(r"(\d+) s ahead", clock["what"])
    assert ahead is not None and 50 <= int(ahead[1]) <= 70  # the answer takes its time
    (mtu,) = about(survey, "MTU")
    assert mtu["where"] == names[0]
    assert f"its MTU is 1400, and the other hosts have {links.MTU_BYTES}" in mtu["what"]
    slow = [finding for finding in survey["findings"] if "expected" in finding["what"]]
    # on a busy machine other links may be measured slow, too
    assert names[2] in {finding["where"] for finding in slow}
    source, target = survey["slowest_link"]
    assert 2 in (source, target)


def _drop_port(host: SshHost) -> None:
    """Let the host's firewall drop what comes for the port of the machinefile."""
    nft = find("nft") or ""
    chain = f"type filter hook input priority 0\ntcp dport {PORT} drop"
    rules = f"table inet test {{\nchain input {{\n{chain}\n}}\n}}\n"
    host.outside("/root/rules").write_text(rules)
    host.run([nft, "-f", "/root/rules"])


def _clock_library() -> str:
    """Return the library that shifts a process's clock: the command itself leaves semaphores
    behind.
    """
    words = [
        find("faketime") or "",
        "-f",
        "+1s",
        sys.executable,
        "-c",
        "import os; print(os.environ['LD_PRELOAD'])",
    ]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
