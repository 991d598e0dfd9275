"""The flags of `poseidon doctor` and `poseidon plan` that name files; the commands themselves
are tested in tests/distributed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.cli.main import main


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
