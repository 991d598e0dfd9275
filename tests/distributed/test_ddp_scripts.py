"""`poseidon run --ddp`: scripts for torch.distributed and DistributedDataParallel, unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.training_processes import machinefile, poseidon_here

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(200),
    pytest.mark.usefixtures("imports_of_ddp"),
]

TRAINS = '''
import gc, io, sys, threading, weakref, torch, torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
assert size == 3 and dist.get_backend() == "gloo"

def mean_of(build, losses):
    """The gradients of one process, with the mean of the workers' losses."""
    model = build()
    sum(loss(model) for loss in losses).div(len(losses)).backward()
    return [p.grad for p in model.parameters()]

def near(model, expected, tolerance=1e-6):
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=tolerance, rtol=tolerance)

def build(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2)).to(dtype)

x = torch.randn(size, 4, 6, generator=torch.Generator().manual_seed(2))
losses = [lambda m, own=own: m(own.to(m[0].weight.dtype)).pow(2).float().mean() for own in x]
loss = lambda ddp: ddp(x[rank].to(ddp.module[0].weight.dtype)).pow(2).float().mean()

# gradients are the mean over the workers; without synchronization they add up on each worker
ddp = DistributedDataParallel(build())
for _ in range(3):
    ddp.zero_grad()
    with ddp.no_sync():
        loss(ddp).backward()
    loss(ddp).backward()
    near(ddp, [2 * g for g in mean_of(build, losses)])
loss(ddp).backward()
near(ddp, [3 * g for g in mean_of(build, losses)])
torch.save(ddp, io.BytesIO())

# a first pass has the bits of a later one, so a script continues from its checkpoint with its bits
other, passes = DistributedDataParallel(build()), []
for _ in range(2):
    other.zero_grad()
    loss(other).backward()
    passes.append(torch.cat([p.grad.flatten() for p in other.parameters()]))
assert torch.equal(*passes)
del other

# a weight of another order in memory, which must not be taken for its transpose
def transposed():
    model = build()
    model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
    return model
other = DistributedDataParallel(transposed())
for _ in range(2):
    other.zero_grad()
    loss(other).backward()
    near(other, mean_of(transposed, losses))
del other

# a static graph with gradients of two types: torch calls no bucket of its first pass the last
class Mixed(nn.Sequential):
    def forward(self, x): return self[2](self[1](self[0](x)).double())
def mixed():
    model = Mixed(*build())
    model[2].double()
    return model
other = DistributedDataParallel(mixed(), static_graph=True)
for _ in range(3):
    other.zero_grad()
    loss(other).backward()
    near(other, mean_of(mixed, losses))
del other

# a module that the script does not keep is freed, and its exchange closes as the next one opens
def exchanges_after_one():
    ddp = DistributedDataParallel(build())
    loss(ddp).backward()
    gone = weakref.ref(ddp)
    del ddp
    gc.collect()
    assert gone() is None
    return sum(one.name == "poseidon-statistics" for one in threading.enumerate())
assert [exchanges_after_one() for _ in range(3)] == [2, 2, 2]
loss(ddp).backward()
near(ddp, [4 * g for g in mean_of(build, losses)])

# a weight that travels as factors, and from step 2 on has other parts: on one worker, then on all
def penalty(weight, own): return 1e-3 * weight[3:5].square().sum()
def second_use(weight, own): return nn.functional.linear(own, weight).mean()
def of_the_gradient(weight, own): return 0

def total(call, weight, part, own):
    own = own.clone().requires_grad_()
    y = call(own)
    found = y.pow(2).mean() + part(weight, own)
    if part is of_the_gradient:
        found = found + torch.autograd.grad(y.sum(), own, create_graph=True)[0].square().sum()
    return found

nothing = lambda weight, own: 0
for part in (penalty, second_use, of_the_gradient):
    for settings in ({}, {"gradient_as_bucket_view": True}):
        ddp = DistributedDataParallel(build(), **settings)
        weight = ddp.module[0].weight
        for step in range(5):
            parts = [part if step >= 3 or step == 2 and r == 1 else nothing for r in range(size)]
            ddp.zero_grad()
            total(ddp, weight, parts[rank], x[rank]).backward()
            near(ddp, mean_of(build, [
                lambda m, r=r: total(m, m[0].weight, parts[r], x[r]) for r in range(size)
            ]))
