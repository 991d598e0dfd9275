"""Equal replicas: a kernel that all processors have in common, and comparisons of the replicas
while they train.

The parameter server sends one value to all workers. Where workers compute values themselves, from
factors or after an all-reduce, replicas are equal only if all processors compute the same bits.

Laws:

* Before the first iteration each worker computes a fixed example with every kernel
  (`arithmetic_sample`), and all choose the first kernel whose results are equal on all workers
  (`common_kernel`).
* `ReplicaCheck.run` compares checksums of every replicated tensor over all workers. All workers
  compare the same checksums, so all make the same decision in the same iteration.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poseidon.errors import JobError
from poseidon.exchange.base import Trained
from poseidon.exchange.broadcast import broadcast_bytes
from poseidon.exchange.factors.products import ONEDNN_LINEAR, Kernel, Scratch, apply_factors
from poseidon.exchange.job_control import JobControl
from poseidon.exchange.options import ExchangeOptions, OnDivergence
from ps_server import NewtonSchulz, RemoteProtocolError, Rule, RuleKind
from ps_server.json_fields import value_of
from ps_server.numerics import processor_name
from ps_server.rules import history_count, update

LOGGER = logging.getLogger(__name__)
SAMPLE_ROWS, SAMPLE_OUTPUTS, SAMPLE_INPUTS = 300, 40, 2100
"""More than one block of rows, and more than one tile; no size for which a processor has special
code.
"""
PORTABLE_ROWS, PORTABLE_INPUTS = 16, 300
"""Fewer: the portable kernel is slow, and treats all rows alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticSample:
    """The results of one worker's processor for a fixed example.

    Attributes:
        processor: its name and vector instructions, for messages.
        rules: checksum of the update rules' results.
        products: checksum of a product by each kernel that the processor has, by `Kernel.value`.
        rank: of the worker in the job.
    """

    processor: str
    rules: str
    products: Mapping[str, str]
    rank: int = 0


def arithmetic_sample(tensors: Sequence[Trained]) -> ArithmeticSample:
    """Compute the example on this worker's device, with the rules of these tensors.

    It takes some milliseconds.
    """
    device = tensors[0].tensor.device if tensors else torch.device("cpu")
    u_BN = _numbers(SAMPLE_ROWS, SAMPLE_OUTPUTS).to(device)
    v_BM = _numbers(SAMPLE_ROWS, SAMPLE_INPUTS).to(device)
    products = {}
    for kernel in Kernel:
        if kernel is Kernel.FUSED and device.type == "cpu" and ONEDNN_LINEAR is None:
            continue
        portable = kernel is Kernel.PORTABLE
        rows, inputs = (
            (PORTABLE_ROWS, PORTABLE_INPUTS) if portable else (SAMPLE_ROWS, SAMPLE_INPUTS)
        )
        product = torch.zeros(SAMPLE_OUTPUTS, inputs, device=device)
        apply_factors(
            Rule(kind=RuleKind.SGD),
            u_BN[:rows],
            v_BM[:rows, :inputs].contiguous(),
            product,
            [torch.zeros_like(product)],
            rate=1.0,
            step=0,
            scale=1.0,
            scratch=Scratch(device, kernel),
        )
        products[kernel.value] = checksum(product)
    kinds = sorted({t.rule.kind for t in tensors} - {RuleKind.MEAN}, key=lambda kind: kind.value)
    return ArithmeticSample(
        processor=processor_name(device),
        rules=" ".join(_after_rule(kind, u_BN) for kind in kinds),
        products=products,
    )


def introduce(
    control: JobControl, tensors: Sequence[Trained], own: Mapping[str, object], *, more: str = ""
) -> tuple[list[dict[str, Any]], list[ArithmeticSample]]:
    """Exchange what workers need to know of each other before they compute values themselves.

    All workers call it together.

    Args:
        tensors: whose rules the workers apply.
        own: what this worker offers, as JSON.
        more: other results that must be equal on all workers; compared beside the rules' results.

    Returns:
        By rank: what each worker offers, and its results for the example.

    Raises:
        RemoteProtocolError: a worker has sent something else.
    """
    sample = arithmetic_sample(tensors)
    payload = {**own, "arithmetic": asdict(replace(sample, rules=f"{sample.rules}{more}"))}
    offers, samples = [], []
    gathered = control.all_gather(json.dumps(payload).encode())
    for rank, received in zip(control.ranks or range(len(gathered)), gathered, strict=True):
        try:
            offer = json.loads(received)
            samples.append(value_of(ArithmeticSample, {**offer["arithmetic"], "rank": rank}))
        except (ValueError, KeyError, TypeError) as error:
            raise RemoteProtocolError(
                f"worker {rank} did not introduce itself to the others"
            ) from error
        offers.append(offer)
    return offers, samples


