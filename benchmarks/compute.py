"""Compare a compiled net with the same net written by hand in torch.

    python benchmarks/compute.py [--nets cifar10_quick,alexnet,googlenet,resnet50] [--rounds 20] [--threads 2] [--clock wall|cpu]

Each round runs one forward and one backward pass of both, in turn, and the turn changes from round
to round, so that whatever else the machine does falls on both. Weights and inputs are equal; so
must the losses and the gradients be, which is checked first. The update rule is left out: it is the
same code for both.

Reading the table: `ratio` is the median over the rounds of (compiled / by hand) of that round. 1.00
means that the definition costs nothing; the promise is at most 1.03. `noise` is half the distance
between the quartiles of the ratio: on a busy machine it is large, and then `--threads 1 --clock
cpu` with more rounds says more than the wall clock.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# a checkout works without being installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from poseidon.cli.entry import use_environment

use_environment()

import torch
from torch import Tensor, nn
from torch_models import AlexNet, CifarQuick, GoogLeNet, ResNet50

from poseidon.caffe.layers.activation import Dropout
from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TRAIN, NetState
from poseidon.caffe.proto.definition import filter_net, read_net

FOLDER = Path(__file__).parents[1] / "prototxt"
WARM_UP = 3
Step = Callable[[], Tensor]
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table: a definition, the same by hand, and a batch of square pictures."""

    definition: str
    by_hand: type[nn.Module]
    batch: int
    extent: int
    classes: int


NETS = {
    "cifar10_quick": Case(
        definition="cifar10/cifar10_quick_train_test.prototxt",
        by_hand=CifarQuick,
        batch=100,
        extent=32,
        classes=10,
    ),
    "alexnet": Case(
        definition="alexnet/train_val.prototxt", by_hand=AlexNet, batch=32, extent=227, classes=1000
    ),
    "googlenet": Case(
        definition="googlenet/train_val.prototxt",
        by_hand=GoogLeNet,
        batch=8,
        extent=224,
        classes=1000,
    ),
    "resnet50": Case(
        definition="resnet/resnet50_train_val.prototxt",
        by_hand=ResNet50,
        batch=8,
        extent=224,
        classes=1000,
    ),
}


def compiled(case: Case) -> Net:
    """Return the train net of the definition, its Data layer replaced by blobs that the caller
    gives.
    """
    state = NetState(phase=TRAIN)
    definition = filter_net(read_net(FOLDER / case.definition), state)
    for layer in definition.param.layer:
        if layer.type == "Data":
            layer.type = "Input"
            layer.input_param.shape.add(dim=(case.batch, 3, case.extent, case.extent))
            layer.input_param.shape.add(dim=(case.batch,))
    return compile_net(definition, LayerContext(phase=TRAIN, seed=1), state=state)


def learned(net: Net) -> list[nn.Parameter]:
    """Return the blobs that a solver moves; torch keeps the statistics of batches in buffers."""
    return [info.parameter for info in net.parameters_info if not info.statistics]


def step_pair(name: str, dtype: torch.dtype = torch.float32) -> tuple[Step, Step, nn.Module, Net]:
    """One training step without the update: compiled, and by hand, on the same weights and
    batch.
    """
    case = NETS[name]
    net, hand = compiled(case).to(dtype), case.by_hand().to(dtype)
    with torch.no_grad():
        for ours, theirs in zip(learned(net), hand.parameters(), strict=True):
            # Noise of one size: the definition's own first weights can be too small to compare
            # gradients with.
            theirs.copy_(ours.normal_(0, ours[0].numel() ** -0.5 if ours.dim() > 1 else 0.01))
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(case.batch, 3, case.extent, case.extent, generator=generator, dtype=dtype)
    label = torch.randint(case.classes, (case.batch,), generator=generator)
    inputs = {"data": data, "label": label.float()}

    def ours_step() -> Tensor:
        net.zero_grad(set_to_none=True)
        net(inputs)
        net.loss.backward()
        return net.loss.detach()

    def hand_step() -> Tensor:
        hand.zero_grad(set_to_none=True)
        loss: Tensor = hand(data, label)
        loss.backward()
        return loss.detach()

    return ours_step, hand_step, hand, net