# a gradient hook from before
hooked = build()
hooked[0].weight.register_hook(lambda gradient: gradient * 3)
ddp = DistributedDataParallel(hooked)
for _ in range(3):
    ddp.zero_grad()
    loss(ddp).backward()
    expected = mean_of(build, losses)
    near(ddp, [3 * expected[0], *expected[1:]])

# gradient hooks that rewrite it, and passes that are not reduced
def add_one(weight): weight.grad.data.add_(1)
ddp = DistributedDataParallel(build())
weight = ddp.module[0].weight
for step in range(4):
    if step == 2:
        weight.register_hook(lambda gradient: gradient.mul(2))
        weight.register_post_accumulate_grad_hook(add_one)
    ddp.zero_grad(set_to_none=step % 2 == 0)
    loss(ddp).backward()
    expected = mean_of(build, losses)
    near(ddp, [2 * expected[0] + 1, *expected[1:]] if step >= 2 else expected)
ddp.zero_grad()
with ddp.no_sync():
    loss(ddp).backward()
    assert weight.grad is not None
    loss(ddp).backward()
    near(nn.Sequential(ddp.module[2]), [2 * g for g in mean_of(build, [losses[rank]])[2:]])

# parameters of 16 bits
half = DistributedDataParallel(build(torch.bfloat16))
for _ in range(2):
    half.zero_grad()
    loss(half).backward()
    near(half, mean_of(lambda: build(torch.bfloat16), losses), 2e-2)

# parameters of types that no exchange carries, and one without elements
class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))
        self.last = nn.Linear(3, 2, dtype=torch.float64)
        self.scale, self.empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 3))
    def forward(self, x):
        wide = self.last((x.to(torch.complex64) @ self.first).abs().double())
        return wide * self.scale + self.empty.sum()
wide = DistributedDataParallel(Wide())
expected = mean_of(Wide, [lambda m, own=own: m(own).pow(2).mean() for own in x])
for _ in range(2):
    wide.zero_grad()
    wide(x[rank]).pow(2).mean().backward()
    torch.testing.assert_close([p.grad for p in wide.parameters()], expected)

# a part of the model that some workers do not use
class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.used, self.unused = nn.Linear(6, 2), nn.Linear(6, 2)
    def forward(self, x, both):
        return self.used(x) + (self.unused(x) if both else 0)
parts = DistributedDataParallel(Parts(), find_unused_parameters=True)
expected = mean_of(Parts, [lambda m, r=r: m(x[r], r == 0).pow(2).mean() for r in range(size)])
for _ in range(2):
    parts.zero_grad()
    parts(x[rank], rank == 0).pow(2).mean().backward()
    near(parts, expected)

# a GAN: two models, and a backward pass through one of them for the other
critic, maker = DistributedDataParallel(build()), DistributedDataParallel(nn.Linear(6, 6))
for _ in range(2):
    critic.zero_grad()
    (critic(x[rank]) - critic(maker(x[rank]).detach())).mean().backward()
    maker.zero_grad()
    critic(maker(x[rank])).mean().backward()
totals = [torch.zeros(1) for _ in range(size)]
dist.all_gather(totals, sum(p.grad.sum() for p in maker.parameters()).reshape(1))
assert totals[0] == totals[1] == totals[2]

# an embedding of which only the rows travel
rows = DistributedDataParallel(nn.Sequential(nn.Embedding(7, 6, sparse=True), nn.Linear(6, 1)))
for _ in range(2):
    rows.zero_grad()
    rows(torch.tensor([rank])).sum().backward()
    table, layer = rows.module[0].weight, rows.module[1].weight
    assert table.grad.is_sparse
    assert torch.allclose(table.grad.to_dense()[:size], layer.expand(size, 6) / size)

# workers with different numbers of batches
uneven = DistributedDataParallel(build())
with Join([uneven]):
    for _ in range(1 + rank):
        uneven.zero_grad()
        loss(uneven).backward()
with uneven.join(divide_by_initial_world_size=False):
    for step in range(1 + rank):
        uneven.zero_grad()
        loss(uneven).backward()
        near(uneven, mean_of(build, losses[step:]))

