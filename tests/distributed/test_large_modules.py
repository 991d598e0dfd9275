"""Modules that `fully_shard` divides among the workers of a host, on two hosts with two workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ddp_processes import run_by_gloo
from tests.support.training_processes import machinefile, poseidon_here

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("imports_of_ddp"),
]

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))

class GPT(nn.Module):
    def __init__(self, words=31, width=48, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.word = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x):
        h = self.word(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))

def loss_of(model, generator):
    x = torch.randint(0, 31, (3, 17), generator=generator)
    return F.cross_entropy(model(x[:, :-1]).float().flatten(0, 1), x[:, 1:].flatten())
"""

HSDP = (
    MODEL
    + """
import sys
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

def train(
    name, mesh=both, accumulate=1, syncs=False, twice=False, steps_within=False, clip=0.0,
    checkpoint=False, **how,
):
    model = GPT()
    for number, block in enumerate(model.blocks):
        if checkpoint:
            block = model.blocks[number] = checkpoint_wrapper(block)
        fully_shard(block, mesh=mesh, **how)
    fully_shard(model, mesh=mesh, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    if steps_within:
        optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
        for parameter in model.head.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: p.data.sub_(p.grad))
    for step in range(3):
        for number in range(accumulate):
            model.set_requires_gradient_sync(syncs or number == accumulate - 1)
            loss = loss_of(model, generator) / accumulate
            if twice:
                loss = loss + loss_of(model, generator)
            loss.backward()
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        print(name, step, mean.item() / size, norm.item() if clip else 0.0)

train("plain steps")
if len(sys.argv) > 1:
    train("again")
    sys.exit()
train("accumulation", accumulate=2, reshard_after_forward=False)
train("clipping", clip=0.5)
train("checkpoints, mixed", checkpoint=True, mp_policy=mixed)
train("means that add up", accumulate=2, syncs=True)
train("twice in a loss", twice=True)
train("steps within the pass", steps_within=True)
train("all workers", mesh=init_device_mesh("cpu", (size,)))

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))

x, plan = torch.ones(3, 6), {"0": ColwiseParallel(), "2": RowwiseParallel()}
parallel = parallelize_module(build(), both["shard"], plan)(x)
torch.testing.assert_close(parallel, build()(x))
for crossing in (both["replicate"], init_device_mesh("cpu", (4,))):
    try:
        parallelize_module(build(), crossing, plan)
    except Exception as error:
        print("refused:", error)
"""
)


