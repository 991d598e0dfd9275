"""The two stores keep one contract; Redis is a real server."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from poseidon.caffe2.shards.stores import (
    FolderStore,
    KeyTaken,
    RedisStore,
    Store,
    StoreTimeout,
    TcpStore,
)
from poseidon.errors import JobError, UsageError
from tests.support.free_ports import free_ports
from tests.support.redis_server import redis_server

Open = Callable[[str], Store]


@pytest.fixture(params=["folder", "tcp", pytest.param("redis", marks=pytest.mark.needs("redis"))])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    if request.param == "folder":
        yield lambda prefix: FolderStore(tmp_path, prefix)
        return
    if request.param == "tcp":
        (port,) = free_ports(1)
        served = TcpStore("127.0.0.1", port, serve=True)
        yield lambda prefix: TcpStore("127.0.0.1", port, prefix)
        del served
        return
    with redis_server(tmp_path) as server:
        yield lambda prefix: RedisStore("127.0.0.1", server.port, prefix)


def test_a_key_is_set_once(open_store: Open) -> None:
    store, other = open_store("run"), open_store("run")
    assert store.find("a/b c") is None
    store.set("a/b c", b"\x00\xff")
    assert other.get("a/b c") == b"\x00\xff"
    with pytest.raises(KeyTaken, match="'a/b c' was set before") as caught:
        other.set("a/b c", b"")
    assert caught.value.value == b"\x00\xff"
    assert store.find("a/b c") == b"\x00\xff"


def test_prefixes_are_apart(open_store: Open) -> None:
    open_store("1").set("key", b"one")
    assert open_store("2").find("key") is None
    open_store("2").set("key", b"two")
    assert open_store("1").find("key") == b"one"


@pytest.mark.parametrize(
    "key", ["", "..", "/etc/passwd", "a" * 900, "a" * 899 + "b", "\u00e4\n%2E", "a.key"]
)
def test_any_text_is_a_key(open_store: Open, key: str, tmp_path: Path) -> None:
    store = open_store("run/../x")
    store.set(key, key.encode())
    assert store.find(key) == key.encode()
    assert store.find("a" * 898) is None
    assert {path.name for path in tmp_path.parent.iterdir()} >= {tmp_path.name}


def test_a_wait_ends_when_the_last_key_is_set(open_store: Open) -> None:
    store, waiting = open_store("run"), threading.Event()
    store.set("a", b"1")

    def wait() -> bytes:
        waiting.set()
        store.wait(["a", "b"], 30)
        return store.get("b")

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(wait)
        assert waiting.wait(30)
        assert not store.check(["a", "b"])
        open_store("run").set("b", b"2")
        assert future.result(30) == b"2"
    assert store.check(["a", "b"])


def test_a_key_that_does_not_come_is_named(open_store: Open) -> None:
    store = open_store("run")
    store.set("here", b"")
    with pytest.raises(StoreTimeout, match=r"^Wait timeout for name\(s\): b c \(after 0.05 s\)$"):
        store.wait(["b", "here", "c"], 0.05)


def test_counters_count_everyone(open_store: Open) -> None:
    def count(_: int) -> list[int]:
        store = open_store("run")
        return [store.add("count", 2) for _ in range(10)]

    with ThreadPoolExecutor(4) as pool:
        seen = sorted(value for values in pool.map(count, range(4)) for value in values)
    assert seen == list(range(2, 82, 2))
    assert open_store("run").find("count") is None


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none does not exist; all shards must share it"):
        FolderStore(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file is not a folder; all shards"):
        FolderStore(tmp_path / "file")


def test_a_folder_that_goes_is_one_sentence(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, "run")
    os.rmdir(store.folder)
    with pytest.raises(JobError, match=r"cannot use the folder of the rendezvous"):
        store.set("a", b"")


def test_a_damaged_counter_is_named(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.add("n", 1)
    (tmp_path / "n.counter").write_bytes(b"\0")
    with pytest.raises(JobError, match=r"n.counter does not hold a number; remove it"):
        store.add("n", 1)


@pytest.mark.needs("redis")
def test_what_redis_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with redis_server(tmp_path, password="right") as server:
        with pytest.raises(
            JobError, match=rf"^Redis at 127.0.0.1:{server.port} needs a password: set"
        ):
            RedisStore("127.0.0.1", server.port)
        with pytest.raises(JobError, match="refuses the password"):
            RedisStore("127.0.0.1", server.port, password="wrong")
        monkeypatch.setenv("REDISCLI_AUTH", "right")
        store = RedisStore("127.0.0.1", server.port)
        store.set("a", b"1")
    with pytest.raises(JobError, match=r"cannot be reached: .*[^.]; check the host, the port"):
        store.find("a")


@pytest.mark.needs("redis")
def test_a_replica_takes_no_keys(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        server.become_replica()
        with pytest.raises(JobError, match="is a read-only replica"):
            RedisStore("127.0.0.1", server.port).set("a", b"")


def test_a_server_that_is_not_there() -> None:
    (port,) = free_ports(1)
    with pytest.raises(JobError, match=rf"^Redis at 127.0.0.1:{port} cannot be reached: "):
        RedisStore("127.0.0.1", port, timeout_s=5)
    with pytest.raises(JobError, match=r"^Redis at host.invalid:1 cannot be reached: "):
        RedisStore("host.invalid", 1, timeout_s=5)


def test_without_its_package_redis_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "redis", None)
    with pytest.raises(UsageError, match="needs the Python package redis"):
        RedisStore("127.0.0.1")
