"""`poseidon device_query`: what it prints, with and without GPUs."""

from __future__ import annotations

import pytest
import torch

from poseidon.cli.main import main


def test_device_query_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["device_query", "-gpu", "all"]) == 1
    assert "there is no CUDA device on this machine" in capsys.readouterr().err


def test_device_query(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Found:
        name, major, minor, total_memory = "K20", 3, 5, 5 << 30

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Found)
    assert main(["device_query"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "Querying GPUs all",
        "Device id:                     0",
        "Major revision number:         3",
    ]
    assert lines.count("Name:                          K20") == 2
