"""By formula: the step of hosts with several GPUs each, through the shards and by DDP over NCCL.

    python -m poseidon.observe.plan.gpu_hosts      the table of benchmarks/results/costs.md

Pure. H hosts have L GPUs each. A model has B bytes in float32, and a pass of it takes c seconds. A
push has p and a value v of the bytes of float32. Seconds of a step, each worker with its part of
the model, as `HostCarrier` deals it:

    link        (p + v) B (H - 1) / H                   at the link's rate, in each direction
    processes   (p + v) B / L                           through worker and shard, L times side by side
    PCIe        B / L into each GPU: the values of its part; p B / L out of it: its push
    GPUs        2 B (L - 1) / L into each GPU, and out of it: parts of gradients, and values, between
                the GPUs of a host
    memory      L times PCIe, through the host's memory

    through the host, where GPUs do not share memory:
    PCIe        B (2 L - 1) / L in: the other GPUs' gradients of its part, and all values
                B (L + p) / L out: its gradients for the others, its push, and its values

    shards      norm(c, link, processes, PCIe, GPUs, memory)
    DDP         c/3 + norm(2c/3, (1 - f) a) + f a, with a = d 2 B (n - 1) / n at the rate of NCCL,
                n = H L, d the part of float32 that a hook sends, f the last bucket's part

norm is that of `iteration.py`. Where two or more take the same time it adds a fifth.

Of NCCL's own traffic within a host nothing counts. Not in the formula either: messages, kernels of
sums and rules on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from poseidon.exchange.cost import ELEMENT_BYTES
from poseidon.observe.plan.iteration import norm
from poseidon.observe.plan.shapes import MIB

BUCKET_BYTES = 25 * MIB
GIGA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """What each GPU computes in a step.

    Attributes:
        elements: of all parameters.
        compute_s: of one GPU's forward and backward pass.
    """

    name: str
    elements: float
    compute_s: float

    @property
    def size(self) -> float:
        """Bytes in float32."""
        return ELEMENT_BYTES * self.elements


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHosts:
    """Hosts of the same kind. Rates are in bytes a second.

    Attributes:
        link: of each host's network link, in each direction.
        goodput: the part of it that carries values.
        pcie: of each GPU, in each direction.
        between: from a GPU to the others of its host, in each direction; 0: through the host.
        memory: of a host's memory.
        process: both ways together through one worker and its shard.
    """

    hosts: int
    gpus: int
    link: float
    goodput: float = 0.94
    pcie: float = 20 * GIGA
    between: float = 300 * GIGA
    memory: float = 200 * GIGA
    process: float = 2.5 * GIGA


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStep:
    """A step.

    Attributes:
        bound: what takes longest.
    """

    seconds: float
    bound: str


def through_shards(model: GpuModel, on: GpuHosts, *, push: float, value: float) -> GpuStep:
    """Return a step through the shards.

    Args:
        push: bytes of a push for each byte of float32.
        value: the same of a value.
    """
    size, part = model.size, model.size / on.gpus
    wire = push + value
    into, out, between_s = part, push * part, 0.0
    if on.between:
        between_s = 2 * (size - part) / on.between
    else:
        into, out = size * 2 - part, size + push * part
    took = {
        "computation": model.compute_s,
        "link": wire * size * (on.hosts - 1) / on.hosts / (on.link * on.goodput),
        "processes": wire * part / on.process,
        "PCIe": max(into, out) / on.pcie,
        "GPUs": between_s,
        "memory": on.gpus * (into + out) / on.memory,
    }
    return GpuStep(seconds=norm(*took.values()), bound=max(took, key=lambda name: took[name]))


def by_ddp(model: GpuModel, on: GpuHosts, *, sent: float, most: float) -> GpuStep:
    """Return a step of DDP over NCCL's ring.

    Args:
        sent: bytes that a hook sends for each byte of float32.
        most: of NCCL over TCP, bytes a second, whatever the link.
    """
    ranks = on.hosts * on.gpus
    rate = min(on.link * on.goodput, most)
    link_s = sent * 2 * model.size * (ranks - 1) / ranks / rate
    last = min(1.0, BUCKET_BYTES / model.size)
    backward_s = norm(model.compute_s * 2 / 3, (1 - last) * link_s)
    seconds = model.compute_s / 3 + backward_s + last * link_s
    return GpuStep(
        seconds=seconds, bound="computation" if model.compute_s > link_s else "NCCL on the link"
    )


MODELS = (
    GpuModel(name="ResNet-50", elements=25.6e6, compute_s=128 / 1826),
    GpuModel(name="GPT-2", elements=124.4e6, compute_s=8 * 1024 / 50_763),
    GpuModel(name="Llama-like, 1 B", elements=1e9, compute_s=6 * 1e9 * 8192 / 400e12),
)
"""The first two as measured on an H100 in float32 (benchmarks/results/speed.md), the third by 6
operations a parameter and token at 400 Tflop/s."""
GBITS = (10, 25, 100)
NCCL_MOST = (5 * GIGA, 1.2 * GIGA)
"""What users have reported at 100 Gbit/s: for small buffers, and for large ones (nccl#450)."""
HALF, INT8 = 0.5, 1.015625 / 4


def rows() -> Iterator[str]:
    """Yield the lines of the table, in milliseconds."""
    yield (
        "| model | Gbit/s | computation | DDP | DDP, fp16 hook | `ps` | `ps`, bfloat16 "
        "| `ps`, `int8` | the same through the host | bounds `ps`; `int8` |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for model in MODELS:
        for gbits in GBITS:
            on = GpuHosts(hosts=4, gpus=8, link=gbits * GIGA / 8)
            ddp = [
                " to ".join(
                    dict.fromkeys(
                        _ms(by_ddp(model, on, sent=sent, most=most).seconds) for most in NCCL_MOST
                    )
                )
                for sent in (1.0, HALF)
            ]
            ours = [through_shards(model, on, push=w, value=w) for w in (1.0, HALF, INT8)]
            through_host = through_shards(model, replace(on, between=0.0), push=INT8, value=INT8)
            cells = [
                model.name,
                str(gbits),
                _ms(model.compute_s),
                *ddp,
                *(_ms(step.seconds) for step in (*ours, through_host)),
                f"{ours[0].bound}; {ours[2].bound}",
            ]
            yield f"| {' | '.join(cells)} |"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f}"


if __name__ == "__main__":
    print("\n".join(rows()))
