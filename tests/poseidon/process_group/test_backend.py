"""The methods of the process group as torch.distributed calls them, on workers in threads.

`tests/distributed/test_ddp_scripts.py` calls torch.distributed itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from poseidon.errors import UsageError
from poseidon.process_group.backend import Calls, PoseidonGroup
from poseidon.process_group.collectives import Collectives
from poseidon.process_group.mesh import Mesh
from tests.poseidon.process_group.test_collectives import meshes, on_all

SIZE = 3


@contextmanager
def group_of(mesh: Mesh) -> Iterator[PoseidonGroup]:
    group = PoseidonGroup(Collectives(mesh, "0", range(mesh.size)))
    yield group
    group.shutdown()


def test_tensors_that_are_not_in_order_in_memory_get_their_results() -> None:
    def run(mesh: Mesh) -> None:
        with group_of(mesh) as group:
            whole = torch.arange(12.0).view(3, 4)
            turned = (whole * (mesh.rank + 1)).T
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.SUM
            assert group.allreduce([turned], options).wait()
            assert torch.equal(turned, (whole * 6).T)
            outputs = [torch.zeros(4, 3).T for _ in range(SIZE)]
            group.allgather([outputs], [whole + mesh.rank]).wait()
            assert all(torch.equal(got, whole + rank) for rank, got in enumerate(outputs))

    with meshes(SIZE) as made:
        on_all(made, run)


def test_tensors_of_inference_mode_get_their_results() -> None:
    """Only inside of that mode they may be changed, and each thread has its own."""

    def run(mesh: Mesh) -> None:
        with group_of(mesh) as group, torch.inference_mode():
            sender, receiver = (mesh.rank - 1) % SIZE, (mesh.rank + 1) % SIZE
            own, outputs = torch.ones(9, 2) + mesh.rank, [torch.zeros(9, 2) for _ in range(SIZE)]
            group.allgather([outputs], [own]).wait()
            assert [int(output[0, 0]) for output in outputs] == [1, 2, 3]
            group.allreduce([own]).wait()
            assert own.tolist() == [[6, 6]] * 9
            sent = group.send([own + mesh.rank], receiver, 0)
            group.recv([own], sender, 0).wait()
            sent.wait()
            assert own.tolist() == [[6 + sender] * 2] * 9
        weight = torch.ones(2, requires_grad=True)
        seen = weight * 2
        product = seen * seen
        with group_of(mesh) as group, torch.inference_mode():
            group.allreduce([seen]).wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()

    with meshes(SIZE) as made:
        on_all(made, run)


def test_calls_return_before_they_are_done_and_run_in_their_order() -> None:
    def run(mesh: Mesh) -> None:
        with group_of(mesh) as group:
            tensors = [torch.full((4,), float(mesh.rank + step)) for step in range(5)]
            works = [group.allreduce([tensor]) for tensor in tensors]
            for step, (tensor, work) in reversed(list(enumerate(zip(tensors, works, strict=True)))):
                assert work.get_future().wait()[0] is tensor
                assert work.is_completed() and work.is_success()
                assert tensor.tolist() == [3.0 + 3 * step] * 4

    with meshes(SIZE) as made:
        on_all(made, run)


def test_a_callback_of_a_collective_may_wait_for_its_own() -> None:
    """As torch's hook of PowerSGD does: its own comes before those that the script calls next."""
    callbacks_are_set = threading.Event()

    def run(mesh: Mesh) -> None:
        with group_of(mesh) as group:
            if mesh.rank:
                assert callbacks_are_set.wait(20)
            tensors = [torch.full((4,), float(mesh.rank)) for _ in range(3)]
            first = group.allreduce([tensors[0]]).get_future()
            nested = first.then(lambda _: group.allreduce([tensors[1]]).get_future().wait())
            last = group.allreduce([tensors[2]])
            callbacks_are_set.set()
            last.wait()
            assert nested.wait()[0] is tensors[1]
            assert all(tensor.tolist() == [1.0] * 4 for tensor in tensors)

    with meshes(2) as made:
        on_all(made, run)


def test_waits_of_the_script_for_all_workers_are_reported() -> None:
    reported: list[tuple[int, str]] = []
    calls = Calls(lambda begun, name: reported.append((begun, name)))

    with meshes(1) as (mesh,):
        group = PoseidonGroup(Collectives(mesh, "0", [0]), calls)
        group.barrier()
        group.allreduce([torch.zeros(2)]).wait()
        on_all([group], lambda group: group.barrier().wait())  # of another thread
        group.shutdown()
    assert reported == [(2, "all_reduce"), (2, "")]


def test_an_error_of_the_background_is_raised_where_the_result_is_wanted() -> None:
    def run(mesh: Mesh) -> None:
        with group_of(mesh) as group:
            call = group.barrier if mesh.rank else lambda: group.allreduce([torch.zeros(2)])
            work = call()
            with pytest.raises(UsageError, match="expected the same calls in the same order"):
                work.wait()
            assert isinstance(work.exception(), UsageError)

    with meshes(2) as made:
        on_all(made, run)


def test_an_unknown_reduction_is_refused() -> None:
    def run(mesh: Mesh) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist._make_nccl_premul_sum(2.0)
        with (
            group_of(mesh) as group,
            pytest.raises(UsageError, match=r"does not know the reduction .*; expected one of SUM"),
        ):
            group.allreduce([torch.zeros(2)], options)

    with meshes(1) as made:
        on_all(made, run)
