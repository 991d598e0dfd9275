"""A common arithmetic is chosen, and replicas that differ are found, named and mended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from poseidon.errors import JobError
from poseidon.exchange.base import Ask, Trained
from poseidon.exchange.factors import Kernel
from poseidon.exchange.replicas import Arithmetic, ReplicaCheck, arithmetic_sample, common_kernel
from ps_server import Rule, RuleKind

ROOT = Path(__file__).parents[3]
PROGRAM = """
import json, sys, torch
from poseidon.exchange.base import Trained
from poseidon.exchange.replicas import arithmetic_sample
from ps_server import Rule, RuleKind
torch.set_num_threads(int(sys.argv[1]))
tensors = [Trained(name=k.value, tensor=torch.zeros(2), rule=Rule(kind=k)) for k in RuleKind]
print(json.dumps(arithmetic_sample(tensors).to_json()))
"""


def sample_with(threads: int, variables: Mapping[str, str]) -> Arithmetic:
    """The sample of a fresh process, with another number of threads or other vector instructions."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(threads)],
        cwd=ROOT,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return Arithmetic.from_json(json.loads(done.stdout))


@pytest.fixture(scope="module")
def plain() -> Arithmetic:
    """Of one thread."""
    return sample_with(1, {})


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="no AVX2 here")
@pytest.mark.parametrize(
    ("threads", "variables"),
    [
        (3, {}),
        (1, {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}),
        (2, {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2"}),
    ],
)
def test_threads_and_vector_width_change_no_bit(
    plain: Arithmetic, threads: int, variables: Mapping[str, str]
) -> None:
    found = sample_with(threads, variables)
    assert (found.rules, found.products) == (plain.rules, plain.products)
    assert common_kernel([plain, found], required=True) is Kernel.FUSED


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="no AVX2 here")
def test_a_processor_without_fused_multiply_add_makes_all_use_the_portable_kernel(plain: Arithmetic) -> None:
    old = sample_with(1, {"ONEDNN_MAX_CPU_ISA": "SSE41"})
    assert old.products[Kernel.FUSED.value] != plain.products[Kernel.FUSED.value]
    assert common_kernel([plain, old, plain], required=True) is Kernel.PORTABLE


def arithmetic(name: str, fused: str | None, portable: str, rules: str = "r") -> Arithmetic:
    products = {"portable": portable} if fused is None else {"fused": fused, "portable": portable}
    return Arithmetic(processor=name, rules=rules, products=products)


def test_where_one_has_no_onednn_all_use_the_portable_kernel() -> None:
    assert (
        common_kernel([arithmetic("a", "1", "2"), arithmetic("b", None, "2")], required=True)
        is Kernel.PORTABLE
    )


@pytest.mark.parametrize(
    "odd", [arithmetic("Old", "3", "4"), arithmetic("Old", "1", "2", rules="s")], ids=["products", "rules"]
)
def test_processors_with_nothing_in_common_are_named(
    odd: Arithmetic, caplog: pytest.LogCaptureFixture
) -> None:
    said = [arithmetic("New", "1", "2"), odd, arithmetic("New", "1", "2")]
    with pytest.raises(
        JobError, match=r"^workers 0 and 2 \(New\) and worker 1 \(Old\) compute different bits"
    ):
        common_kernel(said, required=True)
    assert common_kernel(said, required=False) is Kernel.FUSED
    assert "worker 1 (Old) compute different bits" in caplog.text


class Collection:
    """Collects among threads, as an exchange does among processes."""

    def __init__(self, workers: int) -> None:
        self.barrier = threading.Barrier(workers, timeout=30)
        self.payloads = [b""] * workers

    def of(self, rank: int, state: Mapping[str, torch.Tensor]) -> Member:
        """One worker's end."""
        return Member(self, rank, state)


class Member:
    """One worker's end of a collection."""

    def __init__(self, collection: Collection, rank: int, state: Mapping[str, torch.Tensor]) -> None:
        self._collection, self._rank, self._state = collection, rank, state

    def gather(self, payload: bytes) -> Ask:
        self._collection.payloads[self._rank] = payload
        self._collection.barrier.wait()
        found = tuple(self._collection.payloads)
        self._collection.barrier.wait()
        return lambda: found

    def gathered(self, ask: Ask) -> tuple[bytes, ...]:
        found = ask()
        assert found is not None
        return found

    def replicated_state(self) -> Mapping[str, torch.Tensor]:
        return self._state


def compare(
    values: Sequence[torch.Tensor], histories: Sequence[Mapping[str, torch.Tensor]], *, mends: bool
) -> list[str]:
    """Check once, one thread a worker; what each raised, empty for nothing."""
    collection, said = Collection(len(values)), [""] * len(values)

    def work(rank: int) -> None:
        tensors = [Trained(name="fc.weight", tensor=values[rank], rule=Rule(kind=RuleKind.SGD))]
        check = ReplicaCheck(
            collection.of(rank, histories[rank]), tensors, rank=rank, every=10, mends=mends, start=20
        )
        try:
            check.run(30)
        except JobError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(values))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def three(monkeypatch: pytest.MonkeyPatch) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Three replicas, of which 1 has another weight and 2 another history; worker 2 keeps no second history."""
    monkeypatch.setattr("poseidon.exchange.replicas.PIECE_ELEMENTS", 5)
    values = [torch.arange(12.0).view(3, 4) for _ in range(3)]
    histories = [{"fc.weight, history 0": torch.ones(7), "base": torch.ones(1)} for _ in range(3)]
    del histories[2]["base"]
    values[1][2, 3] = torch.nextafter(values[1][2, 3], torch.tensor(0.0))
    histories[2]["fc.weight, history 0"][0] = -1.0
    return values, histories


def test_equal_replicas_are_left_alone() -> None:
    values = [torch.arange(12.0) for _ in range(3)]
    assert compare(values, [{}] * 3, mends=False) == [""] * 3


def test_a_difference_is_named_on_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    said = compare(*three(monkeypatch), mends=False)
    assert len(set(said)) == 1
    assert said[0] == (
        "the replicas differ: 'fc.weight', 'fc.weight, history 0' on workers 1 and 2 are not as on worker 0 after "
        "iteration 30 (equal after iteration 20). Resume from an earlier snapshot, or use --on_divergence=mend."
    )


def test_a_difference_is_mended_from_worker_0(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    values, histories = three(monkeypatch)
    assert compare(values, histories, mends=True) == [""] * 3
    assert all(torch.equal(value, values[0]) for value in values)
    assert all(torch.equal(h["fc.weight, history 0"], torch.ones(7)) for h in histories)
    assert caplog.text.count("They now have the values of worker 0.") == 1


def test_when_it_is_due() -> None:
    check = ReplicaCheck(Collection(1).of(0, {}), [], rank=0, every=10, mends=False, start=20)
    assert [iteration for iteration in range(20, 45) if check.is_due(iteration)] == [30, 40]


def test_the_sample_of_this_process_is_that_of_any() -> None:
    tensors = [Trained(name="w", tensor=torch.zeros(2), rule=Rule(kind=RuleKind.SGD))]
    assert arithmetic_sample(tensors) == arithmetic_sample(tensors)
