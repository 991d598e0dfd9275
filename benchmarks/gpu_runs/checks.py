"""Correctness of the paths that only a GPU has: streams, pinned copies, memory that processes lend
each other, autocast, torch.compile.

Most checks train a small net on workers that share the device, and compare its parameters with the
parameters of one process that trains on the whole batch. On a CPU the same code runs without
streams.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu_runs.jobs import TOKEN, Body, How, lone_worker, shard_threads, train
from poseidon.errors import PoseidonError
from poseidon.exchange.device import DONE, device_of
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.torch.distribute import join
from poseidon.torch.group import Group
from poseidon.torch.options import DistributeOptions
from poseidon.torch.update_rules import SGD

STEPS, BATCH = 5, 8
RULE = SGD(lr=0.1, momentum=0.9, weight_decay=0.001)
EXACT, ROUNDED = 1e-4, 2e-2
"""Tolerances, absolute and relative: of float32 sums in a different order, and of products in
bfloat16.
"""
COPIED = 4 << 20
"""Elements of a copy to pinned memory."""


class CheckFailed(PoseidonError):
    """A result differs from what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result of one check.

    Attributes:
        name: what was checked.
        problem: what is wrong; empty: nothing.
    """

    name: str
    problem: str


class CheckedNet(nn.Module):
    """A convolution and two fully-connected layers, whose weights have factors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.wide = nn.Linear(8 * 36, 40)
        self.last = nn.Linear(40, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x)).flatten(1)
        result: Tensor = self.last(torch.tanh(self.wide(x)))
        return result


def run_checks(
    device: torch.device, *, compiler: str, report: Callable[[str], None]
) -> list[Checked]:
    """Run all checks on a device.

    Args:
        device: a GPU or the CPU.
        compiler: the backend of torch.compile.
        report: receives the name of each check when it begins.
    """
    found = []
    with exact_products():
        for name, check in _checks(device, compiler).items():
            report(name)
            try:
                check()
                problem = ""
            except (PoseidonError, RuntimeError, AssertionError) as error:
                # RuntimeError: of CUDA and of torch.compile
                problem = str(error).splitlines()[0] if str(error) else type(error).__name__
            found.append(Checked(name=name, problem=problem))
    return found


def _checks(device: torch.device, compiler: str) -> dict[str, Callable[[], None]]:
    def adamw(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-3)

    checks: dict[str, Callable[[], None]] = {
        f"{kind.value}, two workers": lambda kind=kind: _compare(device, kind)  # type: ignore[misc]
        for kind in (ExchangeKind.SERVER, ExchangeKind.HYBRID, ExchangeKind.FACTORS)
    }
    checks.update(
        {
            "ps, two workers, torch.optim.AdamW": lambda: _compare(
                device, ExchangeKind.SERVER, how=adamw
            ),
            "ps, two workers of one host": lambda: _compare(
                device, ExchangeKind.SERVER, on_one_host=True
            ),
            "hybrid, compute on another stream": lambda: _compare(
                device, ExchangeKind.HYBRID, beside=lambda: other_stream(device)
            ),
            "hybrid, autocast to bfloat16": lambda: _compare(
                device, ExchangeKind.HYBRID, beside=lambda: autocast(device), tolerance=ROUNDED
            ),
            "ps, torch.compile": lambda: check_compiled(device, compiler),
            "copies to pinned memory on a side stream": lambda: check_copies(device),
        }
    )
    if device.type == "cuda":
        checks["memory lent to a second process"] = lambda: check_lent(device)
    return checks


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Compute products in float32 and choose the same kernels in every run."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = False
    try:
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=False, deterministic=True, allow_tf32=False
        ):
            yield
    finally:
        matmul.allow_tf32 = before


@contextlib.contextmanager
def other_stream(device: torch.device) -> Iterator[None]:
    """Run the body's work on a stream of its own. On a CPU there is none."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return the context that computes in bfloat16."""
    return torch.autocast(device.type, dtype=torch.bfloat16)


