"""A common arithmetic is chosen, and replicas that differ are found, named and mended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from poseidon.errors import JobError
from poseidon.exchange.base import Trained
from poseidon.exchange.factors.products import Kernel
from poseidon.exchange.job_control import AloneControl
from poseidon.exchange.options import ExchangeOptions, OnDivergence
from poseidon.exchange.replicas import (
    ArithmeticSample,
    ReplicaCheck,
    arithmetic_sample,
    checksum,
    common_kernel,
    introduce,
)
from ps_server import Collection as JobCollection
from ps_server import NewtonSchulz, Rule, RuleKind
from ps_server.json_fields import value_of

ROOT = Path(__file__).parents[3]
PROGRAM = """
import json, sys, torch
from dataclasses import asdict
from poseidon.exchange.base import Trained
from poseidon.exchange.replicas import arithmetic_sample
from ps_server import Rule, RuleKind
torch.set_num_threads(int(sys.argv[1]))
tensors = [Trained(name=k.value, tensor=torch.zeros(2), rule=Rule(kind=k)) for k in RuleKind if k is not RuleKind.MUON]
print(json.dumps(asdict(arithmetic_sample(tensors))))
"""


def sample_with(threads: int, variables: Mapping[str, str]) -> ArithmeticSample:
    """The sample of a fresh process, with another number of threads or other vector
    instructions.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(threads)],
        cwd=ROOT,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return value_of(ArithmeticSample, json.loads(done.stdout))


@pytest.fixture(scope="module")
def plain() -> ArithmeticSample:
    """Of this process."""
    kinds = [kind for kind in RuleKind if kind is not RuleKind.MUON]
    return arithmetic_sample(
        [Trained(name=kind.value, tensor=torch.zeros(2), rule=Rule(kind=kind)) for kind in kinds]
    )


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="no AVX2 here"
)
def test_a_tensor_can_be_resized_after_its_checksum() -> None:
    tensor = torch.ones(5)
    assert checksum(tensor) == checksum(torch.ones(5, 1)) != checksum(torch.zeros(5))
    assert checksum(torch.ones(0)) == "00000000"
    tensor.resize_(9)


@pytest.mark.parametrize(
    ("threads", "variables"),
    [
        (3, {}),
        (2, {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}),
        (2, {"MKL_CBWR": "COMPATIBLE"}),
    ],
)
@pytest.mark.thorough
def test_threads_and_vector_width_change_no_bit(
    plain: ArithmeticSample, threads: int, variables: Mapping[str, str]
) -> None:
    found = sample_with(threads, variables)
    assert (found.rules, found.products) == (plain.rules, plain.products)
    assert common_kernel([plain, found], required=True) is Kernel.FUSED


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="no AVX2 here"
)
def test_a_processor_without_fused_multiply_add_makes_all_use_the_portable_kernel(
    plain: ArithmeticSample,
) -> None:
    old = sample_with(1, {"ONEDNN_MAX_CPU_ISA": "SSE41"})
    assert old.products[Kernel.FUSED.value] != plain.products[Kernel.FUSED.value]
    assert common_kernel([plain, old, plain], required=True) is Kernel.PORTABLE


def arithmetic(
    name: str, fused: str | None, portable: str, rules: str = "r", rank: int = 0
) -> ArithmeticSample:
    products = {"portable": portable} if fused is None else {"fused": fused, "portable": portable}
    return ArithmeticSample(processor=name, rules=rules, products=products, rank=rank)


def test_where_they_are_mended_all_use_a_kernel_that_each_has() -> None:
    said = [arithmetic("a", "1", "2"), arithmetic("b", None, "3")]
    assert common_kernel(said, required=False) is Kernel.PORTABLE


def test_where_one_has_no_onednn_all_use_the_portable_kernel() -> None:
    assert (
        common_kernel([arithmetic("a", "1", "2"), arithmetic("b", None, "2")], required=True)
        is Kernel.PORTABLE
    )


@pytest.mark.parametrize(
    "odd",
    [arithmetic("Old", "3", "4", rank=3), arithmetic("Old", "1", "2", rules="s", rank=3)],
    ids=["products", "rules"],
)
def test_processors_with_nothing_in_common_are_named(
    odd: ArithmeticSample, caplog: pytest.LogCaptureFixture
) -> None:
    said = [arithmetic("New", "1", "2", rank=1), odd, arithmetic("New", "1", "2", rank=5)]
    with pytest.raises(JobError, match=r"^workers 1 and 5 \(New\) and worker 3 \(Old\) compute"):
        common_kernel(said, required=True)
    assert common_kernel(said, required=False) is Kernel.FUSED
    assert "worker 3 (Old) compute different bits" in caplog.text