# a hook of the script's own, over the process group
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
for register, *hook in (
    (DistributedDataParallel.register_comm_hook, dist.group.WORLD, allreduce_hook),
    (DistributedDataParallel._register_builtin_comm_hook, dist.BuiltinCommHookType.ALLREDUCE),
):
    own = DistributedDataParallel(build())
    with torch.no_grad():
        loss(own)
    register(own, *hook)
    for _ in range(2):
        own.zero_grad()
        loss(own).backward()
        near(own, mean_of(build, losses))

# rates that are not the same on all workers
apart = DistributedDataParallel(build())
optimizer = torch.optim.SGD(apart.parameters(), 0.1 * (1 + rank))
loss(apart).backward()
optimizer.step()
try:
    loss(apart).backward()
except Exception as error:
    print("refused:", error)

# collectives
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": r} for r in range(size)]
some = dist.new_group([0, 2], backend="nccl")
if rank != 1:
    tensor = torch.tensor([1 + rank])
    work = dist.all_reduce(tensor, group=some, async_op=True)
    work.wait()
    assert tensor.item() == 4
shares = torch.zeros(2)
dist.reduce_scatter_tensor(shares, torch.arange(6.0) * (rank + 1))
assert shares.tolist() == [12 * rank, 12 * rank + 6]
whole = torch.zeros(6)
dist.all_gather_into_tensor(whole, shares)
assert whole.tolist() == [0, 6, 12, 18, 24, 30]
got = torch.zeros(3)
dist.all_to_all_single(got, torch.arange(3.0) + 10 * rank)
assert got.tolist() == [rank, 10 + rank, 20 + rank]
ring = torch.zeros(2)
for work in dist.batch_isend_irecv([
    dist.P2POp(dist.irecv, ring, (rank + 2) % size),
    dist.P2POp(dist.isend, torch.full((2,), float(rank)), (rank + 1) % size),
]):
    work.wait()
assert ring.tolist() == [(rank + 2) % size] * 2
assert len(DistributedSampler(range(10))) == 4
dist.barrier()
dist.destroy_process_group()