def batches(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return the same batches in every call."""
    drawn = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(BATCH, 3, 6, 6, generator=drawn).to(device),
            torch.randint(5, (BATCH,), generator=drawn).to(device),
        )
        for _ in range(STEPS)
    ]


def build(device: torch.device) -> nn.Module:
    """Return the net with the same weights in every call."""
    net, drawn = CheckedNet(), torch.Generator().manual_seed(3)
    for parameter in net.parameters():
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=drawn)
    return net.to(device)


def loop(device: torch.device, beside: Callable[[], AbstractContextManager[object]]) -> Body:
    """Return the training loop of a worker: its part of each batch, inside the context `beside`."""

    def body(module: nn.Module, group: Group) -> None:
        for x, label in batches(device):
            own = slice(group.rank, None, group.size)
            module.zero_grad()
            with beside():
                functional.cross_entropy(module(x[own]).float(), label[own]).backward()
                group.step()

    return body


def _compare(
    device: torch.device,
    kind: ExchangeKind,
    *,
    how: How = RULE,
    beside: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    tolerance: float = EXACT,
    on_one_host: bool = False,
) -> None:
    """Compare two workers with one process.

    Raises:
        CheckFailed: their parameters differ.
    """
    body = loop(device, beside)
    (alone,) = train(1, kind, lambda: build(device), how, body)
    options = DistributeOptions(example=(batches(device)[0][0][: BATCH // 2],))
    ends = train(
        2, kind, lambda: build(device), how, body, options=options, on_one_host=on_one_host
    )
    for rank, end in enumerate(ends):
        require_equal(end, alone, f"worker {rank}", tolerance)


def require_equal(
    end: dict[str, Tensor], expected: dict[str, Tensor], who: str, tolerance: float = EXACT
) -> None:
    """Check that parameters are equal.

    Raises:
        CheckFailed: one differs by more than `tolerance`, absolute and relative.
    """
    for name, value in expected.items():
        if not torch.allclose(end[name], value, rtol=tolerance, atol=tolerance):
            difference = (end[name] - value).abs().max().item()
            raise CheckFailed(
                f"{who}: {name} differs by {difference:.2g} from one process's; expected "
                f"{tolerance:g}"
            )


def check_compiled(device: torch.device, compiler: str) -> None:
    """Compare a compiled module on one worker and one shard with the same module in plain Poseidon.

    Raises:
        CheckFailed: their parameters differ.
    """
    body = loop(device, contextlib.nullcontext)
    (alone,) = train(1, ExchangeKind.SERVER, lambda: build(device), RULE, body)
    module = build(device)
    with shard_threads(1, 1) as (address,):
        context = lone_worker(ExchangeOptions(kind=ExchangeKind.SERVER), address, TOKEN, device)
        compiled: nn.Module = torch.compile(module, backend=compiler)
        with join(compiled, RULE, DistributeOptions(), context) as group:
            body(compiled, group)
            group.settle()
            end = {name: value.detach().cpu() for name, value in module.state_dict().items()}
    require_equal(end, alone, "compiled")


def add_one(ends: Connection, device: torch.device) -> None:
    """Add one to memory that another process lends, and wait for that."""
    own = device_of(device)
    memory = own.borrow(ends.recv_bytes())
    memory.add_(1.0)
    own.synchronize()
    del memory
    ends.send_bytes(b"")


def check_lent(device: torch.device) -> None:
    """Check that another process can write to memory of the device.

    Raises:
        CheckFailed: it cannot, or it has written to different memory.
    """
    context, own = multiprocessing.get_context("spawn"), device_of(device)
    ours, theirs = context.Pipe()
    process = context.Process(target=add_one, args=(theirs, device), daemon=True)
    process.start()
    theirs.close()
    memory = torch.full((1000,), 2.0, device=device)
    own.synchronize()
    try:
        ours.send_bytes(own.lend(memory))
        ours.recv_bytes()
    except (OSError, EOFError) as error:
        raise CheckFailed("the second process cannot open the memory") from error
    process.join()
    if not bool((memory == 3.0).all()):
        raise CheckFailed("the second process has written to different memory")


def check_copies(device: torch.device) -> None:
    """Check that a copy to pinned memory waits for the kernels before it, and that kernels wait
    for a copy back.

    Raises:
        CheckFailed: it did not wait, or memory is not pinned.
    """
    own = device_of(device)
    stream, buffer = own.stream(), own.host_memory(COPIED)
    if buffer.is_pinned() is not (device.type == "cuda"):
        raise CheckFailed(
            f"host memory for {device.type} is {'' if buffer.is_pinned() else 'not '}pinned"
        )
    values = torch.zeros(COPIED, device=device)
    for _ in range(50):  # the copy would overtake these if it did not wait
        values += 1.0
    own.copy(values, buffer, stream, own.event()).synchronize()
    if not bool((buffer == 50.0).all()):
        raise CheckFailed(
            "a copy to the host left before the kernels that write its source had ended"
        )
    buffer.fill_(3.0)
    own.wait(own.copy(buffer, values, stream, DONE))
    if (values * 2.0).mean().item() != 6.0:
        raise CheckFailed("a kernel read memory before the copy from the host had ended")
