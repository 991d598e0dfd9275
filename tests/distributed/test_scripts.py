"""`poseidon run` as users start it: real processes that train a torch module together."""

from __future__ import annotations

import io
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from poseidon.launcher.job_folder import read_records
from poseidon.pycaffe import mode
from tests.support.pseudo_terminal import pseudo_terminal
from tests.support.shadowing_files import write_shadowing_files
from tests.support.training_processes import (
    WAIT_S,
    command,
    machinefile,
    make_data,
    poseidon_here,
)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]

SCRIPT = """
import sys, torch, poseidon
torch.manual_seed(poseidon.this_worker().rank)
model = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 2))
judge = torch.nn.Linear(2, 1)
data = torch.Generator().manual_seed(7)
x, y = torch.randn(200, 24, 6, generator=data), torch.randn(200, 24, 2, generator=data)
how = {
    "rule": lambda: poseidon.SGD(lr=0.1, momentum=0.9),
    "torch": lambda: torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3),
}[sys.argv[1]]()
judges = torch.optim.SGD(judge.parameters(), lr=0.1)
with poseidon.distribute(model, how, batch_size=12) as group, poseidon.distribute(judge, judges) as other:
    own = slice(group.rank, None, group.size)
    average = torch.optim.swa_utils.AveragedModel(model)
    for step in range(int(sys.argv[2])):
        model.zero_grad()
        judge.zero_grad()
        judge(y[step % 200, own]).square().mean().backward()
        judges.step()
        output = model(x[step % 200, own])
        (torch.nn.functional.mse_loss(output, y[step % 200, own]) + judge(output).mean()).backward()
        group.step()
        if (step + group.rank) % 3:  # each worker by itself
            average.update_parameters(model)
        group.log(step=step, **{"a/rank": torch.tensor(group.rank)})
        if step == 0:
            print("training")
        if group.stopping:
            break
    group.settle()
    print("rank", group.rank, "of", group.size, "after", group.steps, sys.stdin.read() or "hears nothing")
    torch.save({**model.state_dict(), **judge.state_dict()}, sys.argv[3] + str(group.rank))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "fails.py").write_text(
        "import poseidon\nif poseidon.this_worker().rank == 1:\n    raise ValueError('bad luck')\n"
        "import time\nwhile True:\n    time.sleep(1)\n",
        encoding="utf-8",
    )
    return tmp_path


def train_alone(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Run the script with plain `python`. Return the weights."""
    monkeypatch.setattr(sys, "argv", ["script.py", how, "8", str(folder / "alone")])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with torch.random.fork_rng():
        runpy.run_path(str(folder / "script.py"), run_name="__main__")
    weights: dict[str, torch.Tensor] = torch.load(folder / "alone0")
    return weights


