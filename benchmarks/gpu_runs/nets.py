"""The nets that are trained on one device, and small ones of the same kinds for machines without
a GPU.

Law: every module takes an input and its target and returns the loss. Inputs are random and stay on
the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.torch_models import AlexNet, CifarQuick, ResNet50, normalized

CLASSES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class GptShape:
    """The sizes of a GPT-2."""

    vocabulary: int = 50257
    positions: int = 1024
    width: int = 768
    heads: int = 12
    blocks: int = 12


class GptBlock(nn.Module):
    """One block of GPT-2: attention to earlier tokens and a perceptron, each after a norm and
    beside the identity.
    """

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.c_attn = nn.Linear(shape.width, 3 * shape.width)
        self.c_proj = nn.Linear(shape.width, shape.width)
        self.c_fc = nn.Linear(shape.width, 4 * shape.width)
        self.c_out = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, tokens, width = x_BTD.shape
        parts = self.c_attn(self.ln_1(x_BTD)).split(width, 2)
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.c_proj(seen.transpose(1, 2).reshape(batch, tokens, width))
        result: Tensor = x_BTD + self.c_out(
            functional.gelu(self.c_fc(self.ln_2(x_BTD)), approximate="tanh")
        )
        return result


class Gpt(nn.Module):
    """GPT-2 (Radford et al. 2019); the head uses the weight of the embedding."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocabulary, shape.width)
        self.wpe = nn.Embedding(shape.positions, shape.width)
        self.blocks = nn.Sequential(*(GptBlock(shape) for _ in range(shape.blocks)))
        self.ln_f = nn.LayerNorm(shape.width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BT: Tensor, next_BT: Tensor) -> Tensor:
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.ln_f(self.blocks(self.wte(tokens_BT) + self.wpe(places)))
        scores = functional.linear(x_BTD, self.wte.weight)
        return functional.cross_entropy(scores.flatten(0, 1), next_BT.flatten())


class SmallResidual(nn.Module):
    """A residual net for images of 32 x 32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = normalized(3, 16, 3, 2), normalized(16, 16, 3)
        self.last = nn.Linear(16, 10)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        x = functional.relu(self.first(x))
        x = functional.relu(x + self.second(x))
        return functional.cross_entropy(self.last(x.mean((2, 3))), label)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNet:
    """A net and its batches.

    Attributes:
        name: for tables.
        build: makes the module, on the CPU.
        batch: rows of the input.
        unit: what is counted a second.
        units: of a batch.
        example: returns a random input and its target, given the number of rows.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: int
    unit: str
    units: int
    example: Callable[[int], tuple[Tensor, Tensor]]


def _images(side: int, classes: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda rows: (torch.randn(rows, 3, side, side), torch.randint(classes, (rows,)))


def _text(vocabulary: int, tokens: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda rows: (
        torch.randint(vocabulary, (rows, tokens)),
        torch.randint(vocabulary, (rows, tokens)),
    )


TINY_GPT = GptShape(vocabulary=96, positions=16, width=32, heads=2, blocks=2)


def device_nets(*, small: bool) -> tuple[DeviceNet, ...]:
    """Return AlexNet, ResNet-50 and GPT-2, or small nets of the same kinds."""
    if small:
        return (
            DeviceNet(
                name="cifar10_quick",
                build=CifarQuick,
                batch=4,
                unit="images",
                units=4,
                example=_images(32, 10),
            ),
            DeviceNet(
                name="small residual",
                build=SmallResidual,
                batch=4,
                unit="images",
                units=4,
                example=_images(32, 10),
            ),
            DeviceNet(
                name="tiny GPT",
                build=lambda: Gpt(TINY_GPT),
                batch=2,
                unit="tokens",
                units=32,
                example=_text(96, 16),
            ),
        )
    return (
        DeviceNet(
            name="AlexNet",
            build=AlexNet,
            batch=256,
            unit="images",
            units=256,
            example=_images(227, CLASSES),
        ),
        DeviceNet(
            name="ResNet-50",
            build=ResNet50,
            batch=128,
            unit="images",
            units=128,
            example=_images(224, CLASSES),
        ),
        DeviceNet(
            name="GPT-2",
            build=lambda: Gpt(GptShape()),
            batch=8,
            unit="tokens",
            units=8 * 1024,
            example=_text(50257, 1024),
        ),
    )
