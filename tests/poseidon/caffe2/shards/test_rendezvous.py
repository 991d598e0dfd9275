"""Shards meet, and every way to miss one another is a sentence within a time limit."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from poseidon.caffe2.shards import rendezvous
from poseidon.caffe2.shards.rendezvous import (
    Member,
    check_own,
    interfaces,
    join,
    network_id,
    published_address,
)
from poseidon.caffe2.shards.stores import FolderStore
from poseidon.errors import JobError, UsageError

LIMIT_S = 30.0


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path, "run")


def come(store: FolderStore, shard: int, shards: int, **changes: object) -> list[Member]:
    arguments = {"run": "run", "address": f"10.0.0.{shard}", "timeout_s": LIMIT_S, **changes}
    return join(store, shard=shard, shards=shards, **arguments)  # type: ignore[arg-type]


def meet(store: FolderStore, shards: int) -> list[list[Member]]:
    with ThreadPoolExecutor(shards) as pool:
        return list(
            pool.map(lambda shard: come(store, shard, shards, payload=f"p{shard}"), range(shards))
        )


def test_all_learn_of_all(store: FolderStore) -> None:
    met = meet(store, 3)
    assert met[0] == met[1] == met[2]
    assert [(m.shard, m.address, m.payload) for m in met[0]] == [
        (0, "10.0.0.0", "p0"),
        (1, "10.0.0.1", "p1"),
        (2, "10.0.0.2", "p2"),
    ]


def test_a_run_id_that_was_used_before(store: FolderStore) -> None:
    meet(store, 2)
    with pytest.raises(JobError, match=r"^run id 'run' was used"):
        come(store, 1, 2)


def test_two_shards_with_one_number(store: FolderStore) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(come, store, 1, 2)
        store.wait(["shard_1"], LIMIT_S)
        with pytest.raises(JobError, match=r"^shard 1 of run 'run' has come already \(process \d+"):
            come(store, 1, 2)
        come(store, 0, 2)
        assert len(first.result(LIMIT_S)) == 2


def test_a_shard_that_is_missing_is_named(store: FolderStore) -> None:
    host = socket.gethostname()
    with pytest.raises(JobError) as caught:
        come(store, 1, 3, timeout_s=0.05)
    assert str(caught.value).startswith(
        f"shards 0, 2 of run 'run' did not come within 0.05 s (there: 1 on {host}); check that "
        "each was started"
    )


def test_a_shard_that_waits_says_for_whom(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "NOTICE_S", 0.01)
    with pytest.raises(JobError, match=r"^shard 0 of run 'run' did not come within 0.1 s"):
        come(store, 1, 2, timeout_s=0.1)
    assert (
        caplog.messages[0]
        == f"waiting for shard 0 of run 'run' (there: 1 on {socket.gethostname()})"
    )


def test_shards_that_expect_different_numbers(store: FolderStore) -> None:
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.submit(come, store, 0, 2), pool.submit(come, store, 1, 1 + 1)
        one.result(LIMIT_S), other.result(LIMIT_S)
    again = FolderStore(store.folder.parent, "again")
    with ThreadPoolExecutor(1) as pool:
        larger = pool.submit(come, again, 0, 3, timeout_s=1.0)
        with pytest.raises(JobError, match=r"shard 0 on .* has --num_shards=3"):
            come(again, 1, 2)
        with pytest.raises(JobError, match="shard 2 of run"):
            larger.result(LIMIT_S)


@pytest.mark.parametrize(("shard", "shards"), [(2, 2), (-1, 2)])
def test_a_number_out_of_range(store: FolderStore, shard: int, shards: int) -> None:
    with pytest.raises(
        UsageError, match=rf"^--shard_id={shard}: expected 0 to 1 \(--num_shards\)$"
    ):
        come(store, shard, shards)
    assert list(store.folder.iterdir()) == []


def test_a_loopback_address_serves_one_host_only(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(["one host", "another"])
    monkeypatch.setattr(
        rendezvous, "outside_interfaces", lambda: {"eth0": "10.0.0.7", "eth1": "10.1.0.7"}
    )
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda shard: come(store, shard, 2, address="127.0.1.1"), range(2)))
    assert [member.address for member in ends[0]] == ["127.0.1.1"] * 2
    apart = FolderStore(store.folder.parent, "apart")
    monkeypatch.setattr(rendezvous, "network_id", lambda: next(names))

    def fails(shard: int) -> str:
        with pytest.raises(JobError) as caught:
            come(apart, shard, 2, address="127.0.1.1" if shard else "10.0.0.1")
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(fails, range(2))
    assert one == other
    assert "publishes 127.0.1.1, since the name" in one
    assert one.endswith(
        "with --distributed_interfaces set to one of its networks: eth0 (10.0.0.7), eth1 (10.1.0.7)"
    )


MEMBER = {
    "shard": 0,
    "shards": 2,
    "host": "h",
    "network": "n",
    "address": "10.0.0.1",
    "networks": "",
    "process": 7,
    "started_s": 1.0,
}


def test_the_key_of_a_member_names_its_number() -> None:
    assert Member.from_bytes(json.dumps(MEMBER).encode(), "shard_0").process == 7


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xff", b"[]", b"{}", b"[" * 100_000, json.dumps({"shard": 0}).encode()),
        *(
            json.dumps({**MEMBER, **other}).encode()
            for other in ({"shard": 1}, {"address": "here"}, {"started_s": 1e300})
        ),
    ],
)
def test_what_no_shard_has_published_is_refused(store: FolderStore, data: bytes) -> None:
    store.set("shard_0", data)
    with pytest.raises(JobError, match=r"^key 'shard_0' of the rendezvous was not written"):
        come(store, 1, 2)


Resolve = Callable[..., list[tuple[object, ...]]]


def resolves(address: str) -> Resolve:
    return lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]


def test_which_address_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        published_address("127.0.0.1")
        == published_address("lo")
        == interfaces()["lo"]
        == "127.0.0.1"
    )
    with pytest.raises(UsageError, match=r"^--distributed_interfaces=no.such.host.invalid"):
        published_address("no.such.host.invalid")
    monkeypatch.setattr(socket, "getaddrinfo", resolves("10.9.8.7"))
    assert published_address(None) == "10.9.8.7"
    monkeypatch.setattr(socket, "getaddrinfo", resolves("127.0.1.1"))
    monkeypatch.setattr(rendezvous, "interfaces", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.7"})
    assert published_address(None) == "10.0.0.7"
    monkeypatch.setattr(
        rendezvous,
        "interfaces",
        lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.7", "docker0": "172.17.0.1"},
    )
    assert published_address(None) == "127.0.1.1"


def test_an_address_of_another_host_is_refused() -> None:
    check_own("127.0.0.1")
    with pytest.raises(UsageError, match=r"would publish 192.0.2.1"):
        check_own("192.0.2.1")


def test_processes_of_one_host_share_its_network() -> None:
    assert network_id() == network_id() != ""