def test_workers_of_a_plane_are_known_by_their_ranks_in_the_job() -> None:
    class Plane(AloneControl):
        def _gather(self, payload: bytes, to: Container[int] | None) -> JobCollection:
            return JobCollection(lambda: (payload,) * 2, lambda: (payload,) * 2)

    tensors = [Trained(name="w", tensor=torch.zeros(2))]
    _, samples = introduce(Plane(ranks=(1, 4)), tensors, {})
    assert [sample.rank for sample in samples] == [1, 4]


class Collection:
    """Collects payloads of threads, as an exchange does of processes."""

    def __init__(self, workers: int) -> None:
        self._barrier = threading.Barrier(workers, timeout=30)
        self._payloads = [b""] * workers

    def collect(self, rank: int, payload: bytes) -> tuple[bytes, ...]:
        """All payloads, by rank."""
        self._payloads[rank] = payload
        self._barrier.wait()
        found = tuple(self._payloads)
        self._barrier.wait()
        return found


def compare(states: Sequence[Mapping[str, torch.Tensor]], *, mends: bool) -> list[str]:
    """Check once, one thread a worker of a plane: workers 1, 3, 5 of the job. Return what each
    raised, empty for nothing.
    """
    collection, said = Collection(len(states)), [""] * len(states)

    def work(rank: int) -> None:
        check = ReplicaCheck(
            ExchangeOptions(
                check_replicas=10, on_divergence=OnDivergence.MEND if mends else OnDivergence.STOP
            ),
            state=lambda: states[rank],
            collect=lambda payload: collection.collect(rank, payload),
            rank=2 * rank + 1,
            ranks=range(1, 2 * len(states), 2),
            start=20,
        )
        try:
            check.run(30)
        except JobError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(states))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def three(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Three replicas, of which 1 has another weight and 2 another history; worker 2 does not
    keep all that the others do.
    """
    monkeypatch.setattr("poseidon.exchange.broadcast.PIECE_BYTES", 20)
    states = [
        {
            "fc.weight": torch.arange(12.0).view(4, 3).t(),
            "fc.weight, history 0": torch.ones(7, dtype=torch.bfloat16),
            "fc.weight, step": torch.tensor(5.0),
        }
        for _ in range(3)
    ]
    states[1]["fc.weight"][2, 3] = torch.nextafter(torch.tensor(11.0), torch.tensor(0.0))
    states[2]["fc.weight, history 0"][0] = -1.0
    del states[2]["fc.weight, step"]
    return states


def test_equal_replicas_are_left_alone() -> None:
    assert compare([{"w": torch.arange(12.0)} for _ in range(3)], mends=False) == [""] * 3


def test_a_difference_is_named_on_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    said = compare(three(monkeypatch), mends=False)
    assert len(set(said)) == 1
    assert said[0] == (
        "the replicas differ: 'fc.weight', 'fc.weight, history 0' on workers 3 and 5 are not as "
        "on worker 1 after "
        "iteration 30 (equal after iteration 20). Resume from an earlier snapshot, or use "
        "--on_divergence=mend."
    )


def test_a_difference_is_mended_from_worker_0(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    states = three(monkeypatch)
    assert compare(states, mends=True) == [""] * 3
    for state in states:
        for name, tensor in state.items():
            assert torch.equal(tensor, states[0][name])
    assert caplog.text.count("They now have the values of worker 1.") == 1


def test_when_it_is_due() -> None:
    check = ReplicaCheck(
        ExchangeOptions(check_replicas=10),
        state=dict,
        collect=lambda payload: [payload, payload],
        rank=0,
        ranks=range(2),
        start=20,
    )
    assert [iteration for iteration in range(20, 45) if check.is_due(iteration)] == [30, 40]
    assert [n for n in range(20, 45) if check.is_due(n, also_first=True)] == list(range(21, 45))
    check.run(21)
    assert [n for n in range(20, 45) if check.is_due(n, also_first=True)] == [30, 40]


@pytest.mark.parametrize(("kind", "alike"), [(RuleKind.MUON, False), (RuleKind.ADAMW, True)])
def test_workers_that_orthogonalize_need_equally_many_threads(
    kind: RuleKind, alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large products of bfloat16 have other bits with other threads."""
    matrix = NewtonSchulz(columns=2) if kind is RuleKind.MUON else None
    tensors = [Trained(name="w", tensor=torch.zeros(2), rule=Rule(kind=kind, matrix=matrix))]
    samples = []
    for threads in (1, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        samples.append(arithmetic_sample(tensors))
    assert (samples[0].rules == samples[1].rules) is alike
