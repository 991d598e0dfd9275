"""The process group of Ray Train's workers, without Ray: it is made, has their options, and ends.

`tests/distributed/test_over_ray.py` trains on a real cluster.
"""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.needs("ray train")


class OneWorker:
    """A group of Ray's workers that has one, in this process."""

    def execute(self, call: Any, *args: object, **named: object) -> list[Any]:
        return [call(*args, **named)]


@pytest.mark.parametrize("encrypt", [None, True])
def test_a_worker_joins_and_leaves(monkeypatch: pytest.MonkeyPatch, encrypt: bool | None) -> None:
    import ray  # here: it takes seconds

    from poseidon import ray_train

    places = ("world_rank", "local_rank", "node_rank")
    context = {f"get_{name}": lambda: 0 for name in places}
    context |= {f"get_{name}_size": lambda: 1 for name in ("world", "local_world")}
    monkeypatch.setattr(ray.train, "get_context", lambda: SimpleNamespace(**context))
    monkeypatch.setattr(ray_train, "get_device", lambda: "cpu")
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    meetings: list[int] = []

    def actor(size: int) -> SimpleNamespace:
        meetings.append(size)
        return SimpleNamespace(gather=SimpleNamespace(remote=lambda *call: [call[-1]]))

    remote = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=actor))
    monkeypatch.setattr(ray, "remote", lambda _: remote)
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    given: list[Any] = []
    for name in ("Mesh", "modules_compared"):
        make = getattr(ray_train, name)
        noted = lambda first, *rest, make=make: given.append(first) or make(first, *rest)  # noqa: E731
        monkeypatch.setattr(ray_train, name, noted)
    config = ray_train.PoseidonConfig(encrypt=encrypt, timeout_s=20, check_replicas=7)
    backend = config.backend_cls()
    backend.on_training_start(OneWorker(), config)
    try:
        assert meetings == [1]
        assert dist.get_backend() == "poseidon" == config.to_dict()["backend"]
        network, options = given
        assert (network.keys is not None) == bool(encrypt)
        assert (network.timeout_s, options.check_replicas) == (20, 7)
        assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == [
            "0",
            "1",
            "0",
        ]
    finally:
        backend.on_shutdown(OneWorker(), config)
    assert not dist.is_initialized()


def test_workers_meet_any_number_of_times() -> None:
    from poseidon.ray_train import Meeting

    async def meet() -> list[Any]:
        meeting = Meeting(2)
        calls = [
            meeting.gather(number, rank, f"{number}{rank}") for rank in (1, 0) for number in (0, 1)
        ]
        return await asyncio.gather(*calls)

    assert asyncio.run(meet()) == [["00", "01"], ["10", "11"]] * 2