def common_kernel(samples: Sequence[ArithmeticSample], *, required: bool) -> Kernel:
    """Return the fastest kernel that computes the same bits on all workers.

    Args:
        samples: of all workers, by rank.
        required: whether there must be one. If not, and there is none, this logs a warning and
            returns the fastest that all have.

    Raises:
        JobError: there must be one, and there is none.
    """
    unequal = _unequal(
        samples, [(worker.rules, *sorted(worker.products.items())) for worker in samples]
    )
    if len({worker.rules for worker in samples}) == 1:
        for kernel in Kernel:
            found = {worker.products.get(kernel.value) for worker in samples}
            if len(found) == 1 and None not in found:
                if kernel is Kernel.PORTABLE:
                    LOGGER.warning(
                        "%s have no fast matrix product in common, so factors are multiplied "
                        "slowly",
                        unequal,
                    )
                return kernel
    message = (
        f"{unequal} compute different bits from the same numbers, so their replicas would drift "
        "apart. Use --exchange=ps, where the shards compute every value, or --on_divergence=mend."
    )
    if required:
        raise JobError(message)
    LOGGER.warning("%s", message)
    everyone = all(Kernel.FUSED.value in worker.products for worker in samples)
    return Kernel.FUSED if everyone else Kernel.PORTABLE


def check_rules(samples: Sequence[ArithmeticSample], *, required: bool) -> None:
    """Check that update rules compute the same bits on all workers, where each worker applies
    them itself.

    Args:
        samples: of all workers, by rank.
        required: whether they must. If not, and they do not, this logs a warning.

    Raises:
        JobError: they must, and they do not.
    """
    rules = [worker.rules for worker in samples]
    if len(set(rules)) == 1:
        return
    message = (
        f"{_unequal(samples, rules)} compute different bits by the update rule. With PowerSGD "
        "each worker applies the rule itself, so the replicas would drift apart. Use a different "
        "compression of --compress, whose rules the shards apply, or --on_divergence=mend."
    )
    if required:
        raise JobError(message)
    LOGGER.warning("%s", message)


NO_CHECK = ExchangeOptions(check_replicas=0)


