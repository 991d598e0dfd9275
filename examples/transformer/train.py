"""Train a small transformer on these docs, letter by letter, on all workers of a job.

poseidon run --hostfile=machinefiles/localserver examples/transformer/train.py
python examples/transformer/train.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# a checkout works without being installed
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from poseidon.cli.entry import use_environment

use_environment()

import torch
from torch import Tensor, nn

import poseidon

DOCS = Path(__file__).resolve().parents[2] / "docs"
CONTEXT = 48


def read_docs() -> tuple[Tensor, Tensor, int]:
    """Return the docs as rows of numbers, to train and to test on, and the number of letters.

    A project of `poseidon init` has no docs: it reads modules of Python.
    """
    paths = sorted(DOCS.glob("*.md")) or sorted(Path(argparse.__file__).parent.glob("[a-c]*.py"))
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    letters = sorted(set(text))
    number = {letter: index for index, letter in enumerate(letters)}
    pieces = torch.tensor([number[letter] for letter in text]).split(len(text) // 200)
    test = torch.cat(pieces[::10])
    train = torch.cat([piece for index, piece in enumerate(pieces) if index % 10])
    return train, test, len(letters)


class Transformer(nn.Module):
    """A transformer that predicts the next letter after each of CONTEXT letters."""

    def __init__(self, letters: int, width: int) -> None:
        super().__init__()
        self.letter = nn.Embedding(letters, width)
        self.place = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.next = nn.Linear(width, letters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x_BT: Tensor) -> Tensor:
        h = self.blocks(self.letter(x_BT) + self.place, mask=self.mask, is_causal=True)
        scores: Tensor = self.next(self.norm(h))
        return scores


def batch(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return pieces of the text, and the same pieces one letter further."""
    rows = text[starts.unsqueeze(1) + torch.arange(CONTEXT + 1)]
    return rows[:, :-1], rows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="of each worker")
    parser.add_argument("--width", type=int, default=64)
    flags = parser.parse_args()
    train, test, letters = read_docs()
    worker = poseidon.this_worker()
    starts = torch.Generator().manual_seed(worker.rank)
    model = Transformer(letters, flags.width).to(worker.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, flags.steps)
    example = torch.zeros(flags.batch, CONTEXT, dtype=torch.long, device=worker.device)
    with poseidon.distribute(model, optimizer, clip=1.0, example=(example,)) as group:
        for step in range(1, flags.steps + 1):
            x, y = batch(
                train, torch.randint(len(train) - CONTEXT, (flags.batch,), generator=starts)
            )
            loss = nn.functional.cross_entropy(
                model(x.to(worker.device)).flatten(0, 1), y.to(worker.device).flatten()
            )
            loss.backward()
            group.step()
            group.log(loss=loss)
            decay.step()
            if group.stopping:
                break
            if step % 50 == 0 or step == flags.steps:
                print(f"step {step}: loss {group.mean(loss):.3f}")
    x, y = batch(test, torch.arange(0, len(test) - CONTEXT - 1, CONTEXT))
    with torch.no_grad():
        right = model(x.to(worker.device)).argmax(-1).cpu() == y
    print(f"{right.float().mean():.1%} of the letters of a text it has not seen are guessed")


if __name__ == "__main__":
    main()
