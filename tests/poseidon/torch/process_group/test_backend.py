"""The methods of the process group as torch.distributed calls them, on workers in threads.

`tests/distributed/test_ddp_scripts.py` calls torch.distributed itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from poseidon.errors import UsageError
from poseidon.torch.process_group import backend
from poseidon.torch.process_group.backend import PoseidonGroup
from poseidon.torch.process_group.collectives import Collectives
from poseidon.torch.process_group.functions import groups_of_job
from poseidon.torch.process_group.mesh import CollectiveCall, DifferentCalls, Mesh
from poseidon.torch.process_group.work import Calls, PoseidonWork
from ps_server import StalenessTimeout
from tests.poseidon.torch.process_group.test_collectives import meshes, on_all
from tests.support.simulated_device import TYPE, SimulatedDevice, SimulatedEvent, simulated_devices

SIZE = 3


def reduction(operation: object) -> object:
    options = dist.AllreduceOptions()
    options.reduceOp = operation  # type: ignore[assignment]
    return options


def broadcast_from(root: int) -> object:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options


def gather_to(root: int) -> object:
    options = dist.GatherOptions()
    options.rootRank = root
    return options


def scatter_from(root: int) -> object:
    options = dist.ScatterOptions()
    options.rootRank = root
    return options


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


def test_the_short_forms_of_its_methods() -> None:
    def run(mesh: Mesh) -> list[Tensor]:
        def own() -> Tensor:
            return torch.arange(SIZE) + 10 * mesh.rank

        results = [own() for _ in range(6)]
        most, sums, first, least, part, total = results
        gathered, sent = ([torch.zeros(SIZE).long() for _ in range(SIZE)] for _ in range(2))
        is_root = mesh.rank == 1
        with group_of(mesh) as group:
            group.allreduce(most, dist.ReduceOp.MAX).wait()
            group.allreduce([sums], op=dist.ReduceOp.SUM, timeout=timedelta(seconds=60)).wait()
            group.broadcast(first, 1).wait()
            group.reduce(least, root=1, op=dist.ReduceOp.MIN).wait()
            group.allgather(gathered, own()).wait()
            group.gather(sent if is_root else [], own(), 1).wait()
            group.scatter(part, gathered if is_root else [], 1).wait()
            group.reduce_scatter(total, [own() for _ in range(SIZE)]).wait()
            group.barrier(timeout=timedelta(seconds=60)).wait()
        return [most, sums, first, *([least, *sent] if is_root else []), part, total, *gathered]

    with meshes(SIZE) as made:
        found = on_all(made, run)
    row = torch.arange(SIZE)
    all_rows = [row, row + 10, row + 20]
    for rank, results in enumerate(found):
        of_root = [row, *all_rows] if rank == 1 else []
        after = [all_rows[rank], 3 * row + 30, *all_rows]
        expected = [row + 20, 3 * row + 30, row + 10, *of_root, *after]
        torch.testing.assert_close(results, expected)


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


def test_calls_of_a_group_that_was_shut_down_are_made_as_under_gloo() -> None:
    """They do not wait for ever; `torch.distributed.nn.functional` may have kept the group."""

    def run(mesh: Mesh) -> None:
        with group_of(mesh) as group:
            tensors = [torch.full((4,), float(mesh.rank + step)) for step in range(3)]
            for tensor in tensors:
                work = group.allreduce([tensor])
                group.shutdown()
            work.wait()
            assert [tensor[0].item() for tensor in tensors] == [3.0, 6.0, 9.0]

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
    reported: list[tuple[object, ...]] = []

    def note(*call: object) -> int:
        reported.append(call)
        return 10 + len(reported)

    calls = Calls(note)

    with meshes(1) as (mesh,):
        group = PoseidonGroup(Collectives(mesh, "0", [0]), calls)
        group.barrier()
        group.allreduce([torch.zeros(2)]).wait()
        on_all([group], lambda group: group.barrier().wait())  # of another thread
        group.shutdown()
    # the first one, too, for which another worker may wait
    assert reported == [(1, ""), (2, ""), (2, "all_reduce", 12), (2, "")]


def test_an_error_of_the_background_is_raised_where_the_result_is_wanted() -> None:
    def run(mesh: Mesh) -> None:
        with group_of(mesh) as group:
            call = group.barrier if mesh.rank else lambda: group.allreduce([torch.zeros(2)])
            work = call()
            with pytest.raises(UsageError, match="all workers must make the same calls"):
                work.wait()
            assert isinstance(work.exception(), UsageError)

    with meshes(2) as made:
        on_all(made, run)


def test_a_failed_collective_ends_all_calls_on_all_workers() -> None:
    failures: list[Exception] = []

    def run(mesh: Mesh) -> str:
        with group_of(mesh) as group:
            # worker 1 is the only one that receives another call than its own
            barrier = None if mesh.rank == 1 else group.barrier()
            work = barrier or group.broadcast([torch.ones(1)], broadcast_from(0))
            with pytest.raises(DifferentCalls) as first:
                work.wait()
            with pytest.raises(DifferentCalls) as later:
                group.allreduce([torch.zeros(2)]).wait()
            with pytest.raises(DifferentCalls):
                group.send([torch.zeros(2)], (mesh.rank + 1) % SIZE, 0)
            assert str(first.value) == str(later.value)
            return str(first.value)

    with meshes(SIZE, on_failure=failures.append, place=lambda rank: f"train.py, line {rank}") as m:
        found = on_all(m, run)
    assert (
        found
        == [
            "worker 1 calls broadcast(1 x float32, from 0) (train.py, line 1), but worker 0 barrier() "
            "(train.py, line 0); all workers must make the same calls in the same order"
        ]
        * SIZE
    )
    assert [str(failure) for failure in failures] == found[:1]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda group: group.allreduce([torch.ones(2)], reduction(dist.ReduceOp.BXOR)),
        lambda group: group.allgather([[torch.ones(2)] * 2], [torch.ones(2)]),
        lambda group: group.allgather([[torch.ones(2)] * 3], [torch.ones(3)]),
        lambda group: group.allgather([[torch.ones(2).int()] * 3], [torch.ones(2)]),
        lambda group: group.all_gather_single(torch.ones(7), torch.ones(2)),
        lambda group: group.gather([[torch.ones(3)] * 3], [torch.ones(2)], gather_to(0)),
        lambda group: group.scatter([torch.ones(2)], [[torch.ones(1)] * 3], scatter_from(0)),
        lambda group: group.reduce_scatter([torch.ones(2)], [[torch.ones(1)] * 3]),
        lambda group: group.reduce_scatter_single(torch.ones(2), torch.ones(7)),
        lambda group: group.alltoall([torch.ones(2)] * 2, [torch.ones(2)] * 3),
        lambda group: group.all_to_all_single(torch.ones(4), torch.ones(4), [], []),
        lambda group: group.broadcast([torch.ones(2)], broadcast_from(3)),
        lambda group: group.broadcast([torch.ones(1).expand(2)], broadcast_from(0)),
        lambda group: group.allreduce(torch.ones(2, dtype=torch.complex64), dist.ReduceOp.MAX),
        lambda group: group.gather([], [torch.ones(2)], gather_to(-1)),
        lambda group: group.scatter([torch.ones(2)], [], scatter_from(-1)),
        lambda group: group.send([torch.ones(2)], 3, 0),
        lambda group: group.recv([torch.ones(2)], -1, 0),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(
    wrong: Callable[[PoseidonGroup], object],
) -> None:
    def run(mesh: Mesh) -> None:
        with group_of(mesh) as group:
            if mesh.rank == 1:
                with pytest.raises(RuntimeError):
                    wrong(group)
            group.barrier().wait()

    with meshes(SIZE) as made:
        on_all(made, run)


def test_receives_without_a_source_take_messages_in_their_order() -> None:
    def run(mesh: Mesh) -> None:
        with group_of(mesh) as group:
            if mesh.rank:
                for number in range(2):
                    group.send([torch.full((2,), float(10 * mesh.rank + number))], 0, 5)
                group.barrier().wait()
                return
            tensors = [torch.zeros(2) for _ in range(4)]
            works = [group.recv([tensors[0]], 2, 5)]
            works += [group.recv_anysource([tensor], 5) for tensor in tensors[1:]]
            for work in reversed(works):
                work.wait()
            sources = [work._source_rank() for work in works]
            assert sorted(sources) == [1, 1, 2, 2] and sources[0] == 2
            for rank in (1, 2):
                got = [
                    float(t[0])
                    for t, source in zip(tensors, sources, strict=True)
                    if source == rank
                ]
                assert got == [10.0 * rank, 10.0 * rank + 1]
            group.barrier().wait()

    with meshes(SIZE) as made:
        on_all(made, run)


def test_a_group_has_a_limit_of_time_and_so_has_a_wait() -> None:
    def run(mesh: Mesh) -> None:
        group = PoseidonGroup(Collectives(mesh, "0", range(2), 0.2))
        if mesh.rank == 0:
            work = group.barrier()
            with pytest.raises(StalenessTimeout, match=r"barrier was not done within 0\.01 s"):
                work.wait(timedelta(seconds=0.01))
            with pytest.raises(StalenessTimeout, match=r"worker 1 did not take part within 0\.2 s"):
                work.wait()
        else:  # it does not wait for its own limit: the other worker tells it
            mesh.send([0], CollectiveCall("x", 1, ""), 0, b"")
            slow = PoseidonGroup(Collectives(mesh, "1", range(2)))
            with pytest.raises(DifferentCalls, match=r"worker 1 did not take part within 0\.2 s"):
                slow.barrier().wait()
            slow.shutdown()
        group.shutdown()

    with meshes(2) as made:
        on_all(made, run)


def test_an_unknown_reduction_is_refused() -> None:
    def run(mesh: Mesh) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist._make_nccl_premul_sum(2.0)
        with (
            group_of(mesh) as group,
            pytest.raises(
                RuntimeError, match=r"does not know the reduction .*; expected one of SUM"
            ),
        ):
            group.allreduce([torch.zeros(2)], options)

    with meshes(1) as made:
        on_all(made, run)


@pytest.mark.parametrize("operation", [dist.ReduceOp.SUM, dist.ReduceOp.AVG])
@pytest.mark.parametrize("counts", [(0, 0, 0), (0, 1, 3), (2, 2, 2)])
def test_sparse_tensors_are_reduced_as_rows(operation: object, counts: tuple[int, ...]) -> None:
    def of_worker(rank: int) -> torch.Tensor:
        rows = [torch.tensor([rank + 2 * k, 5]) for k in range(counts[rank])]
        indices = torch.stack(rows).view(1, -1) if rows else torch.zeros(1, 0, dtype=torch.int64)
        values = torch.ones(indices.shape[1], 2) + rank
        return torch.sparse_coo_tensor(indices, values, (9, 2), check_invariants=True)

    expected = sum(of_worker(rank).to_dense() for rank in range(SIZE))
    if operation is dist.ReduceOp.AVG:
        expected = expected / SIZE

    def run(mesh: Mesh) -> None:
        with group_of(mesh) as group:
            tensor = of_worker(mesh.rank)
            assert group.allreduce([tensor], reduction(operation)).get_future().wait()[0] is tensor
            assert torch.equal(tensor.to_dense(), expected)
            rows = tensor.coalesce()  # as clipping and SparseAdam do
            assert torch.equal(rows.values(), expected[rows.indices()[0]])
            with torch.inference_mode():
                inferred = of_worker(mesh.rank)
                group.allreduce([inferred], reduction(operation)).wait()
                assert torch.equal(inferred.to_dense(), expected)

    with meshes(SIZE) as made:
        on_all(made, run)


@pytest.mark.parametrize("seed", [0, 5])
def test_calls_with_tensors_of_a_gpu_return_before_the_gpu_is_done(seed: int) -> None:
    """Threads wait for it, and no result meets work that is still under way."""

    def run(mesh: Mesh) -> None:
        device = devices[mesh.rank]
        with group_of(mesh) as group:
            own = torch.full((4, 3), float(mesh.rank + 1), device=device.torch)
            outputs = [torch.zeros(3, 4, device=device.torch).T for _ in range(SIZE)]
            single, received = (
                torch.ones(5, device=device.torch),
                torch.ones(5, device=device.torch),
            )
            gathered = [[torch.zeros_like(single) for _ in range(SIZE)]] * (mesh.rank == 1)
            own.mul_(2.0)
            received.mul_(7.0)
            device.waits.clear()
            works = [
                group.allgather([outputs], [own]),
                group.allreduce([own]),
                group.recv([received], (mesh.rank - 1) % SIZE, 0),
            ]
            assert not device.waits
            sent = group.send([single * mesh.rank], (mesh.rank + 1) % SIZE, 0)
            for work in (*works, sent):
                work.wait()
            assert own.cpu().tolist() == [[12.0] * 3] * 4
            assert [float(output.cpu()[3, 2]) for output in outputs] == [2.0, 4.0, 6.0]
            assert received.cpu().tolist() == [float((mesh.rank - 1) % SIZE)] * 5
            group.gather(gathered, [single * (mesh.rank + 3)], gather_to(1)).wait()
            for results in gathered:
                assert [result.cpu()[4].item() for result in results] == [3.0, 4.0, 5.0]

    with simulated_devices(SIZE, seed) as devices, meshes(SIZE) as made:
        on_all(made, run)


LARGE = 12_000
"""Elements of a part that is larger than what passes through the host's memory."""


