"""Nets that are really computed, on one thread a host, and their batches.

    net = COMPUTED["gpt-2m"]
    module, batches = net.build(), net.batches(rank=0, rows=net.rows)
    module(*next(batches)).backward()

Law: a rank's batches depend on its number alone, so all systems that are measured train on the same
data. Every module takes an input and its target and returns the loss.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from benchmarks.gpu_runs.nets import Gpt, GptShape
from benchmarks.torch_models import AlexNet, ResNet50
from poseidon.observe.plan.shapes import LayerShape, module_layers

TOKENS = 128
"""Bytes of a sequence."""
BYTES = 256
IMAGES = 16
"""Different images of a rank."""
WORDS = 2000
"""Different words of the text."""
LENGTH = 100_000
"""Words of the text."""
SEED = 1

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedNet:
    """A net that is computed.

    Attributes:
        build: makes the module.
        draw: returns the batches of a rank, without an end, given a generator of random numbers and
            the rows.
        rows: of a host's batch by default, as in `shapes.ROWS`: images, or tokens.
        iterations: of a round by default.
        rate: learning rate.
        adamw: torch's AdamW trains it; otherwise SGD with momentum.
    """

    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator, int], Iterator[Batch]]
    rows: int
    iterations: int
    rate: float
    adamw: bool = False

    def batches(self, *, rank: int, rows: int) -> Iterator[Batch]:
        """Return the batches of a rank, without an end."""
        return self.draw(torch.Generator().manual_seed(SEED + rank), rows)


@cache
def computed_layers(name: str) -> tuple[LayerShape, ...]:
    """Return the layers of one of `COMPUTED`.

    Raises:
        KeyError: there is no such net.
    """
    net = COMPUTED[name]
    example = next(net.batches(rank=0, rows=net.rows))
    return module_layers(net.build(), example)


@cache
def _text() -> Tensor:
    """Return the bytes of a text that is the same wherever and whenever it is drawn: words of
    syllables, the k-th most frequent with weight 1 / k.
    """
    draw = random.Random(SEED)
    syllables = [first + second for first in "bdfklmnprstv" for second in "aeiou"]
    words = ["".join(draw.choices(syllables, k=1 + k % 4)) for k in range(WORDS)]
    text = " ".join(draw.choices(words, [1 / k for k in range(1, WORDS + 1)], k=LENGTH))
    return torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8)


def _sequences(generator: torch.Generator, rows: int) -> Iterator[Batch]:
    """Draw sequences of bytes; `rows` are tokens, at least one sequence of them."""
    text, count = _text(), max(1, rows // TOKENS)
    offsets = torch.arange(TOKENS + 1)
    while True:
        starts = torch.randint(len(text) - TOKENS, (count, 1), generator=generator)
        sequences = text[starts + offsets].long()
        yield sequences[:, :-1], sequences[:, 1:]


def _images(side: int) -> Callable[[torch.Generator, int], Iterator[Batch]]:
    def draw(generator: torch.Generator, rows: int) -> Iterator[Batch]:
        images = torch.randn(IMAGES, 3, side, side, generator=generator)
        while True:
            chosen = torch.randint(IMAGES, (rows,), generator=generator)
            yield images[chosen], chosen

    return draw


def _gpt(width: int, heads: int, blocks: int, positions: int) -> Callable[[], nn.Module]:
    shape = GptShape(vocabulary=BYTES, positions=positions, width=width, heads=heads, blocks=blocks)
    return lambda: Gpt(shape)


COMPUTED: dict[str, ComputedNet] = {
    "alexnet": ComputedNet(build=AlexNet, draw=_images(227), rows=8, iterations=3, rate=0.001),
    "gpt-2m": ComputedNet(
        build=_gpt(192, 4, 4, TOKENS),
        draw=_sequences,
        rows=4 * TOKENS,
        iterations=20,
        rate=0.001,
        adamw=True,
    ),
    "gpt-20m": ComputedNet(
        build=_gpt(512, 8, 6, 2 * TOKENS),
        draw=_sequences,
        rows=4 * TOKENS,
        iterations=4,
        rate=0.0005,
        adamw=True,
    ),
    "resnet50": ComputedNet(build=ResNet50, draw=_images(224), rows=2, iterations=3, rate=0.001),
}
"""The nets that a measurement can compute, by their names on the command line: byte-level GPTs of
1.9 M and 19.2 M parameters, and two of Caffe's.
"""
