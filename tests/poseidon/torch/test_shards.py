"""How a module is divided among the workers of a host."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint

from poseidon.errors import SnapshotError, UsageError
from poseidon.exchange.base import Trained
from poseidon.exchange.membership import Membership
from poseidon.torch.checkpoint_file import consolidate
from poseidon.torch.divided_states import divided, part_of, whole
from poseidon.torch.shards import (
    Shards,
    _check_hosts,
    copies_before_hooks,
    host_mesh,
    shards_of,
)
from ps_server.network import Network


def trained(name: str, tensor: Tensor) -> Trained:
    return Trained(name=name, tensor=tensor)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 9, 12])
def test_each_worker_has_the_rows_that_torch_gives_it(workers: int, rows: int) -> None:
    shards = Shards(
        workers, {"w": 0, "v": 1}, {"w": torch.Size([rows, 5]), "v": torch.Size([5, rows])}
    )
    chunks = torch.empty(rows, 5).chunk(workers)
    found = [shards.shape("w", local_rank) for local_rank in range(workers)]
    assert [shape for shape in found if shape[0]] == [tuple(chunk.shape) for chunk in chunks]
    assert [shards.shape("v", local_rank)[::-1] for local_rank in range(workers)] == found


def test_a_plane_exchanges_the_parts_that_have_rows() -> None:
    shapes = {"w": torch.Size([3, 2]), "b": torch.Size([1])}
    planes = Shards(2, {"w": 0, "b": 0}, shapes).planes(["w", "b"], trained)
    assert [[(t.name, tuple(t.tensor.shape)) for t in plane] for plane in planes] == [
        [("w", (2, 2)), ("b", (1,))],
        [("w", (1, 2))],
    ]
    assert all(t.tensor.is_meta for plane in planes for t in plane)


def test_a_module_that_is_not_divided_has_no_shards() -> None:
    assert shards_of(torch.nn.Linear(2, 2), Membership()) is None
    value = torch.arange(6.0)
    assert part_of(value, value) is value
    state = {"a": [value, 3], "b": "text"}
    assert torch.equal(divided(state, {"a": [value, 0]})["a"][0], value)
    assert torch.equal(whole(state, keeps=True)["a"][0], value)
    assert whole(state, keeps=False)["a"][0].numel() == 0


def test_a_mesh_of_a_host_needs_a_job() -> None:
    with pytest.raises(UsageError, match=r"host_mesh\(\) needs the process group of a job"):
        host_mesh()


def test_hooks_find_a_gradient_that_fsdp_has_copied_to_the_host() -> None:
    seen: list[str] = []
    module: Any = torch.nn.Linear(2, 2)
    copied = SimpleNamespace(synchronize=lambda: seen.append("copied"))
    parameter = SimpleNamespace(sharded_param=module.weight, grad_offload_event=copied)
    group = SimpleNamespace(fsdp_params=[parameter])
    module._get_fsdp_state = lambda: SimpleNamespace(_fsdp_param_group=group)
    end = copies_before_hooks(module)
    module.weight.register_post_accumulate_grad_hook(lambda _: seen.append("read"))
    module(torch.ones(2)).sum().backward()
    assert seen == ["copied", "read"]
    parameter.grad_offload_event = None  # torch waits by itself
    module(torch.ones(2)).sum().backward()
    assert seen[2:] == ["read"]
    end()
    assert len(module.weight._post_accumulate_grad_hooks) == 1


def test_hosts_with_different_numbers_of_workers_are_refused() -> None:
    member = Membership(network=Network(rank=0, size=3), hosts=(2, 1))
    with pytest.raises(UsageError, match=r"hosts have 1 to 2 workers"):
        _check_hosts(member)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_parts_of_a_checkpoint_become_one_file(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(6.0)}, "optimizer": {"lr": 0.1, "m": [torch.ones(2)]}}
    checkpoint.save(state, checkpoint_id=tmp_path / "parts", no_dist=True)
    assert consolidate(tmp_path / "parts", tmp_path / "whole.pt") == 2
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert torch.equal(found["model"]["w"], torch.arange(6.0))
    assert found["optimizer"]["lr"] == 0.1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_not_a_whole_checkpoint_is_not_consolidated(tmp_path: Path) -> None:
    parts, whole = tmp_path / "parts", tmp_path / "whole.pt"
    parts.mkdir()
    whole.write_text("earlier")
    with pytest.raises(SnapshotError, match=r"parts has no \.metadata; expected a folder"):
        consolidate(parts, whole)
    checkpoint.save({"w": torch.arange(6.0)}, checkpoint_id=parts, no_dist=True)
    for part in parts.glob("*.distcp"):
        part.unlink()
    with pytest.raises(SnapshotError, match="parts is damaged: "):
        consolidate(parts, whole)
    (parts / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(SnapshotError, match="parts is damaged: "):
        consolidate(parts, whole)
    assert whole.read_text() == "earlier"
    checkpoint.save({"w": torch.arange(6.0)}, checkpoint_id=tmp_path / "others", no_dist=True)
    with pytest.raises(SnapshotError, match=r"cannot write .*: No such file or directory"):
        consolidate(tmp_path / "others", tmp_path / "missing" / "whole.pt")