def check_equal(name: str) -> None:
    """Stop unless both sides compute the same.

    Dropout draws differently, so it is held still for this.

    In double precision: in single, a value within a rounding of zero falls on the other side of a
    ReLU now and then, and its whole gradient with it. What is left is that a definition holds
    numbers such as 0.3 in single precision.
    """
    ours_step, hand_step, hand, net = step_pair(name, torch.float64)
    for module in hand.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for _, layer in net.layer_modules:
        if isinstance(layer, Dropout):
            layer.active = False
    torch.testing.assert_close(ours_step(), hand_step(), rtol=1e-6, atol=1e-6)
    pairs = [
        (ours.grad, theirs.grad)
        for ours, theirs in zip(learned(net), hand.parameters(), strict=True)
    ]
    # A bias below a batch normalization has the gradient 0, and its noise does not count.
    noise = max(float(theirs.norm()) for _, theirs in pairs) * 1e-9
    for ours, theirs in pairs:
        difference = float((ours - theirs).norm()) / max(float(theirs.norm()), noise)
        if difference > 1e-5:
            raise SystemExit(
                f"{name}: gradients of shape {tuple(ours.shape)} differ by {difference:.1e}"
            )


def seconds(step: Step, clock: Clock) -> float:
    start = clock()
    step()
    return clock() - start


def measure(name: str, rounds: int, clock: Clock) -> str:
    """One row of the table."""
    ours_step, hand_step, _, _ = step_pair(name)
    for _ in range(WARM_UP):
        ours_step()
        hand_step()
    ours: list[float] = []
    hand: list[float] = []
    for turn in range(rounds):
        for step, times in ((ours_step, ours), (hand_step, hand))[:: 1 if turn % 2 else -1]:
            times.append(seconds(step, clock))
    ratios = [a / b for a, b in zip(ours, hand, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    noise = (quartiles[2] - quartiles[0]) / 2
    batch = NETS[name].batch
    return (
        f"{name:<14} {batch:>5} {statistics.median(ours) * 1e3:>12.2f} "
        f"{statistics.median(hand) * 1e3:>12.2f} "
        f"{batch / statistics.median(ours):>10.1f} {statistics.median(ratios):>7.3f} {noise:>7.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--nets",
        default="cifar10_quick,alexnet,googlenet,resnet50",
        help=f"any of {', '.join(NETS)}; commas between",
    )
    parser.add_argument(
        "--rounds", type=int, default=20, help="rounds measured, at least 2 (default %(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="threads of torch"
    )
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu leaves out what other programs took"
    )
    options = parser.parse_args()
    names = options.nets.split(",")
    wrong = [name for name in names if name not in NETS]
    if wrong or options.rounds < 2:
        parser.error(
            f"unknown net {wrong[0]}, known: {', '.join(NETS)}"
            if wrong
            else "--rounds must be at least 2"
        )
    torch.set_num_threads(options.threads)
    print(
        f"forward + backward on {options.threads} CPU threads, {options.clock} clock, "
        f"{options.rounds} interleaved rounds"
    )
    print(
        f"{'net':<14} {'batch':>5} {'compiled ms':>12} {'by hand ms':>12} {'images/s':>10} "
        f"{'ratio':>7} {'noise':>7}"
    )
    for name in names:
        check_equal(name)
        print(measure(name, options.rounds, CLOCKS[options.clock]), flush=True)
    print(
        "ratio = compiled / by hand, median over rounds; at most 1.03 is promised. noise = half "
        "its quartile distance."
    )


if __name__ == "__main__":
    main()