@pytest.mark.parametrize(
    ("how", "threads"), [("rule", 1), pytest.param("torch", 2, marks=pytest.mark.thorough)]
)
def test_two_clients_are_one_process(
    folder: Path, how: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = folder / os.fsdecode(b"caf\xe9")  # the name of a folder need not be UTF-8
    work.mkdir()
    write_shadowing_files(work, packages=True)  # `python ../script.py` does not see them either
    words = (f"--hostfile={machinefile(work, 2, 1)}", f"--workers={threads}", "--output=logs")
    done = poseidon_here(
        work, "run", *words, "--progress=logs=all", "../script.py", how, "8", "end"
    )
    workers = 2 * threads
    assert done.returncode == 0, done.stderr
    said = "rank {} of " + f"{workers} after 8 hears nothing\n"
    assert done.stdout == "training\n" + said.format(0)
    for rank in range(1, workers):
        assert f"client {rank // threads}, worker {rank}: {said.format(rank)}" in done.stderr
    assert f"rank 1 of {workers} after 8" in (work / "logs" / "worker_1.log").read_text(
        encoding="utf-8"
    )
    assert "0.weight" in (work / "logs" / "exchange_plan.txt").read_text(encoding="utf-8")
    train = [record for record in read_records(work / "logs") if record["kind"] == "train"]
    assert [(record["iteration"], record["outputs"]) for record in train] == [
        (step + 1, {"step": step, "a/rank": (workers - 1) / 2}) for step in range(8)
    ]
    expected = train_alone(folder, how, monkeypatch)
    for rank in range(workers):
        for name, value in torch.load(work / f"end{rank}").items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


RESUMING = """
import os, signal, sys, torch, poseidon
from pathlib import Path
from torch.nn.utils import parameters_to_vector
torch.manual_seed(poseidon.this_worker().rank)
model = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.BatchNorm1d(40), torch.nn.Dropout(), torch.nn.Linear(40, 2))
numbers = torch.Generator().manual_seed(7)
data = torch.utils.data.TensorDataset(torch.randn(60, 6, generator=numbers), torch.randn(60, 2, generator=numbers))
table = torch.nn.Identity()
if sys.argv[1] == "rule":
    how, table = poseidon.Adam(lr=0.01, eps=1e-3), poseidon.Table(9, 6, scale=0.1)
    model = torch.nn.ModuleList([model, table, torch.nn.Embedding(5, 6, sparse=True)])
    model.forward = lambda x: model[0](x + table(x[:, 0].abs().long()) + model[2](x[:, 1].abs().long()))
else:
    how = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
judge = torch.nn.Linear(2, 1)
judges = torch.optim.SGD(judge.parameters(), lr=0.01, momentum=0.9)
with poseidon.distribute(model, how) as group, poseidon.distribute(judge, judges) as other:
    group.keep(judge=other)
    loader = group.loader(data, 4)
    print("resumed" if group.resume() else "fresh", "at step", group.steps)
    for epoch in range(loader.sampler.epoch, 3):
        for x, y in loader:
            judge(y).square().mean().backward()
            other.step()
            torch.nn.functional.mse_loss(model(x), y).backward()
            group.step()
            if group.rank == 0 and group.steps % 3:  # the other may have been killed
                parameters_to_vector(model.parameters())
            if group.steps % 5 == 0:
                group.save(keep=2)
                group.mean(0.0)  # no worker goes on before worker 0 has written it
            if group.steps == 11 and group.rank == group.size - 1 and not Path("killed").exists():
                Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
    group.settle()
    with torch.no_grad():
        rows = table(torch.arange(9))
torch.save({**model.state_dict(), **judge.state_dict(), "rows": rows}, sys.argv[2] + str(group.rank))
"""


@pytest.mark.parametrize(
    ("how", "threads"), [("rule", 1), pytest.param("torch", 2, marks=pytest.mark.thorough)]
)
def test_a_worker_that_is_killed_costs_no_bit(folder: Path, how: str, threads: int) -> None:
    """In step 11, within an epoch: the job starts again by itself and continues from step 10."""
    (folder / "resuming.py").write_text(RESUMING, encoding="utf-8")
    flags = (f"--hostfile={machinefile(folder, 2, 1)}", f"--workers={threads}", "--max_restarts=1")
    lost = poseidon_here(folder, "run", *flags, "--output=lost", "resuming.py", how, "lost")
    assert lost.returncode == 0, lost.stderr
    assert re.search(
        r"restart 1 of 1: continuing from .*/lost/checkpoint_iter_10\.pt at iteration 10",
        lost.stderr,
    )
    assert lost.stdout == "fresh at step 0\nresumed at step 10\n"
    assert re.search(r"checkpoint: +lost/checkpoint_iter_\d+\.pt", lost.stderr)
    whole = poseidon_here(folder, "run", *flags, "--output=whole", "resuming.py", how, "whole")
    assert "restart 1 of" not in whole.stderr
    for rank in range(2 * threads):
        expected = torch.load(folder / f"whole{rank}")
        for name, value in torch.load(folder / f"lost{rank}").items():
            assert torch.equal(value, expected[name]), name


VIRTUAL = """
import os, random, signal, sys, numpy, torch, poseidon
torch.manual_seed(3 + poseidon.this_worker().rank)
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, index):
        noise = torch.rand(5) + random.random() + float(numpy.random.normal())
        return torch.sin(torch.arange(5.0) * index) + 0.01 * noise, torch.tensor([index / 48])
model = torch.nn.Sequential(
    torch.nn.Linear(5, 12), torch.nn.BatchNorm1d(12), torch.nn.Dropout(0.3), torch.nn.Linear(12, 1)
)
how = torch.optim.AdamW(model.parameters(), lr=0.01)
number = int(sys.argv[1]) or None
with poseidon.distribute(model, how, clip=0.5, virtual_workers=number) as group:
    loader = group.loader(Data(), 3)
    group.resume()
    while group.steps < int(sys.argv[2]):
        for x, y in loader:
            try:
                (model(x) - y).square().mean().backward()
                ended, stops = group.step(), len(sys.argv) > 4
            except Exception:
                continue  # as a script may, though it hides the loss of a worker
            if stops and ended and group.steps == 4 and (group.rank, group.size) == (1, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            if ended and group.steps == 6:
                group.save("virtual")
                if stops:
                    raise SystemExit
    print(group.virtual_workers, "on", group.size)
torch.save(model.state_dict(), sys.argv[3] + str(group.rank))
"""


def test_virtual_workers_have_the_same_bits_on_any_number_of_workers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three workers, of which one computes for two, lose one, and continue from memory, though the
    script catches every exception. They are interrupted within an epoch. Two workers of a host go on. One process under plain `python`
    computes the whole run.
    """
    (folder / "virtual.py").write_text(VIRTUAL, encoding="utf-8")
    begun = poseidon_here(
        folder,
        "run",
        f"--hostfile={machinefile(folder, 3, 1)}",
        *("--virtual_workers=4", "--max_restarts=1", "--elastic=every=2"),
        *("virtual.py", "0", "12", "end", "stops"),
    )
    assert begun.returncode == 0, begun.stderr
    assert "; continuing from iteration 3 in memory, without client 1 (127.0.0.1)" in begun.stderr
    assert "1 start from memory" in begun.stderr
    words = ("--workers=2", "--snapshot=virtual_iter_6.pt")
    done = poseidon_here(folder, "run", *words, "virtual.py", "0", "12", "end")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "4 on 2\n"
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["virtual.py", "4", "12", "alone"])
    with torch.random.fork_rng():
        runpy.run_path("virtual.py", run_name="__main__")
    expected = torch.load("alone0")
    for rank in (0, 1):
        for name, value in torch.load(f"end{rank}").items():
            assert torch.equal(value, expected[name]), name


def test_a_script_that_fails_ends_the_job_with_one_sentence(folder: Path) -> None:
    done = poseidon_here(folder, "run", "--workers=2", "fails.py")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"poseidon run: worker 1: fails.py, line 3: ValueError: bad luck \(details in "
        r".*worker_1.log\)",
        last,
    ), last
    assert "Traceback" not in done.stderr
    (log,) = folder.glob("output/*/worker_1.log")
    assert "Traceback" in log.read_text(encoding="utf-8")


DRAWING = """
import logging, sys, time
from pathlib import Path
import poseidon
rank = poseidon.this_worker().rank
for part in (0, 50, 100):
    sys.stderr.write(f"\\r{part}% of rank {rank}")
    sys.stderr.flush()
    print("part", part, "of rank", rank, flush=True)
    while part < 100 and not Path(f"seen{part}").exists():
        time.sleep(0.01)
print(file=sys.stderr)
if rank == 0:
    logging.error("part %d", "no number")
"""


def test_what_rank_0_writes_comes_at_once_and_to_the_stream_that_it_was_written_to(
    folder: Path,
) -> None:
    """Standard error is a terminal, standard output a pipe.

    The script goes on when each part was seen.
    """
    (folder / "drawing.py").write_text(DRAWING, encoding="utf-8")
    words = command("run", "--workers=2", "--output=out", "drawing.py")
    with pseudo_terminal(words, folder) as (process, terminal):
        assert process.stdout is not None
        for part in (0, 50, 100):
            assert process.stdout.readline() == f"part {part} of rank 0\n"
            terminal.wait_for(f"\r{part}% of rank 0")
            (folder / f"seen{part}").touch()
        assert process.stdout.read() == ""
        assert process.wait(WAIT_S) == 0, terminal.text
        terminal.wait_for("finished")
    assert "\r0% of rank 0\r50% of rank 0\r100% of rank 0\r\n" in terminal.text
    assert "of rank 1" not in terminal.text
    assert "--- Logging error ---" in terminal.text
    for rank in (0, 1):
        log = (folder / "out" / f"worker_{rank}.log").read_text(encoding="utf-8")
        own = [line for line in log.splitlines() if f"of rank {rank}" in line]
        assert own == [
            *(f"part {part} of rank {rank}" for part in (0, 50, 100)),
            f"100% of rank {rank}",
        ]


DEBUGGED = """
import poseidon
answer, size = 41, poseidon.this_worker().size
breakpoint()
print("the answer of", size, "is", answer)
"""


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_breakpoint_reads_what_the_launcher_reads_where_there_is_one_worker(
    folder: Path, workers: int
) -> None:
    (folder / "debugged.py").write_text(DEBUGGED, encoding="utf-8")
    theirs, ours = os.pipe()
    os.write(ours, b"p answer + 1\nanswer = 5\nc\n")
    before = os.dup(0)
    os.dup2(theirs, 0)
    try:
        done = poseidon_here(
            folder, "run", f"--hostfile={machinefile(folder, workers, 1)}", "debugged.py"
        )
    finally:
        os.dup2(before, 0)
        for descriptor in (theirs, ours, before):
            os.close(descriptor)
    if workers == 1:
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("(Pdb) 42\n(Pdb) (Pdb) the answer of 1 is 5\n")
    else:
        assert done.returncode == 2
        assert "debugged.py, line 4: breakpoint() needs a terminal" in done.stderr


PYCAFFE = """
import os, signal, sys
import poseidon.pycaffe as caffe
if sys.argv[1:] == ["alone"]:
    caffe.set_virtual_workers(3)
solver = caffe.get_solver("solver.prototxt")
if sys.argv[1:] != ["alone"]:
    group = caffe.Gloo(solver)
    group.bcast()
    solver.add_callback(group)
    solver.add_callback(
        lambda: (solver.iter, caffe.solver_rank(), caffe.solver_count()) == (7, 0, 2)
        and os.kill(os.getpid(), signal.SIGKILL),
        lambda: None,
    )
print("at", solver.iter)
while solver.iter < 10:
    solver.step(min(5, 10 - solver.iter))
if caffe.solver_rank() == 0:
    solver.net.save(sys.argv[1])
"""


def test_a_pycaffe_script_goes_on_from_memory_with_the_same_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts lose rank 0. One process without a job gets the same weights."""
    make_data(folder)
    (folder / "pycaffe.py").write_text(PYCAFFE, encoding="utf-8")
    (folder / "net.prototxt").write_text(
        """
        layer { name: "data" type: "Data" top: "x" top: "l"
          data_param { source: "train_lmdb" batch_size: 6 backend: LMDB }
          transform_param { scale: 0.004 crop_size: 6 mirror: true } }
        layer { name: "ip" type: "InnerProduct" bottom: "x" top: "h"
          inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
        layer { name: "norm" type: "BatchNorm" bottom: "h" top: "y" }
        layer { name: "loss" type: "SoftmaxWithLoss" bottom: "y" bottom: "l" top: "loss" }
        """
    )
    (folder / "solver.prototxt").write_text(
        'net: "net.prototxt" base_lr: 0.05 momentum: 0.9 lr_policy: "fixed" type: "SGD" '
        "random_seed: 5 max_iter: 10"
    )
    done = poseidon_here(
        folder,
        *("run", f"--hostfile={machinefile(folder, 2)}", "--virtual_workers=3"),
        *("--max_restarts=1", "--elastic=max_rejoins=0", "--elastic=every=3"),
        *("pycaffe.py", "job.caffemodel"),
    )
    assert done.returncode == 0, done.stderr
    assert "; continuing from iteration 7 in memory, without client 0 (127.0.0.1)" in done.stderr
    assert done.stdout == "at 0\nat 7\n"
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["pycaffe.py", "alone"])
    monkeypatch.setattr(mode.MODE, "virtual_workers", None)
    runpy.run_path("pycaffe.py", run_name="__main__")
    assert (folder / "job.caffemodel").read_bytes() == (folder / "alone").read_bytes()


