"""Seeds are stable for ever: a snapshot of an older version must go on alike."""

from __future__ import annotations

from poseidon.caffe.net.random_state import derive_seed


def test_known_value() -> None:
    assert derive_seed(1, "blob", 0) == 8457014270289692312


def test_every_part_matters() -> None:
    seeds = [
        derive_seed(*path)
        for path in ((1, "a", 0), (1, "a", 1), (1, "b", 0), (2, "a", 0), (12, "a"), (1, "2a"))
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
