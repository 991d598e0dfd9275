"""The processes of a job: their environment, and the keys of their connections."""

from __future__ import annotations

import json

import pytest

from poseidon.cluster.job_plan import JobPlan, plan_job
from poseidon.cluster.machinefile import Host
from poseidon.cluster.python_command import module_arguments
from poseidon.cluster.supervision.restarts import StartingPoint
from poseidon.engine.document import WorkKind
from poseidon.launcher.processes import (
    Start,
    child_environment,
    imports_of,
    is_encrypted,
    shard_spec,
)
from poseidon.launcher.request import Encrypt
from ps_server.json_fields import value_of
from ps_server.network import ShardDocument
from tests.support.memory_child import output_of

HERE, FAR = ("127.0.0.1", "localhost", "::1"), ("127.0.0.1", "10.0.0.2")


def clients(hosts: tuple[str, ...]) -> tuple[Host, ...]:
    return tuple(Host(id=number, address=host, port=0) for number, host in enumerate(hosts))


def plan(hosts: tuple[str, ...], workers: int = 1, *, shards: bool = True) -> JobPlan:
    devices = ("cpu",) * workers
    return plan_job(clients(hosts), devices_per_host=devices, channels=2, with_server=shards)


def start_of(plan: JobPlan, encrypt: Encrypt = Encrypt.AUTO) -> Start:
    return Start.new(0, StartingPoint(), plan, encrypt)


@pytest.mark.parametrize(
    ("hosts", "encrypt", "expected"),
    [
        (HERE, Encrypt.AUTO, False),
        (HERE, Encrypt.ON, True),
        (FAR, Encrypt.AUTO, True),
        (FAR, Encrypt.ON, True),
        (("node1",), Encrypt.AUTO, True),
    ],
)
def test_a_job_that_leaves_the_machine_encrypts(
    hosts: tuple[str, ...], encrypt: Encrypt, expected: bool
) -> None:
    assert is_encrypted(encrypt, clients(hosts)) is expected
    for shards in (True, False):
        made = plan(hosts, shards=shards)
        assert all(
            (start_of(made, encrypt).keyring(each) is not None) is expected for each in made.roles
        )


def test_every_process_that_connects_has_a_key_pair_of_its_own() -> None:
    made = plan(FAR, workers=2)
    start = start_of(made)
    rings = [ring for role in made.roles if (ring := start.keyring(role)) is not None]
    assert len({ring.own.secret for ring in rings}) == 8
    shards, workers = rings[:4], rings[4:]
    for ring in rings:
        assert ring.admit == tuple(worker.own.public for worker in workers)
    assert workers[1].expect == tuple(shard.own.public for shard in shards)


def test_each_start_has_secrets_of_its_own() -> None:
    first, second = start_of(plan(FAR)), start_of(plan(FAR))
    assert first.keys is not None
    assert second.keys is not None
    assert {pair.secret for pair in first.keys.workers}.isdisjoint(
        pair.secret for pair in second.keys.workers
    )
    assert first.token != second.token
    assert repr(first.token) not in repr(first)


def test_no_process_has_keys_where_nothing_is_encrypted() -> None:
    assert start_of(plan(HERE)).keyring(plan(HERE).roles[0]) is None


@pytest.mark.parametrize("trace", ["", "/out/trace.json"])
def test_a_shard_gets_its_secrets_on_standard_input(trace: str) -> None:
    made = plan(FAR)
    start = start_of(made)
    spec = shard_spec(
        made.shards[1], start, "j-1", WorkKind.SOLVER, workers=2, threads=3, trace=trace
    )
    assert spec.argv[1:] == module_arguments("ps_server", "--job", "j-1", "--stdin", "--shard", "1")
    assert (spec.environment, spec.imports) == (child_environment(3), imports_of(WorkKind.SOLVER))
    line = json.loads(spec.first_line)
    assert value_of(ShardDocument, line) == ShardDocument(
        shard=1,
        token=start.token,
        keys=start.keyring(made.shards[1]),
        workers=2,
        address=made.shards[1].address,
        trace=trace,
    )


def test_a_thread_of_a_child_that_works_on_small_tensors_alone_does_not_grow() -> None:
    grown = output_of("tests.support.rebuilding_child", "3000", malloc=child_environment(threads=1))
    assert grown < 512 * 1024  # without the settings: some 500 bytes an iteration, 1.5 MB


def test_what_the_user_tells_glibc_is_kept_and_has_the_last_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = "glibc.malloc.mxfast=0:glibc.cpu.x86_non_temporal_threshold=0x100000"
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")
    for _ in range(2):  # a child's child has the same
        tunables = child_environment(threads=1)["GLIBC_TUNABLES"]
        assert tunables == f"{ours}:glibc.malloc.tcache_count=0"
        monkeypatch.setenv("GLIBC_TUNABLES", tunables)