def all_calls(group: PoseidonGroup, device: torch.device) -> list[Tensor]:
    """Make each call with large tensors; return what it leaves, in the host's memory."""
    rank, size = group.rank(), group.size()
    numbers = torch.Generator().manual_seed(rank)
    given = [torch.randn(LARGE, generator=numbers) for _ in range(size)]

    def parts(dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [part.clone().to(dtype).to(device) for part in given]

    def empty() -> list[Tensor]:
        return [torch.zeros(LARGE, device=device) for _ in range(size)]

    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for operation in (dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            for own in (torch.cat(parts(dtype)), torch.cat(parts(dtype)).view(size, -1).t()):
                group.allreduce([own], reduction(operation)).wait()
                found.append(own)
    own, gathered, scattered, exchanged = parts(), empty(), empty()[0], empty()
    sent = parts()[0]
    works = [
        group.broadcast([sent], broadcast_from(1)),
        group.allgather([gathered], [own[1]]),
        group.reduce_scatter([scattered], [own], reduction(dist.ReduceOp.SUM)),
        group.alltoall(exchanged, own),
    ]
    for work in works:
        work.wait()
    found += [sent, *gathered, scattered, *exchanged]
    received, after = empty()[:2], parts()
    works = [
        group.recv([received[0]], (rank - 1) % size, 0),
        group.send([after[0] + 1.0], (rank + 1) % size, 0),
        group.send([after[1] + 2.0], (rank + 1) % size, 0),
        group.recv([received[1]], (rank - 1) % size, 0),
    ]
    for work in works:
        work.wait()
    return [tensor.cpu().clone() for tensor in [*found, *received]]


@pytest.mark.parametrize("hosts", [((0, 1, 2),), ((0, 1), (2,))], ids=["one host", "two hosts"])
@pytest.mark.parametrize("seed", [0, 5])
def test_large_tensors_pass_between_the_gpus_of_a_host_with_the_bits_of_cpus(
    hosts: Sequence[Sequence[int]], seed: int
) -> None:
    def run(mesh: Mesh, devices: Sequence[SimulatedDevice] = ()) -> list[list[Tensor]]:
        device = torch.device(TYPE, mesh.rank) if devices else torch.device("cpu")
        with group_of(mesh) as group:
            found = []
            for _ in range(3):  # patterns are read in the first
                for one in devices[mesh.rank : mesh.rank + 1]:
                    one.copies.clear()
                found.append(all_calls(group, device))
            mesh.end()
            mesh.flush()
            return found

    with meshes(SIZE, hosts=hosts) as made:
        on_cpus = on_all(made, run)
    with simulated_devices(SIZE, seed) as devices, meshes(SIZE, hosts=hosts) as made:
        on_gpus = on_all(made, lambda mesh: run(mesh, devices))
        for rank, device in enumerate(devices):
            near = len(next(host for host in hosts if rank in host)) - 1
            assert (device.copies["peer"] > 0) is (near > 0)
    for one, other in zip(on_cpus, on_gpus, strict=True):
        for before, after in zip(one, other, strict=True):
            assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)].count(False) == 0