class ReplicaCheck:
    """Compares the replicas of a job.

    With `--on_divergence=mend` those that differ get the values of the first worker.

    Args:
        options: how often, and what a difference does.
        state: returns what is equal on all replicas, by name: live tensors.
        collect: returns the payloads of all that are compared; all of them call it together.
        rank: of this worker in the job.
        ranks: of those that are compared; one alone compares nothing.
        start: the iteration at which all replicas were made equal.
        remedy: what a user may do about a difference; empty: what fits a snapshot, or the first
            iteration of `poseidon.distribute`.
    """

    def __init__(
        self,
        options: ExchangeOptions,
        *,
        state: Callable[[], Mapping[str, Tensor]],
        collect: Callable[[bytes], Sequence[bytes]],
        rank: int,
        ranks: Sequence[int],
        start: int = 0,
        remedy: str = "",
    ) -> None:
        self._options = options if len(ranks) > 1 else NO_CHECK
        self._remedy = remedy
        self._state = state
        self._collect = collect
        self._ranks, self._place = ranks, ranks.index(rank)
        self._equal_at = start
        self._has_run = False

    def is_due(self, iteration: int, *, also_first: bool = False) -> bool:
        """Return whether to compare after so many iterations.

        Args:
            iteration: finished iterations.
            also_first: whether the first comparison is due at once. It finds what a script has made
                different before its first step, for instance by weights that only one worker has
                read.
        """
        every = self._options.check_interval
        if every <= 0 or iteration <= self._equal_at:
            return False
        return iteration % every == 0 or (also_first and not self._has_run)

    def run(self, iteration: int, own: Mapping[str, str] | None = None) -> None:
        """Compare the replicas. All workers call it together, after `Exchange.settle`.

        Args:
            iteration: finished iterations.
            own: checksums of this worker's tensors that were computed before; None: of now.

        Raises:
            JobError: replicas differ, and a difference ends the job; the text names tensors,
                workers and iterations.
        """
        if not self._options.check_replicas:
            return
        first, self._has_run = not self._has_run, True
        state = self._state()
        own = checksums(state) if own is None else own
        everyone = [json.loads(payload) for payload in self._collect(json.dumps(own).encode())]
        unequal = {
            name: [
                rank
                for rank, one in zip(self._ranks, everyone, strict=True)
                if one.get(name, root) != root
            ]
            for name, root in everyone[0].items()
        }
        unequal = {name: ranks for name, ranks in unequal.items() if ranks}
        if unequal:
            message = self._message(unequal, iteration)
            if self._options.on_divergence is OnDivergence.STOP:
                remedy = self._remedy or "Resume from an earlier snapshot"
                if not self._remedy and first and iteration == self._equal_at + 1:
                    remedy = "Change parameters on all workers alike or before distribute()"
                raise JobError(f"{message} {remedy}, or use --on_divergence=mend.")
            for name in unequal:
                self._take_values(state.get(name))
            if self._place == 0:
                LOGGER.warning("%s They now have the values of worker %d.", message, self._ranks[0])
        self._equal_at = iteration

    def _message(self, unequal: Mapping[str, list[int]], iteration: int) -> str:
        names = list(unequal)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        tensors = ", ".join(f"'{name}'" for name in names[:3]) + more
        ranks = sorted({rank for found in unequal.values() for rank in found})
        return (
            f"the replicas differ: {tensors} on {_workers(ranks)} "
            f"{'is' if len(names) == 1 else 'are'} not as on worker {self._ranks[0]} "
            f"after iteration {iteration} (equal after iteration {self._equal_at})."
        )

    def _take_values(self, tensor: Tensor | None) -> None:
        """Copy the first worker's tensor to all workers.

        A worker without the tensor takes part in the collections only.
        """
        own = None if tensor is None or self._place else _bytes_of(tensor).tobytes()
        received = broadcast_bytes(own, self._collect, rank=self._place)
        if tensor is not None and received and self._place:
            values = torch.frombuffer(bytearray(received), dtype=tensor.dtype)
            tensor.detach().copy_(values.view(tensor.shape))


def _numbers(rows: int, columns: int) -> Tensor:
    """Return fixed numbers in [-0.5, 0.5), exact in float32.

    Random numbers of a library differ between processors.
    """
    mixed = np.arange(1, rows * columns + 1, dtype=np.uint32) * np.uint32(2654435761)
    return torch.from_numpy(
        (mixed >> 8).astype(np.float32) / np.float32(2**24) - np.float32(0.5)
    ).view(rows, columns)


def _after_rule(kind: RuleKind, gradient: Tensor) -> str:
    value = gradient.flip(0)
    history = [gradient.abs() for _ in range(history_count(kind))]
    muon = kind is RuleKind.MUON
    matrix = NewtonSchulz(columns=gradient.shape[1]) if muon else None
    rule = Rule(kind=kind, momentum=0.9, decay=0.0005, matrix=matrix)
    update(rule, gradient.clone(), history, value, rate=0.01, step=3)
    # threads: of larger products they may change bits
    threads = [str(torch.get_num_threads())] if muon and gradient.device.type == "cpu" else []
    return "-".join([*map(checksum, (value, *history)), *threads])


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the checksum of each tensor."""
    return {name: checksum(tensor) for name, tensor in tensors.items()}


def checksum(tensor: Tensor) -> str:
    """Return the CRC-32 of a tensor's bytes."""
    return f"{zlib.crc32(_bytes_of(tensor).data):08x}"


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a tensor in host memory: its own memory where it is contiguous and on
    the host, which the script can resize afterwards, as it cannot after `numpy()`.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return np.from_dlpack(flat).view(np.uint8)


def _unequal(samples: Sequence[ArithmeticSample], results: Sequence[object]) -> str:
    """Return the workers, grouped by equal results, with their processors."""
    groups: dict[object, list[int]] = {}
    for number, result in enumerate(results):
        groups.setdefault(result, []).append(number)
    return " and ".join(
        f"{_workers([samples[number].rank for number in alike])} ({samples[alike[0]].processor})"
        for alike in groups.values()
    )


def _workers(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"worker {ranks[0]}"
    return f"workers {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
