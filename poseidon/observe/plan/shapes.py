"""What is planned: the machine's rates and the tensors of a net.

Law: shapes and amounts of work only, of tensors with a gradient; BatchNorm's statistics are left
out. A net with branches is a chain here, which changes neither its bytes nor its work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from poseidon.caffe.net.net import Net
from poseidon.torch.factor_rows import Example, rows_by_example, run_example

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreCosts:
    """A core's times for the work of an exchange, besides the net's own computation; the
    defaults are zero.

    Attributes:
        wire_s_per_byte: to send a byte by a socket, or to receive it.
        memory_s_per_byte: to copy a byte, as worker and shard of one host do, which share memory.
        message_s: to create a message, or to handle it, besides its bytes.
        sum_s_per_byte: to add a byte of gradient to a sum.
        rule_s_per_byte: to apply the update rule (SGD with momentum) to a byte of the model on a
            shard.
        factors_s_per_byte: the same for a byte of a weight updated from factors, without the
            products.
        optimizer_s_per_byte: the same with torch's optimizer, of a worker without shards.
        ring_s_per_byte: to send a byte round gloo's ring, to receive one and to add half of the
            time.
        half_s_per_byte: to convert a byte of float32 to 16 bits, or back.
        int8_s_per_byte: to encode a byte of float32 as int8, or to decode it: the mean, in a job.
        ring_half_s_per_byte: of DDP's fp16 hook for a byte of float32, besides a ring of half as
            many bytes.
        ring_low_rank_s_per_byte: of DDP's PowerSGD hook for a byte of a matrix, besides the next
            one.
        ring_low_rank_s_per_byte_and_rank: the same for each rank.
        low_rank_s_per_byte: of a worker for a byte of a matrix that travels as PowerSGD's factors,
            its rule included, besides the next one.
        low_rank_s_per_byte_and_rank: the same for each rank.
    """

    wire_s_per_byte: float = 0.0
    memory_s_per_byte: float = 0.0
    message_s: float = 0.0
    sum_s_per_byte: float = 0.0
    rule_s_per_byte: float = 0.0
    factors_s_per_byte: float = 0.0
    optimizer_s_per_byte: float = 0.0
    ring_s_per_byte: float = 0.0
    half_s_per_byte: float = 0.0
    int8_s_per_byte: float = 0.0
    ring_half_s_per_byte: float = 0.0
    ring_low_rank_s_per_byte: float = 0.0
    ring_low_rank_s_per_byte_and_rank: float = 0.0
    low_rank_s_per_byte: float = 0.0
    low_rank_s_per_byte_and_rank: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine(CoreCosts):
    """A host, as the formula (`iteration.py`) and the simulation (`benchmarks/simulation`) take it.

    Attributes:
        goodput: the part of a link's rate that carries values and not headers.
        busy_goodput: the same if processors are always busy and send late; None: equal. For the
            simulation alone.
        cores: processors of a host for its costs; if fewer than 2, its worker and its shards share
            them.
        flops: floating-point operations a second of products of factors.
        products_on_device: products take the accelerator's time, not a core's.
        ring_step_s: the time of each of the 2 (P - 1) steps of a ring, besides its bytes and the
            latency.
        ring_goodput: the part of the remaining rate that a ring uses.
        buffer_bytes: bytes in flight between two hosts before a sender waits, for the simulation
            alone.
    """

    latency_s: float = 0.0
    goodput: float = 1.0
    busy_goodput: float | None = None
    cores: float = 2.0
    flops: float = math.inf
    products_on_device: bool = False
    ring_step_s: float = 0.0
    ring_goodput: float = 1.0
    buffer_bytes: int = MIB


WITHOUT_GRADIENT = ("BatchNorm",)

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The shape of one layer.

    Attributes:
        name: as in the definition.
        tensors: shapes of its trained tensors, the weight first; empty for a layer that only
            computes.
        work: multiplications of one row's forward pass: of an image, a token, a sample.
        fully_connected: its weight (outputs x inputs) has factors.
        rows: rows of its input in a batch, as of tokens; 0: as many as the batch has.
    """

    name: str
    tensors: tuple[Shape, ...]
    work: int
    fully_connected: bool = False
    rows: int = 0

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors)


def elements(layers: Sequence[LayerShape]) -> int:
    """Return the number of trained values of a net."""
    return sum(layer.elements for layer in layers)


def shares_of_work(layers: Sequence[LayerShape]) -> list[float]:
    """Return each layer's part of a net's compute time."""
    total = sum(layer.work for layer in layers)
    return [layer.work / total for layer in layers]


def net_layers(net: Net) -> tuple[LayerShape, ...]:
    """Return the layers of a compiled net that are trained."""
    shapes = net.blob_shapes
    found: list[LayerShape] = []
    seen: set[int] = set()
    for name, layer in net.layer_modules:
        blobs = [blob for blob in layer.parameters(recurse=False) if id(blob) not in seen]
        seen.update(map(id, blobs))  # layers may share a blob: it has one gradient
        tensors = tuple(tuple(blob.shape) for blob in blobs)
        kind = layer.param.type
        # Part of its convolution: a layer of its own would cost more time than it represents.
        if kind == "Scale" and found:
            found[-1] = replace(found[-1], tensors=(*found[-1].tensors, *tensors))
        elif tensors and kind not in WITHOUT_GRADIENT:
            work = math.prod(tensors[0]) * math.prod(shapes[layer.param.top[0]][2:])
            found.append(
                LayerShape(
                    name=name, tensors=tensors, work=work, fully_connected=kind == "InnerProduct"
                )
            )
    return tuple(found)


def module_layers(module: nn.Module, example: Example) -> tuple[LayerShape, ...]:
    """Return the layers of a torch module, found by one run without gradients.

    Args:
        module: in the order in which its parts run, the parameters of each part of it are a layer.
            Parts that do not run by themselves (a weight that is used in place) come last.
        example: an input: positional arguments as a tuple, or arguments by name.
    """
    rows = rows_by_example(module, example)
    order: dict[nn.Module, int] = {}

    def note(part: nn.Module, arguments: tuple[object, ...], output: object) -> None:
        order.setdefault(part, _positions(part, output))

    owners = {
        part: name for name, part in module.named_modules() if list(part.parameters(recurse=False))
    }
    hooks = [part.register_forward_hook(note) for part in owners]
    try:
        with torch.no_grad():
            run_example(module, example)
    finally:
        for hook in hooks:
            hook.remove()
    found: list[LayerShape] = []
    seen: set[int] = set()
    for part in (*order, *(part for part in owners if part not in order)):
        # a shared parameter has one gradient
        own = [p for p in part.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        seen.update(map(id, own))
        if not own:
            continue
        weight = max(own, key=lambda p: p.dim())
        tensors = tuple(tuple(p.shape) or (1,) for p in sorted(own, key=lambda p: p is not weight))
        with_factors = weight in rows and weight.dim() == 2
        is_table = isinstance(part, nn.Embedding)
        work = (weight.shape[-1] if is_table else weight.numel()) * order.get(part, 1)
        found.append(
            LayerShape(
                name=owners[part],
                tensors=tensors,
                work=work,
                fully_connected=with_factors,
                rows=rows[weight] if with_factors else 0,
            )
        )
    return tuple(found)


def _positions(part: nn.Module, output: object) -> int:
    """Return how often a layer's weight is applied in a batch."""
    if not isinstance(output, Tensor) or output.dim() < 2:
        return 1
    if isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return output.shape[0] * math.prod(output.shape[2:])
    return math.prod(output.shape[:-1])
