"""A worker of a real job that stops: a quorum of the others makes rounds of local steps meanwhile.

All read their parameters after each step, as the next forward pass uses them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.training_processes import machinefile, poseidon_here

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]

STOPPED, CONTINUED, BATCHES, EPOCHS = 8, 56, 64, 2
SCRIPT = f"""
import json, os, signal, torch, poseidon
numbers = torch.Generator().manual_seed(7)
data = torch.utils.data.TensorDataset(torch.randn({BATCHES * 3 * 2}, 6, generator=numbers))
model = torch.nn.Linear(6, 2)
with poseidon.distribute(model, poseidon.SGD(lr=0.01)) as group:
    pids, own, epochs = group.gather(os.getpid()), 0, []
    to_do = {{{STOPPED}: signal.SIGSTOP, {CONTINUED}: signal.SIGCONT}} if group.rank == 0 else {{}}
    loader = group.loader(data, batch_size=2)
    for epoch in range({EPOCHS}):
        read = None
        for x, in loader:
            output = model(x)
            assert read is None or torch.equal(torch.nn.functional.linear(x, *read), output)
            output.square().mean().backward()
            group.step()
            read = [p.detach().clone() for p in model.parameters()]
            own += 1
            for step in [step for step in to_do if step <= group.steps]:
                os.kill(pids[2], to_do.pop(step))
        epochs.append((group.steps, group.mean(float(group.rank))))
total = sum(p.double().sum().item() for p in model.parameters())
with open(f"end{{group.rank}}.json", "w") as file:
    json.dump([own, epochs, total], file)
"""


def test_others_make_rounds_while_a_worker_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    words = (f"--hostfile={machinefile(tmp_path, 3)}", "--output=out", "--local_steps=4")
    done = poseidon_here(tmp_path, "run", *words, "--local_steps=quorum=2", "script.py")
    assert done.returncode == 0, done.stderr
    ends = [json.loads((tmp_path / f"end{rank}.json").read_text()) for rank in range(3)]
    own, epochs, totals = zip(*ends, strict=True)
    # All end each epoch after the same step, with the same values; one has left steps out.
    assert list(epochs) == [[[BATCHES * n, 1.0] for n in range(1, EPOCHS + 1)]] * 3
    assert len(set(totals)) == 1
    assert own[2] <= EPOCHS * BATCHES - (CONTINUED - STOPPED) / 2
    assert "finished at iteration 128" in done.stderr


def test_a_job_has_at_least_as_many_workers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("", encoding="utf-8")
    words = (f"--hostfile={machinefile(tmp_path, 3)}", "--local_steps=4,quorum=4")
    done = poseidon_here(tmp_path, "run", *words, "script.py")
    assert done.returncode == 2
    assert "--local_steps=quorum=4: expected at most 3, the number of workers" in done.stderr
