"""How the workers of a measurement learn each other's addresses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.testbed import poseidon_worker
from benchmarks.testbed.poseidon_worker import worker_addresses
from poseidon.errors import JobError


def test_each_worker_gets_the_addresses_of_all(tmp_path: Path) -> None:
    def of(rank: int) -> list[str]:
        return worker_addresses(tmp_path, f"tcp://host{rank}:1", rank, 3)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(of, range(3))) == [[f"tcp://host{rank}:1" for rank in range(3)]] * 3


def test_a_missing_address_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poseidon_worker, "ADDRESSES_S", 0.0)
    with pytest.raises(JobError, match=r"^worker 1 has not written its address to .* within 0 s$"):
        worker_addresses(tmp_path, "tcp://host0:1", 0, 2)