def run(
    folder: Path, script: str, *flags: str, workers: int = 2, arguments: Sequence[str] = ()
) -> tuple[str, str]:
    """Run a script on two hosts with so many workers; return what it prints, and the messages."""
    (folder / "train.py").write_text(script, encoding="utf-8")
    hosts = f"--hostfile={machinefile(folder, 2)}"
    done = poseidon_here(
        folder, "run", *flags, hosts, f"--workers={workers}", "train.py", *arguments
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_hsdp_has_the_losses_of_torchrun_and_tensor_parallelism_stays_within_a_host(
    tmp_path: Path,
) -> None:
    found, notes = run(tmp_path, HSDP, "--ddp", "--encrypt=on")
    expected = run_by_gloo(tmp_path, tmp_path / "train.py", size=4)
    assert found.count("refused: tensor parallelism over workers of several hosts") == 2
    lines = list(zip(found.splitlines()[:24], expected.splitlines(), strict=True))
    for one, other in lines:
        name, loss, norm = one.rsplit(" ", 2)
        name_by_gloo, loss_by_gloo, norm_by_gloo = other.rsplit(" ", 2)
        assert name == name_by_gloo
        assert float(loss) == pytest.approx(float(loss_by_gloo), rel=1e-6, abs=1e-6)
        assert float(norm) == pytest.approx(float(norm_by_gloo), rel=1e-5)
    assert notes.count("divides parameters among workers of several hosts") == 1


@pytest.mark.thorough
def test_hsdp_is_compressed_between_hosts(tmp_path: Path) -> None:
    found, notes = run(tmp_path, HSDP, "--ddp", "--compress=*=int8", arguments=["compressed"])
    assert losses(found, "plain steps") == losses(found, "again")  # to the bit
    assert losses(found, "again")[0] == pytest.approx(of_one_process()[0], rel=1e-6)
    assert losses(found, "again") == pytest.approx(of_one_process(), rel=1e-3)
    assert losses(found, "again") != pytest.approx(of_one_process(), rel=1e-6)
    assert "compressed by int8" in notes


DISTRIBUTED = (
    MODEL
    + """
import sys
import poseidon
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

def divided(model=None, **how):
    model, mesh = model or GPT(), poseidon.host_mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)

def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)

rank = poseidon.this_worker().rank
"""
)

TRAINS = """
def train(name, accumulate=1, clip=0.0, limit=None, how=optimizer_of, on=None, **policy):
    model = divided(**policy)
    generator = torch.Generator().manual_seed(rank)
    with poseidon.distribute(model, how(model), passes=accumulate, clip=limit, on=on) as group:
        for step in range(3):
            for _ in range(accumulate):
                loss = loss_of(model, generator) / accumulate
                loss.backward()
            if clip:
                group.average_gradients()
                norm = nn.utils.clip_grad_norm_(model.parameters(), clip).full_tensor()
            group.step()
            mean = group.mean(loss.detach()).item()
            if rank == 0:
                print(name, step, mean, norm.item() if clip else 0.0)

def read_after_steps():
    model = divided()
    generator = torch.Generator().manual_seed(rank)
    with poseidon.distribute(model, poseidon.AdamW(lr=1e-3)) as group:
        for step in range(3):
            loss_of(model, generator).backward()
            group.step()
            up, down, head = model.blocks[0].up.weight, model.blocks[1].down.weight, model.head.weight
            coming = len(group._loop.exchanged.reads._own)
            read = up.to_local().clone(), head.full_tensor().clone(), down.detach().to_local().clone()
            word = model.state_dict()["word.weight"].to_local().clone()
            left = len(group._loop.exchanged.reads._own)
            group.settle()
            now = up.to_local(), head.full_tensor(), down.to_local(), model.word.weight.to_local()
            assert all(map(torch.equal, (*read, word), now))
            del now
            if rank == 0:
                print("coming", step, coming, left)

read_after_steps()
train("plain steps")
train("accumulation", accumulate=2, reshard_after_forward=False)
train("clipping", clip=0.5)
train("clipping", limit=0.5)
train("again")
train("optimizer's rule", on="shards", accumulate=2)
train("rule, clipping", limit=0.5, how=lambda _: poseidon.AdamW(lr=1e-3))
train("offloaded", offload_policy=CPUOffloadPolicy(pin_memory=False))
"""


def losses(printed: str, name: str) -> list[float]:
    return [float(line.split()[-2]) for line in printed.splitlines() if line.startswith(name)]


def of_one_process(accumulate: int = 1, clip: float = 0.0) -> list[float]:
    """The losses of 3 steps with the batches of four workers."""
    names: dict[str, Any] = {}
    exec(MODEL, names)
    model, found = names["GPT"](), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generators = [torch.Generator().manual_seed(rank) for rank in range(4)]
    for _ in range(3):
        for _ in range(accumulate):
            of_workers = [names["loss_of"](model, generator) for generator in generators]
            loss = sum(of_workers) / 4 / accumulate
            loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


ROUNDS = """
def train_by_rounds(name, momentum):
    model = divided()
    outer = poseidon.Outer(lr=1.0, momentum=momentum)
    generator = torch.Generator().manual_seed(rank)
    how = {"local_steps": 3, "outer": outer, "clip": 0.5}
    # Steps of SGD, unlike those of AdamW, are as large as the gradients.
    optimizer = optimizer_of(model) if momentum else torch.optim.SGD(model.parameters(), lr=0.5)
    with poseidon.distribute(model, optimizer, **how) as group:
        resumed = momentum and group.resume("saved")
        for step in range(8):
            loss = loss_of(model, generator)
            if step < group.steps:
                continue
            loss.backward()
            group.step()
            mean = group.mean(loss.detach()).item()
            if rank == 0:
                print(name, step, mean, 0)
            if momentum and step == 5 and not resumed:
                group.save("saved")

train_by_rounds("mean of hosts", 0.0)
train_by_rounds("outer momentum", 0.5)
train_by_rounds("resumed", 0.5)
"""
ADAPTER = """
model, mesh = GPT(), poseidon.host_mesh()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(0.01 * (rank // 2))  # the second host begins with others
model.requires_grad_(False)
model.head.requires_grad_(True)
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(rank)
with poseidon.distribute(model, optimizer) as group:
    for step in range(5):
        loss = loss_of(model, generator)
        loss.backward()
        group.step()
        mean = group.mean(loss.detach()).item()
        if rank == 0:
            print("adapter", step, mean, 0)
    if rank == 0:
        print("tensors:", *(trained.name for trained in group._loop.update.plan.tensors))
"""
REFUSED = """
from torch.distributed.device_mesh import init_device_mesh

def attempt(call):
    try:
        call()
    except poseidon.PoseidonError as error:
        if rank == 0:
            print("refused:", error)

across = GPT()
fully_shard(across, mesh=init_device_mesh("cpu", (4,)))
attempt(lambda: poseidon.distribute(across, optimizer_of(across)))
part = GPT()
fully_shard(part.blocks[0], mesh=poseidon.host_mesh())
attempt(lambda: poseidon.distribute(part, optimizer_of(part)))
others = poseidon.AdamW(lr=0.1)
attempt(lambda: poseidon.distribute(divided(), poseidon.Muon(lr=0.1, others=others)))
attempt(lambda: poseidon.distribute(divided(), poseidon.SGD(lr=0.1), virtual_workers=5))
tiny = nn.Linear(3, 1)
fully_shard(tiny, mesh=poseidon.host_mesh())
attempt(lambda: poseidon.distribute(tiny, optimizer_of(tiny)))

def late():
    model = GPT()
    with poseidon.distribute(model, optimizer_of(model)):
        fully_shard(model, mesh=poseidon.host_mesh())
        loss_of(model, torch.Generator())

attempt(late)
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one job prints that trains in each way; starting a job takes longer than training."""
    parts = (DISTRIBUTED, TRAINS, ROUNDS, ADAPTER, REFUSED)
    folder = tmp_path_factory.mktemp("job")
    return run(folder, "".join(parts), "--exchange=ps", "--encrypt=on")[0]


def test_distribute_has_the_losses_of_hsdp(printed: str) -> None:
    assert_losses_of_one_process(printed)


@pytest.mark.thorough
def test_all_reduce_has_the_losses_of_hsdp(tmp_path: Path) -> None:
    assert_losses_of_one_process(run(tmp_path, DISTRIBUTED + TRAINS, "--exchange=allreduce")[0])


def assert_losses_of_one_process(found: str) -> None:
    plain, accumulated, clipped = of_one_process(), of_one_process(2), of_one_process(clip=0.5)
    assert losses(found, "plain steps") == pytest.approx(plain, rel=1e-6)
    for name in ("accumulation", "optimizer's rule"):
        assert losses(found, name) == pytest.approx(accumulated, rel=1e-6)
    assert losses(found, "clipping") == pytest.approx(2 * clipped, rel=1e-6)
    assert losses(found, "rule, clipping") == pytest.approx(clipped, rel=1e-6)
    coming = [line.split()[2:] for line in found.splitlines() if line.startswith("coming")]
    assert coming == [["28", "0"]] * 3  # values on their way after a step, and after state_dict()
    for name in ("again", "offloaded"):  # to the bit
        assert losses(found, name) == losses(found, "plain steps")


SAVES = (
    DISTRIBUTED
    + """
model, ruled = divided(), divided(GPT().bfloat16())
optimizer = optimizer_of(model)
average = {"head": model.head.weight.detach().clone()}

class Average:
    state_dict = lambda self: average
    def load_state_dict(self, state):
        average["head"].copy_(state["head"])

with (
    poseidon.distribute(model, optimizer) as group,
    poseidon.distribute(ruled, poseidon.AdamW(lr=1e-3)) as of_rule,
):
    group.keep(average=Average(), of_rule=of_rule)
    resumed = group.resume("saved")
    for step in range(group.steps, 6):
        loss = loss_of(model, torch.Generator().manual_seed(step))
        loss.backward()
        group.step()
        with torch.no_grad():
            average["head"].lerp_(model.head.weight, 0.1)
        loss_of_rule = loss_of(ruled, torch.Generator().manual_seed(step))
        loss_of_rule.backward()
        of_rule.step()
        if rank == 0 and step >= 3:
            print("step", step, loss.item(), 0)
            print("by rule", step, loss_of_rule.item(), 0)
        if step == 2 and not resumed:
            group.save("saved")
    total = average["head"].full_tensor().double().norm().item()
    if rank == 0:
        print("average", total, 0)
"""
)


def test_a_checkpoint_resumes_with_other_hosts_and_workers(tmp_path: Path) -> None:
    first, _ = run(tmp_path, SAVES)
    hosts = f"--hostfile={machinefile(tmp_path, 1)}"
    done = poseidon_here(tmp_path, "run", hosts, "--workers=3", "train.py")
    assert done.returncode == 0, done.stderr
    assert "resuming from" in done.stderr
    for name, count, rel in (("step", 3, 1e-6), ("average", 1, 1e-6), ("by rule", 3, 1e-2)):
        assert len(losses(first, name)) == count
        assert losses(done.stdout, name) == pytest.approx(losses(first, name), rel=rel)
    state = torch.load(tmp_path / "saved_iter_3.pt", weights_only=True)
    assert tuple(state["model"]["word.weight"].shape) == (31, 48)
    assert tuple(state["optimizer"]["state"][0]["exp_avg"].shape) == (31, 48)


FEW_ROWS = """
import poseidon, torch
from torch import nn
from torch.distributed.fsdp import fully_shard

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 2, dtype=torch.bfloat16), nn.Linear(2, 5)

    def forward(self, x):
        return self.last(self.first(x.bfloat16()).float())

model, mesh = Mixed(), poseidon.host_mesh()
for part in (model.first, model.last, model):
    fully_shard(part, mesh=mesh)
with poseidon.distribute(model, poseidon.AdamW(lr=0.01)) as group:
    group.resume("saved")
    model(torch.ones(4, 8)).square().mean().backward()
    group.step()
    group.save("saved")
"""


def test_a_worker_without_rows_of_the_parameters_of_16_bits_saves_with_the_others(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(FEW_ROWS, encoding="utf-8")
    for step in (1, 2):
        hosts = f"--hostfile={machinefile(tmp_path, 1)}"
        done = poseidon_here(tmp_path, "run", hosts, "--workers=3", "train.py")
        assert done.returncode == 0, done.stderr
        state = torch.load(tmp_path / f"saved_iter_{step}.pt", weights_only=True)
        assert {tuple(value.shape) for value in state["masters"].values()} == {(2, 8), (2,)}


def test_what_cannot_be_exchanged_is_refused_in_a_sentence(printed: str) -> None:
    refused = [line for line in printed.splitlines() if line.startswith("refused: ")]
    for line, named in zip(
        refused,
        (
            "'word.weight' is divided among workers 0, 1, 2, 3 of several hosts",
            "'word.weight' is not divided, and other parameters of the module are",
            "poseidon.Muon for 'word.weight' needs the whole matrix",
            "5 virtual workers cannot be divided",
            "the 2 workers of a host are more than the rows of every trained parameter",
            "the module became a FSDPGPT after distribute()",
        ),
        strict=True,
    ):
        assert line.startswith(f"refused: {named}")


PARTS = (
    DISTRIBUTED
    + """
import torch.distributed.checkpoint as dcp
from pathlib import Path
from typing import Any
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

model = divided()
optimizer = optimizer_of(model)
begun = 0
if Path("parts").exists():
    begun = 3
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.load(states, checkpoint_id="parts")
    set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
with poseidon.distribute(model, optimizer) as group:
    for step in range(begun, 6):
        loss = loss_of(model, torch.Generator().manual_seed(step))
        loss.backward()
        group.step()
        if rank == 0 and step >= 3:
            print("step", step, loss.item(), 0)
        if step == 2:
            states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
            dcp.save(states, checkpoint_id="parts")
"""
)


@pytest.mark.thorough
def test_parts_that_workers_write_resume_with_other_hosts_and_workers(tmp_path: Path) -> None:
    first, _ = run(tmp_path, PARTS)
    assert len(losses(first, "step")) == 3
    assert len([*(tmp_path / "parts").glob("*.distcp")]) == 4  # each worker has written its part
    bytes_written = sum(path.stat().st_size for path in (tmp_path / "parts").glob("*.distcp"))
    done = poseidon_here(
        tmp_path, "run", f"--hostfile={machinefile(tmp_path, 1)}", "--workers=3", "train.py"
    )
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout, "step") == pytest.approx(losses(first, "step"), rel=1e-6)
    one_file = tmp_path / "whole.pt"
    assert poseidon_here(tmp_path, "consolidate", "parts", "whole.pt").returncode == 0
    model = torch.load(one_file, weights_only=True)["model"]
    assert tuple(model["word.weight"].shape) == (31, 48)
    assert bytes_written < 1.5 * one_file.stat().st_size  # no part is written twice


LIGHTNING = (
    MODEL
    + """
import sys
import lightning
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.generator = GPT(), torch.Generator()

    def configure_model(self):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, batch, number):
        self.generator.manual_seed(10 * self.global_rank + number)
        loss = loss_of(self.model, self.generator)
        if self.global_rank == 0:
            print("step", number, loss.item(), 0)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

shows = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
strategy = ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1)
devices, nodes = map(int, sys.argv[1:])
trainer = lightning.Trainer(
    accelerator="cpu", devices=devices, num_nodes=nodes, strategy=strategy, max_epochs=1,
    **dict.fromkeys(shows, False),
)
trainer.fit(Task(), torch.utils.data.DataLoader(torch.zeros(24), batch_size=1))
"""
)


# accelerate allows FSDP on GPUs only, so these scripts name CPU workers as it names GPU workers.
ACCELERATE = (
    MODEL
    + """
from accelerate import Accelerator, PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
accelerator = Accelerator(
    fsdp_plugin=FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
        transformer_cls_names_to_wrap=["Block"],
    ),
    parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
    gradient_accumulation_steps=2,
)
model, generator = GPT(), torch.Generator().manual_seed(accelerator.process_index)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
assert len(next(model.parameters()).placements) == 2
for step in range(6):
    with accelerator.accumulate(model):
        loss = loss_of(model, generator)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    mean = accelerator.gather(loss.detach()).mean().item()
    if accelerator.is_main_process:
        print("step", step, mean, 0)
accelerator.save_state("state")
accelerator.load_state("state")
whole = accelerator.get_state_dict(model)
assert not whole or whole["word.weight"].shape == (31, 48)
"""
)

TRAINER = """
import os
import torch
from accelerate import PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

os.environ["ACCELERATE_USE_FSDP"] = "true"
torch.manual_seed(0)
sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 31, "n_positions": 16}
rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
model = GPT2LMHeadModel(GPT2Config(tie_word_embeddings=False, **sizes, **rates))
data = [{"input_ids": x, "labels": x} for x in torch.randint(0, 31, (96, 8))]
fsdp = {
    "version": 2, "fsdp_version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"],
    "cpu_ram_efficient_loading": False, "state_dict_type": "SHARDED_STATE_DICT",
}
arguments = TrainingArguments(
    "out", use_cpu=True, per_device_train_batch_size=2, max_steps=6, logging_steps=1, save_strategy="no",
    gradient_accumulation_steps=2, learning_rate=1e-2, report_to=[], disable_tqdm=True,
    fsdp="full_shard auto_wrap", fsdp_config=fsdp,
    parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
)
arguments.device
PartialState().distributed_type = DistributedType.MULTI_GPU

class Prints(Trainer):
    def log(self, logs, *rest, **named):
        if self.is_world_process_zero() and "loss" in logs:
            print("step", self.state.global_step, logs["loss"], logs["grad_norm"])

trainer = Prints(model=model, args=arguments, train_dataset=data)
trainer.train()
assert len(next(trainer.model_wrapped.parameters()).placements) == 2
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "of_hosts", "of_one"),
    [(LIGHTNING, (2, 2), (4, 1)), (ACCELERATE, (), ()), (TRAINER, (), ())],
    ids=["lightning", "accelerate", "trainer"],
)
def test_libraries_have_the_losses_of_torchrun(
    tmp_path: Path, script: str, of_hosts: Sequence[int], of_one: Sequence[int]
) -> None:
    found, messages = run(tmp_path, script, "--ddp", arguments=[*map(str, of_hosts)])
    expected = run_by_gloo(tmp_path, tmp_path / "train.py", *of_one, size=4)
    assert len(losses(found, "step")) == 6
    assert losses(found, "step") == pytest.approx(losses(expected, "step"), rel=1e-6)
    assert "tensors exchanged" in messages


VIRTUAL = (
    DISTRIBUTED
    + """
import hashlib, os, signal
from pathlib import Path

def ids(number):
    return torch.randint(0, 31, (17,), generator=torch.Generator().manual_seed(number))

data, norm = [ids(number) for number in range(72)], GPT(layers=1)
norm.norm = nn.BatchNorm1d(16)
model, ruled = divided(norm), divided(GPT(layers=1).bfloat16())
with (
    poseidon.distribute(model, optimizer_of(model)) as group,
    poseidon.distribute(ruled, poseidon.AdamW(lr=1e-3), clip=0.5) as of_rule,
):
    group.keep(of_rule=of_rule)
    group.resume()
    for x in group.loader(data, batch_size=2):
        for net in (model, ruled):
            output = net(x[:, :-1]).flatten(0, 1)
            F.cross_entropy(output.float(), x[:, 1:].flatten()).backward()
        group.step()
        of_rule.step()
        if group.steps == 3 and rank == 0 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    for net in (model, ruled):
        digest = hashlib.sha256()
        for parameter in net.parameters():
            digest.update(parameter.full_tensor().detach().float().numpy())
        for buffer in net.buffers():
            digest.update(buffer.numpy())
        if rank == 0:
            print(group.steps, digest.hexdigest())
"""
)


def test_virtual_hosts_have_the_bits_of_fewer_hosts_also_after_a_loss(tmp_path: Path) -> None:
    flags = ["--virtual_workers=6", "--max_restarts=1", "--elastic=every=2"]
    found, notes = run(tmp_path, VIRTUAL, *flags)
    assert (tmp_path / "killed").exists()
    assert "continuing from iteration" in notes
    hosts = f"--hostfile={machinefile(tmp_path, 1)}"
    alone = poseidon_here(tmp_path, "run", hosts, "--workers=2", flags[0], "train.py")
    assert alone.returncode == 0, alone.stderr
    assert len(found.splitlines()) == 2
    assert found == alone.stdout


def of_two_processes(steps: int, every: int, clip: float) -> list[float]:
    """The losses where each host trains by itself, and all take the mean after so many steps."""
    names: dict[str, Any] = {}
    exec(MODEL, names)
    hosts = [names["GPT"]() for _ in range(2)]
    optimizers = [torch.optim.SGD(host.parameters(), lr=0.5) for host in hosts]
    generators = [torch.Generator().manual_seed(rank) for rank in range(4)]
    found = []
    for step in range(1, steps + 1):
        losses_of_step = [
            names["loss_of"](hosts[rank // 2], generator)
            for rank, generator in enumerate(generators)
        ]
        (sum(losses_of_step) / 2).backward()
        for host, optimizer in zip(hosts, optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(host.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        found.append(sum(loss.item() for loss in losses_of_step) / 4)
        if step % every == 0:
            with torch.no_grad():
                for one, other in zip(hosts[0].parameters(), hosts[1].parameters(), strict=True):
                    mean = (one + other) / 2
                    one.copy_(mean)
                    other.copy_(mean)
    return found


def test_each_host_makes_local_steps_as_one_worker_and_resumes_them(printed: str) -> None:
    expected = of_two_processes(8, 3, 0.5)
    assert losses(printed, "mean of hosts") == pytest.approx(expected, rel=1e-5)
    # to the bit
    assert losses(printed, "resumed") == losses(printed, "outer momentum")[6:]


def test_only_trained_parameters_travel(printed: str) -> None:
    names: dict[str, Any] = {}
    exec(MODEL, names)
    model = names["GPT"]()
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-2)
    generators = [torch.Generator().manual_seed(rank) for rank in range(4)]
    expected = []
    for _ in range(5):
        loss = sum(names["loss_of"](model, generator) for generator in generators) / 4
        loss.backward()
        optimizer.step()
        model.zero_grad()
        expected.append(loss.item())
    assert losses(printed, "adapter") == pytest.approx(expected, rel=1e-6)
    assert "\ntensors: head.weight\n" in printed
