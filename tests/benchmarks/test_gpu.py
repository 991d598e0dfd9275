"""The benchmark of one GPU: on this machine's CPU it runs the same code on small nets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def test_without_a_gpu_one_sentence_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == gpu.main(["--all"]) == 2
    assert capsys.readouterr().err == (
        2
        * (
            "gpu.py: torch finds no CUDA GPU on this machine; run this where there is one, or with "
            "--device=cpu --small\n"
        )
    )


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_small_nets_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.json"
    words = [
        "--device=cpu",
        "--small",
        "--rounds=1",
        "--iterations=1",
        "--compiler=eager",
        f"--json={file}",
    ]
    assert gpu.main(words) == 0
    checked, speed = json.loads(file.read_text())
    assert [fact["problem"] for fact in checked["facts"]] == [""] * 10
    names = [fact["check"] for fact in checked["facts"]]
    assert names[-1] == "copies to pinned memory on a side stream"
    measured = {(fact["net"], fact["system"]) for fact in speed["facts"]}
    nets = ("cifar10_quick", "small residual", "tiny GPT")
    assert measured >= {(net, system) for net in nets for system in ("torch", "ps", "hybrid")}
    assert all(fact["median_per_s"] > 0 and fact["of_torch"] > 0 for fact in speed["facts"])
    assert "10 of 10 are good" in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.timeout(150)
def test_six_packages_are_enough() -> None:
    others = (
        "cv2",
        "h5py",
        "matplotlib",
        "pydot",
        "paramiko",
        "psutil",
        "tqdm",
        "plyvel",
        "plyvel_next",
    )
    program = f"import sys; sys.modules.update(dict.fromkeys({others!r})); import benchmarks.gpu"
    # as torch's compiler asks
    program += "; import importlib.util; print(importlib.util.find_spec('tqdm').name)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "tqdm\n"
