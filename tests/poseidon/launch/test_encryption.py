"""When a job encrypts, who is told which key, and what is refused."""

from __future__ import annotations

import argparse

import pytest

from poseidon.cluster.machinefile import Host
from poseidon.cluster.plan import JobPlan, plan_job
from poseidon.errors import UsageError
from poseidon.exchange.cost import ExchangeKind
from poseidon.launch.encryption import check_encryption, is_encrypted, new_keys, told_keys
from ps_server.keys import Keyring

HERE, FAR = ("127.0.0.1", "localhost", "::1"), ("127.0.0.1", "10.0.0.2")


def flags(encrypt: str = "auto", *, in_clear: bool = False) -> argparse.Namespace:
    return argparse.Namespace(encrypt=encrypt, allreduce_in_clear=in_clear)


def clients(hosts: tuple[str, ...]) -> tuple[Host, ...]:
    return tuple(Host(id=number, address=host, port=0) for number, host in enumerate(hosts))


def plan(hosts: tuple[str, ...], workers: int = 1) -> JobPlan:
    return plan_job(clients(hosts), devices_per_host=("cpu",) * workers, channels=2)


@pytest.mark.parametrize(
    ("hosts", "encrypt", "expected"),
    [
        (HERE, "auto", False),
        (HERE, "on", True),
        (FAR, "auto", True),
        (FAR, "on", True),
        (("node1",), "auto", True),
    ],
)
def test_a_job_that_leaves_the_machine_encrypts(hosts: tuple[str, ...], encrypt: str, expected: bool) -> None:
    assert is_encrypted(flags(encrypt), clients(hosts)) is expected
    assert (new_keys(flags(encrypt), plan(hosts)) is not None) is expected


def test_everybody_who_speaks_has_a_pair_of_its_own() -> None:
    made = plan(FAR, workers=2)
    keys = new_keys(flags(), made)
    told = [told_keys(keys, role) for role in made.roles]
    assert ["" if line == "" else "keys" for line in told] == ["keys"] * 4 + ["keys", ""] * 2
    rings = [Keyring.from_json(line) for line in told if line]
    assert len({ring.own.secret for ring in rings}) == 6
    shards, workers = rings[:4], rings[4:]
    for ring in rings:
        assert ring.admit == tuple(worker.own.public for worker in workers)
    assert workers[1].expect == tuple(shard.own.public for shard in shards)


def test_each_start_has_new_keys() -> None:
    first, second = new_keys(flags(), plan(FAR)), new_keys(flags(), plan(FAR))
    assert first is not None
    assert second is not None
    assert {pair.secret for pair in first.workers}.isdisjoint(pair.secret for pair in second.workers)


def test_nobody_is_told_anything_in_clear() -> None:
    assert told_keys(None, plan(HERE).roles[0]) == ""


@pytest.mark.parametrize(("hosts", "encrypt"), [(FAR, "auto"), (HERE, "on")])
def test_all_reduce_is_refused_where_it_would_have_to_be_encrypted(
    hosts: tuple[str, ...], encrypt: str
) -> None:
    with pytest.raises(UsageError, match=r"allreduce cannot be encrypted.*--allreduce_in_clear"):
        check_encryption(flags(encrypt), ExchangeKind.ALLREDUCE, clients(hosts))
    check_encryption(flags(encrypt, in_clear=True), ExchangeKind.ALLREDUCE, clients(hosts))
    check_encryption(flags(encrypt), ExchangeKind.HYBRID, clients(hosts))


def test_all_reduce_on_one_machine() -> None:
    check_encryption(flags(), ExchangeKind.ALLREDUCE, clients(HERE))