# once more
dist.init_process_group()
dist.barrier()
print("rank", rank, "has passed")
'''


def test_what_a_script_of_ddp_may_do(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS, encoding="utf-8")
    done = poseidon_here(
        tmp_path,
        "run",
        "--ddp",
        f"--hostfile={machinefile(tmp_path, 3, 1)}",
        "--encrypt=on",
        "--exchange=svb",
        "train.py",
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 has passed" in done.stdout
    assert "refused: the replicas differ: '0.weight', '0.bias'" in done.stdout
    assert "the script has registered its own communication hook" in done.stderr


UNEVEN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 1))
for _ in range(2 + dist.get_rank()):
    model(torch.ones(1, 2)).sum().backward()
dist.barrier()
"""


def test_a_worker_that_waits_for_another_step_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNEVEN, encoding="utf-8")
    hosts = f"--hostfile={machinefile(tmp_path, 2, 1)}"
    done = poseidon_here(tmp_path, "run", "--ddp", hosts, "train.py")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "poseidon run: worker 0 waits in torch.distributed.barrier() after step 2, but worker 1 has "
        "continued to step 3: all workers must call torch.distributed.barrier() after "
        "the same number of steps"
    )


USES_THE_STORE = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 1))
for _ in range(2):
    model(torch.ones(1, 2)).sum().backward()
store = dist.distributed_c10d._get_default_store()
store.set(f"of {dist.get_rank()}", "a")
print(store.get("of 1"))
"""


def test_workers_of_a_host_end_after_one_has_used_the_store(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(USES_THE_STORE, encoding="utf-8")
    hosts = f"--hostfile={machinefile(tmp_path, 1, 1)}"
    done = poseidon_here(tmp_path, "run", "--ddp", hosts, "--workers=2", "train.py")
    assert done.returncode == 0, done.stderr


LEAVES_OTHERS = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
for step in range(4):
    if step == 3 and dist.get_rank() == 0:
        END
    model(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        pytest.param(
            "raise ValueError('odd batch')",
            r"worker 0: train.py, line 9: ValueError: odd batch \(",
            marks=pytest.mark.thorough,
        ),
        ("sys.exit(0)", r"worker 1 calls broadcast\(.*line 10\), but worker 0 has left"),
    ],
)
def test_a_worker_does_not_wait_for_one_of_its_host_that_waits_for_its_next_call(
    end: str, sentence: str, tmp_path: Path
) -> None:
    """Before a forward pass all workers wait for the running statistics of rank 0."""
    (tmp_path / "train.py").write_text(LEAVES_OTHERS.replace("END", end), encoding="utf-8")
    hosts = f"--hostfile={machinefile(tmp_path, 1, 1)}"
    done = poseidon_here(tmp_path, "run", "--ddp", hosts, "--workers=2", "train.py")
    assert done.returncode == 1
    assert re.match(f"poseidon run: {sentence}", last := done.stderr.splitlines()[-1]), last


SWALLOWS = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
while True:
    try:
        dist.broadcast(torch.zeros(1), 0)
        if dist.get_rank() == 0:
            dist.barrier()
    except Exception:
        time.sleep(0.1)
"""


def test_an_error_of_a_collective_that_the_script_catches_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SWALLOWS, encoding="utf-8")
    hosts = f"--hostfile={machinefile(tmp_path, 2, 1)}"
    done = poseidon_here(tmp_path, "run", "--ddp", hosts, "train.py")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "poseidon run: worker 1 calls broadcast(1 x float32, from 0) (train.py, line 6), but worker "
        "0 barrier() (train.py, line 8); all workers must make the same calls in the same order"
    )


SPAWNS = """
import os, sys, torch, torch.multiprocessing as mp
from torch import nn
from torch.distributed import all_reduce, destroy_process_group, get_backend, init_process_group
from torch.nn.parallel import DistributedDataParallel

def build():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))

def batch(rank, step):
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * step + rank))

def train(rank, world_size, results, method="env://"):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29500"
    init_process_group("gloo", init_method=method, rank=rank, world_size=world_size)
    assert get_backend() == "gloo" and os.environ["RANK"] == str(rank)
    assert torch.are_deterministic_algorithms_enabled()
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(rank, step)).pow(2).mean().backward()
        optimizer.step()
    total = torch.tensor(1.0 + rank)
    all_reduce(total)
    results.put((rank, total.item(), model.module[0].weight.sum().item()))
    destroy_process_group()

def alone(world_size):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        sum(model(batch(r, step)).pow(2).mean() for r in range(world_size)).div(world_size).backward()
        optimizer.step()
    return model[0].weight.sum().item()

def check(how, results):
    found = sorted(results.get() for _ in range(2))
    assert [one[:2] for one in found] == [(0, 3.0), (1, 3.0)], found
    for one in found:
        assert abs(one[2] - alone(2)) < 1e-5, (found, alone(2))
    print(how, "is right", flush=True)

if __name__ == "__main__":
    if "mp.spawn" in sys.argv:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(train, args=(2, results, "tcp://127.0.0.1:29501"), nprocs=2, join=True)
        check("mp.spawn", results)
    for how in sys.argv[1:]:
        if how == "mp.spawn":
            continue
        context = mp.get_context(how)
        results = context.Queue()
        processes = [context.Process(target=train, args=(rank, 2, results)) for rank in range(2)]
        for process in processes:
            process.start()
        check(how, results)
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0, 0]
    print("the script has ended", flush=True)
"""


@pytest.mark.parametrize(
    "ways", [["fork"], pytest.param(["mp.spawn", "fork", "forkserver"], marks=pytest.mark.thorough)]
)
def test_processes_that_a_script_starts_take_the_places_of_the_workers(
    tmp_path: Path, ways: list[str]
) -> None:
    (tmp_path / "train.py").write_text(SPAWNS, encoding="utf-8")
    hosts = f"--hostfile={machinefile(tmp_path, 2, 1)}"
    flags = ["--ddp", "--deterministic", hosts]
    done = poseidon_here(tmp_path, "run", *flags, "train.py", *ways)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if " is right" in line or "ended" in line]
    assert lines == [*(f"{way} is right" for way in ways), "the script has ended"]
    assert "each of the 2 workers has run it by itself" not in done.stderr


FAILS = """
import torch.distributed as dist
from torch.multiprocessing import get_context

def train(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    if rank == 1:
        raise ValueError("picture 17 is damaged")
    dist.barrier()

if __name__ == "__main__":
    processes = [get_context("fork").Process(target=train, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
"""


def test_a_process_that_a_script_starts_fails(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILS, encoding="utf-8")
    hosts = f"--hostfile={machinefile(tmp_path, 2, 1)}"
    done = poseidon_here(tmp_path, "run", "--ddp", hosts, "train.py")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("poseidon run: worker 1: train.py, line 8")
