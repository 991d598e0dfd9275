"""The flags of `poseidon doctor` and `poseidon plan` that name files; the commands themselves
are tested in tests/distributed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.cli.doctor import _gpu_lines, survey_lines
from poseidon.cli.main import main
from poseidon.cluster.doctor.findings import judge
from poseidon.cluster.doctor.survey import HostReport, Survey


@pytest.mark.parametrize(
    "command",
    [["doctor"], ["plan", "--module=train.py:example", "--compute=1"]],
    ids=["doctor", "plan"],
)
def test_a_missing_ssh_configuration_is_one_sentence(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster").write_text("0 node7.invalid 9999\n1 node8.invalid 9999\n")
    Path("train.py").write_text(
        "import torch\n\ndef example():\n    return torch.nn.Linear(4, 2), torch.zeros(8, 4)\n"
    )
    assert main([*command, "--hostfile=cluster", "--ssh_config=nothing_here"]) == 1
    assert (
        f"poseidon {command[0]}: there is no SSH configuration nothing_here"
        in capsys.readouterr().err
    )


def test_a_command_at_the_end_of_a_finding_can_be_pasted() -> None:
    problem = "its host key is not known; run: echo 'node1 ssh-ed25519 AAAA' >> known_hosts"
    survey = Survey(hosts=(), problems=(("ml@node1", problem),))
    assert f"error: ml@node1: {problem}" in survey_lines(survey, judge(survey))


def test_gpus_are_described() -> None:
    facts = {
        "gpus": ["H100, 80 GiB, 570.1", "H100, 80 GiB, 570.1"],
        "gpu_system": {
            "nccl": "2.27.3",
            "topology": ["     GPU0 GPU1", "GPU0  X   NV18"],
            "copies": [{"to": 5.51e10, "back": 5.2e10}],
        },
    }
    host = HostReport(clients=(), label="node1", address="", facts=facts, clock_offset_s=0.0)
    assert _gpu_lines([host]) == [
        "",
        "GPUs of node1 (NCCL 2.27.3):",
        "  0: H100, 80 GiB, 570.1; copies 55.1 GB/s to, 52.0 GB/s back",
        "  1: H100, 80 GiB, 570.1; copies not measured",
        "       GPU0 GPU1",
        "  GPU0  X   NV18",
    ]
    assert (
        _gpu_lines([HostReport(clients=(), label="n", address="", facts={}, clock_offset_s=0.0)])
        == []
    )
