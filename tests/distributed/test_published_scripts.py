"""Scripts of the kind that people publish: a job prints the losses that they print under torchrun,
or under plain python where they start their workers themselves.

Most run one after another in the same processes: starting those takes longer than the scripts.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.beside_torchrun import FOLDER, NAMES_STRATEGY, SCRIPTS, compare, difference, printed
from poseidon.torch.script_process import free_address
from tests.support.ddp_processes import run_by_gloo
from tests.support.training_processes import machinefile, poseidon_here

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("imports_of_ddp"),
]
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
ports, folder, *names = sys.argv[1:]
ports = [port for port in ports.split(",") if port]
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
    return run_by_gloo(folder, folder / "all.py", ",".join(ports), FOLDER, *names)


def of_job(folder: Path, names: list[str], *flags: str) -> str:
    """Return what rank 0 of a job of two workers prints."""
    hosts = f"--hostfile={machinefile(folder, 2, 1)}"
    words = ["--threads=1", "--output=job", str(folder / "all.py"), "", str(FOLDER), *names]
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
