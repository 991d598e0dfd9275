"""Scripts of the kind that people publish: a job prints the losses that they print under torchrun,
or under plain python where they start their workers themselves.

Most run one after another in the same processes: starting those takes longer than the scripts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.beside_torchrun import FOLDER, NAMES_STRATEGY, SCRIPTS, compare, difference, printed
from poseidon.torch.script_process import free_address
from tests.support.training_processes import ROOT, machinefile, poseidon_here

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
TOGETHER = {
    "accumulation",
    "gan",
    "gathered_features",
    "momentum_encoder",
    "penalties",
    "self_distillation",
    "validation",
}
"""Scripts that need nothing but torch, and whose workers torchrun starts."""
NEEDS = {"accelerate_loop": "huggingface", "finetuning": "huggingface"}
ROUNDING = 5e-5
"""Factors of several workers are one product, whose sums have another order; AdamW enlarges the
differences of small gradients. Scripts without factors agree to the bit.
"""
ONE_AFTER_ANOTHER = """
import os, runpy, sys
import torch.distributed.nn  # its default group is the one that there is when it is imported
folder, *names = sys.argv[1:]
ports = os.environ.get("PORTS", "").split()
for name in names:
    if ports:  # gloo's workers could connect to the store of the script before
        os.environ["MASTER_PORT"] = ports.pop()
    name, _, strategy = name.partition(":")
    print("script", name, flush=True)
    sys.argv = [f"{folder}/{name}.py", *([strategy] if strategy else [])]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def of_gloo(folder: Path, names: list[str]) -> str:
    """Return what rank 0 of two workers prints, which have the variables of torchrun."""
    ports = [free_address("127.0.0.1").rpartition(":")[2] for _ in names]
    place = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "PORTS": " ".join(ports),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "none",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, folder / "all.py", FOLDER, *names],
            cwd=folder,
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        with ThreadPoolExecutor(2) as pool:
            said = [*pool.map(lambda worker: worker.communicate(timeout=100), workers)]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, errors) in zip(workers, said, strict=True):
        assert worker.returncode == 0, errors[-3000:]
    return said[0][0]


def of_job(folder: Path, names: list[str], *flags: str) -> str:
    """Return what rank 0 of a job of two workers prints."""
    hosts = f"--hostfile={machinefile(folder, 2, 1)}"
    words = ["--threads=1", "--output=job", str(folder / "all.py"), str(FOLDER), *names]
    done = poseidon_here(folder, "run", *flags, hosts, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_together(
    folder: Path, names: list[str], strategies: tuple[str, str], *flags: str
) -> None:
    """Compare scripts that run one after another in the same processes."""
    places = folder / "gloo", folder / "job"
    for place in places:
        place.mkdir()
        (place / "all.py").write_text(ONE_AFTER_ANOTHER, encoding="utf-8")
    theirs, ours = ([name + strategy for name in names] for strategy in strategies)
    with ThreadPoolExecutor(1) as pool:
        gloo = pool.submit(of_gloo, places[0], theirs)
        job = of_job(places[1], ours, *flags)
    both = [of_each(text) for text in (gloo.result(), job)]
    assert [*both[0]] == [*both[1]] == names
    for name in names:
        there, here = (printed(texts[name]) for texts in both)
        assert len(there.losses) >= 2
        assert difference(here, there) <= ROUNDING, name


def of_each(text: str) -> dict[str, str]:
    """Return the output of each script, by name."""
    parts = text.split("script ")[1:]
    return {part.partition("\n")[0].strip(): part.partition("\n")[2] for part in parts}


def test_a_job_prints_what_processes_of_gloo_print(tmp_path: Path) -> None:
    check_together(tmp_path, sorted(TOGETHER), ("", ""), "--ddp")


@pytest.mark.thorough
@pytest.mark.needs("lightning")
def test_lightning_prints_the_same_with_the_strategy_poseidon(tmp_path: Path) -> None:
    check_together(tmp_path, sorted(NAMES_STRATEGY), (":ddp", ":poseidon"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.needs(NEEDS[name])] if name in NEEDS else [])
        for name in SCRIPTS
        if name not in TOGETHER | NAMES_STRATEGY
    ],
)
def test_a_job_prints_what_torchrun_prints(name: str) -> None:
    apart, _, _ = compare(name, workers=2, rounds=1)
    assert apart <= ROUNDING
