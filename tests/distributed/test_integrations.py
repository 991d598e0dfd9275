"""The examples for Lightning, accelerate, Hugging Face's Trainer, PEFT and DDP itself, with the
real packages: two workers of a job have the losses of two processes of plain DDP over gloo.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from poseidon.launcher.job_folder import read_records
from tests.support.ddp_processes import run_by_gloo
from tests.support.shared_templates import SHARED
from tests.support.training_processes import machinefile, poseidon_here

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
NUMBER = re.compile(r"\d+\.\d+(?:e-\d+)?")
LIGHTNING = """
import runpy, sys
import torch
import torch.distributed as dist

main = runpy.run_path(sys.argv[1])["main"]
fabric, strategy, *words = sys.argv[2:]
saves, save = [], torch.save
torch.save = lambda *a, **b: (saves.append(0), save(*a, **b))
main([*words, "--epochs=2", "--folder=here"])
main([*words, "--epochs=4", "--folder=here"])  # from the last checkpoint
main([*words, "--epochs=1", "--precision=bf16-mixed"])
counts = [None, None]
dist.all_gather_object(counts, len(saves))
if dist.get_rank() == 0:
    print("epoch 0: checkpoints", counts)
sys.argv = [fabric, strategy]
runpy.run_path(fabric)
"""
HUGGING_FACE = """
import runpy, sys
from accelerate.state import AcceleratorState

lora = full = runpy.run_path(sys.argv[1])["main"]
classify = runpy.run_path(sys.argv[2])["main"]
lora(["--lora", "--epochs=2", "--folder=adapters"])
full(["--epochs=1", "--folder=model"])
full(["--epochs=2", "--folder=model", "--resume"])
for words in (
    ["--epochs=2", "--folder=here"],
    ["--epochs=4", "--folder=here"],  # from the last state
    ["--epochs=1", "--precision=bf16"],
):
    AcceleratorState._reset_state(True)
    classify(words)
"""
DDP = """
import runpy, sys

example, *more = sys.argv[1:]
for words in (["--checkpoint=whole.pt"], ["--checkpoint=lost.pt", *more])[: 1 + len(more)]:
    sys.argv[1:] = ["--epochs=2", *words]
    runpy.run_path(example, run_name="__main__")
