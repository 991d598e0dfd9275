"""The cores near a GPU, on which its worker runs; torch and the kernel are stand-ins."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from poseidon.engine.process import bind_to_gpu, cores_beside


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-2,8\n", {0, 1, 2, 8}), ("5\n", {5}), ("\n", set()), ("nonsense\n", set()), (None, set())],
)
def test_the_kernel_names_the_cores_beside_a_device(
    text: str | None, expected: set[int], tmp_path: Path
) -> None:
    folder = tmp_path / "bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "local_cpulist").write_text(text)
    assert cores_beside("0000:3b:00.0", tmp_path) == expected


def test_a_worker_runs_on_the_cores_it_may_use_near_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bus/pci/devices/0001:3b:00.0"
    folder.mkdir(parents=True)
    known = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 3})
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    for text in ("2-5", "7-9"):  # of the second none may be used
        (folder / "local_cpulist").write_text(text)
        bind_to_gpu(torch.device("cuda", 1), tmp_path)
    assert bound == [{2, 3}]
