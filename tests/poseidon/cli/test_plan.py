"""`poseidon plan` from flags to text and JSON; nothing is measured on other hosts here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from poseidon.cli import plan
from poseidon.cli.main import main
from tests.support.host_costs import COSTS

ROOT = Path(__file__).parents[3]
NET = f"--net={ROOT / 'prototxt' / 'cifar10' / 'cifar10_quick.prototxt'}"


@pytest.fixture(autouse=True)
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "local_costs", lambda clients: COSTS)


def test_a_table_and_a_recommendation_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", NET, "--hosts=4", "--rate=100", "--compute=20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "0.1 M parameters, batch 1, compute 20.0 ms" in lines[0]
    assert "4 hosts, links of 100 Mbit/s (given)" in lines[1]
    assert any(line.startswith("Recommended: --exchange=") for line in lines)
    assert (
        sum(
            line.startswith(("hybrid ", "ps ", "svb ", "allreduce ", "auto ", "DDP "))
            for line in lines
        )
        == 6
    )


def test_virtual_workers_and_their_cost_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--hosts=3", "--rate=100", "--compute=20", "--virtual_workers=7"]
    assert main(["plan", NET, *words]) == 0
    assert "7 virtual workers: 2 or 3 on each host" in capsys.readouterr().out


def test_scripts_get_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", NET, "--hosts=4", "--rate=100", "--compute=20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["workers"], found["compute_s"]) == (4, 0.02)
    assert found["network"] == {"bits_per_s": 1e8, "latency_s": 5e-5, "measured": False}
    assert found["recommended"] in {
        scheme["flags"] for scheme in found["schemes"] if scheme["exact"]
    }
    assert all(scheme["iteration_s"] >= 0.02 for scheme in found["schemes"])


def test_hosts_of_a_machinefile_on_this_machine_share_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = tmp_path / "machines"
    machines.write_text("0 127.0.0.1 9999\n1 127.0.0.1 9998\n2 127.0.0.1 9997 role=server\n")
    assert main(["plan", NET, f"--hostfile={machines}", "--compute=20"]) == 0
    output = capsys.readouterr().out
    assert "2 hosts and 1 that only serve" in output
    assert "note: all hosts of the machinefile are this machine" in output


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            "--hosts=4 --rate=100",
            "expected one of --solver, --net and --module, found none of them",
        ),
        ("NET --solver=x --hosts=4 --rate=100", "found --solver and --net"),
        ("NET --hosts=4", "expected --hostfile=FILE, or --hosts=N and --rate=MBIT"),
        ("NET --hostfile=x --hosts=4", "leave out --hosts and --servers"),
        ("NET --hosts=4 --rate=100 --virtual_workers=3 --compute=1", "expected 4 to 4096"),
        ("NET --hosts=4 --rate=100 --seconds=1", "--seconds must be at least 5, not 1"),
        ("--net=missing.prototxt --hosts=4 --rate=100", "missing.prototxt"),
    ],
)
def test_mistakes_are_one_sentence(
    words: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words.replace("NET", NET).split()]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line