"""


def losses(text: str) -> list[str]:
    """Return the lines in which an example reports an epoch or a step, without accuracies: the last
    bit of a score may decide on a record.
    """
    found = [line for line in text.splitlines() if re.match(r"epoch \d|step \d", line)]
    return [re.sub(r"'accuracy': '\S+', |, accuracy \S+|\d+ right ", "", line) for line in found]


def assert_equal_losses(
    mine: Sequence[str], expected: Sequence[str], tolerance: float = 1e-6
) -> None:
    """Compare two reports."""
    assert [NUMBER.sub("", line) for line in mine] == [NUMBER.sub("", line) for line in expected]
    for line, wanted in zip(mine, expected, strict=True):
        found = [float(number) for number in NUMBER.findall(line)]
        assert found == pytest.approx(
            [float(number) for number in NUMBER.findall(wanted)], rel=tolerance, abs=tolerance
        ), (line, wanted)


def folders(path: Path) -> tuple[Path, Path]:
    """Return new folders for the job and for the processes that it is compared with."""
    ours, theirs = path / "ours", path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    return ours, theirs


def files(folder: Path, *names: str) -> list[str]:
    """Return the files that a script has left below these folders of its own."""
    return sorted(str(path.relative_to(folder)) for name in names for path in folder.glob(name))


def run_job(folder: Path, *words: object) -> str:
    """Run a script on two clients; return what worker 0 has printed."""
    hosts = machinefile(folder, 2, 1)
    done = poseidon_here(folder, "run", f"--hostfile={hosts}", "--output=out", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def logged(folder: Path) -> dict[str, list[int]]:
    """Return the iterations at which a job of `run_job` has recorded what the library has logged,
    by name.
    """
    found: dict[str, list[int]] = {}
    for record in read_records(folder / "out"):
        for name in record["outputs"] if record["kind"] == "train" else ():
            found.setdefault(name, []).append(record["iteration"])
    return found


@pytest.mark.needs("lightning")
def test_lightning(repository: Path, tmp_path: Path) -> None:
    """Accumulation, clipping, validation, logs of all workers, checkpoints and their resuming,
    and precision; Fabric.
    """
    ours, theirs = folders(tmp_path)
    (tmp_path / "script.py").write_text(LIGHTNING, encoding="utf-8")
    script = (
        tmp_path / "script.py",
        repository / "examples" / "lightning" / "train.py",
        repository / "benchmarks" / "published_scripts" / "fabric.py",
    )
    flags = ("ddp", "--strategy=ddp", "--devices=2")
    with SHARED.importing("lightning"):
        by_gloo = losses(run_by_gloo(theirs, *script, *flags))
        of_job = losses(run_job(ours, *script, "poseidon"))
    fabric, of_fabric = ([x for x in found if ":" not in x] for found in (of_job, by_gloo))
    assert len(fabric) == 13
    assert_equal_losses(fabric, of_fabric, 1e-5)
    lines, expected = ([x for x in found if ":" in x] for found in (of_job, by_gloo))
    assert_equal_losses(lines[:4], expected[:4])
    # gradients of 16 bits are rounded, the product of their factors is not
    assert_equal_losses(lines[4:], expected[4:], 1e-3)
    assert [line.split(":")[0] for line in lines] == [
        f"epoch {number}" for number in (*range(1, 5), 1, 0)
    ]
    assert re.search(r"\[[1-9]\d*, 0\]$", lines[-1]), "a worker besides the first has written"
    assert files(ours, "here/*") == files(theirs, "here/*")
    epochs = [8, 16, 24, 32, 8]
    assert logged(ours) == dict.fromkeys(("accuracy", "test_loss", "loss"), epochs)


@pytest.mark.needs("huggingface")
def test_accelerate_the_trainer_and_lora(repository: Path, tmp_path: Path) -> None:
    """The Trainer resumes from its checkpoint, accelerate from its state."""
    ours, theirs = folders(tmp_path)
    (tmp_path / "script.py").write_text(HUGGING_FACE, encoding="utf-8")
    examples = [
        repository / "examples" / name / "train.py" for name in ("huggingface", "accelerate")
    ]
    # without transformers.trainer: a library of its leaves a thread, and a template has none
    with SHARED.importing("accelerate", "transformers.models.gpt2", "transformers.trainer_utils"):
        by_gloo = run_by_gloo(theirs, tmp_path / "script.py", *examples)
        lines = losses(run_job(ours, "--ddp", tmp_path / "script.py", *examples))
    assert_equal_losses(lines, losses(by_gloo))
    assert any(line.startswith("step 20:") for line in lines)
    assert [line.split(":")[0] for line in lines if line.startswith("epoch")] == [
        f"epoch {number}" for number in (*range(1, 5), 1)
    ]
    names = logged(ours)
    assert set(names) == {"loss", "grad_norm", "learning_rate", "eval_loss", "train_loss"}
    assert names["eval_loss"] == [10, 20, 10, 20]
    for left in ("adapters/*/*", "model/*/*", "here/*"):
        assert files(ours, left) == files(theirs, left)
    plan = (ours / "out" / "exchange_plan.txt").read_text(encoding="utf-8")
    tensors = re.findall(r"^\S+\.\S+", plan, re.MULTILINE)
    assert len(tensors) == 4
    assert all("lora_" in name for name in tensors), "more than the adapters travels"


@pytest.mark.thorough
def test_a_script_of_ddp_survives_the_loss_of_a_worker(repository: Path, tmp_path: Path) -> None:
    """With BatchNorm, accumulation, clipping, a schedule, validation and a checkpoint of its own.

    One job trains undisturbed, then with the loss. After the restart, the first training is at its
    end.
    """
    ours, theirs = folders(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(DDP, encoding="utf-8")
    example = repository / "examples" / "ddp" / "train.py"
    lines = losses(run_job(ours, "--ddp", "--max_restarts=1", script, example, "--lose_at=20"))
    assert_equal_losses(lines[:2], losses(run_by_gloo(theirs, script, example)))
    assert lines[2:] == lines[:2]
    ends = [torch.load(ours / name)["model"] for name in ("whole.pt", "lost.pt")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