def test_memory_for_a_received_tensor_is_written_to_after_earlier_work() -> None:
    """torch's allocator gives the stream what it has freed before its work has run."""

    def run(mesh: Mesh) -> None:
        device = devices[mesh.rank]
        with group_of(mesh) as group:
            group.barrier().wait()  # all connect
            tensor = torch.full((LARGE,), float(mesh.rank), device=device.torch)
            if mesh.rank == 1:
                group.send([tensor], 0, 0).wait()
            elif mesh.rank == 0:
                group.recv([tensor], 1, 0).wait()
                assert float(tensor.cpu()[LARGE - 1]) == 1.0
            mesh.end()
            mesh.flush()

    with simulated_devices(SIZE, 5) as devices, meshes(SIZE, hosts=[range(SIZE)]) as made:
        on_all(made, run)


def test_a_script_does_not_wait_for_the_copy_of_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the group does, and the stream."""
    ended, synchronize = threading.Event(), SimulatedEvent.synchronize

    def later(self: SimulatedEvent) -> None:
        if threading.current_thread().name == "poseidon-collectives" and results_come.is_set():
            assert ended.wait(20)
        synchronize(self)

    def run(mesh: Mesh) -> None:
        device = devices[mesh.rank]
        own = torch.full((3,), float(mesh.rank), device=device.torch)
        with group_of(mesh) as group:
            group.allreduce([own]).wait()
            total = own * 2.0
            all_wait.wait()
            assert not device.waits
            ended.set()
            assert total.cpu().tolist() == [float(SIZE * (SIZE - 1))] * 3

    results_come, all_wait = threading.Event(), threading.Barrier(SIZE)
    fill = backend.fill

    def noted(tensors: Any, flats: Any) -> Any:
        results_come.set()
        return fill(tensors, flats)

    monkeypatch.setattr(SimulatedEvent, "synchronize", later)
    monkeypatch.setattr(backend, "fill", noted)
    with simulated_devices(SIZE, 5) as devices, meshes(SIZE) as made:
        on_all(made, run)


def test_join_of_several_modules_is_refused() -> None:
    modules = [object.__new__(DistributedDataParallel) for _ in range(2)]
    with (
        groups_of_job(),
        pytest.raises(UsageError, match=r"^Join of several Distributed.*one module"),
    ):
        Join(modules)


@pytest.mark.parametrize("asks_first", [True, False])
def test_a_call_that_was_waited_for_has_its_result(
    asks_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's DDP reads the value of the future without a further wait."""
    work = PoseidonWork(lambda _: None, 3, lambda error: None)
    note_done, late = work._done.set, threading.Event()

    def set_late() -> None:
        late.wait()
        note_done()

    monkeypatch.setattr(work._done, "set", set_late)
    future = work.get_future() if asks_first else None
    thread, release = threading.Thread(target=work.run), threading.Thread(target=late.set)
    thread.start()
    work._begun.wait()
    release.start()
    work.wait()
    future = future or work.get_future()
    assert future.done()
    assert future.value() == 3
    thread.join()
    release.join()
