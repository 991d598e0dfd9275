"""The script that `ddp_scripts.py` times: one net, trained by the loop of one library.

    torchrun --nproc_per_node=2 benchmarks/library_loops.py gpt accelerate 14
    poseidon run --ddp benchmarks/library_loops.py gpt accelerate 14

A loop notes the time after each step. It prints the median seconds from one to the next, from the
fifth step on, and its last loss.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WORDS, WIDTH, LAYERS, LENGTH, BATCH = 256, 256, 6, 128, 4
RATE = 1e-4


class Net(nn.Module):
    """A net with its loss. It remembers its last loss.

    Args:
        layers: from the inputs to the scores.
        inputs: a batch of one worker.
        labels: a class for each row of scores.
    """

    def __init__(self, layers: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        super().__init__()
        self.layers = layers
        self.inputs, self.targets = inputs, labels
        self.loss = 0.0

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.layers(inputs)
        loss = nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten())
        self.loss = loss.item()
        return {"loss": loss}


class Gpt(nn.Module):
    """Words to the scores of their next words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        scores: Tensor = self.head(self.encoder(self.embedding(words), mask, is_causal=True))
        return scores


def build(name: str) -> Net:
    """Return the net and its batch: 10.5 M parameters, of `gpt` 4.9 M."""
    torch.manual_seed(0)
    if name == "linear":
        layers = nn.Sequential(
            nn.Linear(3072, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
        )
        return Net(layers, torch.randn(32, 3072), torch.randint(0, 10, (32,)))
    words = torch.randint(0, WORDS, (BATCH, LENGTH + 1))
    return Net(Gpt(), words[:, :-1], words[:, 1:])


class Records(Dataset[dict[str, Tensor]]):
    """The records of a batch, over and over.

    Args:
        net: whose batch it is.
        count: of records.
    """

    def __init__(self, net: Net, count: int) -> None:
        self._net = net
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        at = index % len(self._net.inputs)
        return {"inputs": self._net.inputs[at], "labels": self._net.targets[at]}


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of each loop."""
    return torch.optim.AdamW(net.parameters(), lr=RATE)


class Clock:
    """The time of each step's end."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def __call__(self) -> None:
        self._ends.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """The median seconds of a step."""
        pairs = zip(self._ends[3:], self._ends[4:], strict=False)
        return statistics.median(end - before for before, end in pairs)


def by_ddp(net: Net, steps: int, clock: Clock) -> None:
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(net)
    optimizer = adamw(net)
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(net.inputs, net.targets)["loss"].backward()
        optimizer.step()
        clock()


def by_accelerate(net: Net, steps: int, clock: Clock) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    size = len(net.inputs)
    loader = DataLoader(Records(net, steps * size * accelerator.num_processes), size)
    model, optimizer, batches = accelerator.prepare(net, adamw(net), loader)
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        clock()


def by_trainer(net: Net, steps: int, clock: Clock) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            clock()

    arguments = TrainingArguments(
        "trainer",
        max_steps=steps,
        per_device_train_batch_size=len(net.inputs),
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        report_to=[],
    )
    size = 8 * steps * len(net.inputs)
    Trainer(net, arguments, train_dataset=Records(net, size), callbacks=[Ends()]).train()


def by_lightning(net: Net, steps: int, clock: Clock) -> None:
    import lightning

    import poseidon.lightning

    class Training(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            loss: Tensor = self.net(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

        def on_train_batch_end(self, *_: object) -> None:
            clock()

    by_job = poseidon.this_worker().size > 1
    workers = poseidon.this_worker().size if by_job else int(os.environ["WORLD_SIZE"])
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="poseidon" if by_job else "ddp",
        num_nodes=1 if by_job else workers,
        devices=1,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    size = len(net.inputs)
    trainer.fit(Training(), DataLoader(Records(net, steps * size * workers), size))


def by_distribute(net: Net, steps: int, clock: Clock, on: Any = "workers") -> None:
    import poseidon

    with poseidon.distribute(net, adamw(net), on=on) as group:
        for _ in range(steps):
            net(net.inputs, net.targets)["loss"].backward()
            group.step()
            clock()


def by_shards(net: Net, steps: int, clock: Clock) -> None:
    by_distribute(net, steps, clock, "shards")


LOOPS: Mapping[str, Callable[[Net, int, Clock], None]] = {
    "ddp": by_ddp,
    "accelerate": by_accelerate,
    "trainer": by_trainer,
    "lightning": by_lightning,
    "distribute": by_distribute,
    "shards": by_shards,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("net", choices=("linear", "gpt"))
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("steps", type=int, help="5 or more")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    net, clock = build(flags.net), Clock()
    LOOPS[flags.loop](net, flags.steps, clock)
    print("measured", clock.seconds, net.loss, flush=True)


if __name__ == "__main__":
    main()