SAME_SEEDS = """
import random, numpy, torch, poseidon
torch.manual_seed(7); numpy.random.seed(7); random.seed(7)

class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor([numpy.random.rand(), random.random(), torch.rand(()).item()])

model = torch.nn.Sequential(torch.nn.Linear(3, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 1))
first = model[0].weight.detach().clone()
masks = []
model[1].register_forward_hook(lambda _m, _i, output: masks.append(output.ne(0)))
within, outside = [], []
with poseidon.distribute(model, poseidon.SGD(lr=0.1)) as group:
    for processes in (0, 1):
        for batch in group.loader(Noise(), batch_size=2, num_workers=processes):
            within += batch.flatten().tolist()
            model(batch).sum().backward()
            group.step()
            outside.append([torch.rand(()).item(), random.random(), numpy.random.rand()])
    every = group.gather([within, outside, torch.stack(masks), first])
assert len({number for own in every for number in own[0]}) == 2 * len(within), every
assert every[0][1] == every[1][1]
assert all(not torch.equal(one, other) for one, other in zip(every[0][2], every[1][2]))
assert torch.equal(every[0][3], every[1][3])
print("all have passed")
"""


def test_workers_with_the_same_seeds_draw_numbers_of_their_own(folder: Path) -> None:
    (folder / "train.py").write_text(SAME_SEEDS, encoding="utf-8")
    hosts = f"--hostfile={machinefile(folder, 2, 1)}"
    done = poseidon_here(folder, "run", hosts, "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all have passed\n"
