"""The process group "poseidon" of torch.distributed.

Law: the collectives of a group run in one thread, in the order of their calls, so that a call with
`async_op=True` returns at once. Tensors of a GPU travel through the host's memory.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.distributed_c10d import init_process_group

from poseidon.errors import UsageError
from poseidon.exchange.module_hooks import leave_out_of_graphs
from poseidon.process_group.collectives import Collectives, Reduction
from poseidon.process_group.mesh import Mesh

NAME = "poseidon"
dist: Any = torch.distributed  # its stubs lack half of what is used here
_REDUCTIONS = {
    "SUM": Reduction.SUM,
    "AVG": Reduction.MEAN,
    "PRODUCT": Reduction.PRODUCT,
    "MIN": Reduction.MIN,
    "MAX": Reduction.MAX,
    "BAND": Reduction.AND,
    "BOR": Reduction.OR,
    "BXOR": Reduction.XOR,
}


class Calls:
    """The calls of a script that need all workers, in the order of the script.

    All workers make them in the same order, and after equally many steps. Other threads than the
    script's own have no such order, so their calls do not count.

    Args:
        report: called with the number of calls that have begun, and the name of the one that is
            waited for, or an empty text.
    """

    def __init__(self, report: Callable[[int, str], None] = lambda _number, _name: None) -> None:
        self._report = report
        self._begun = 0

    def begin(self) -> None:
        """Count a call."""
        self._begun += _is_main_thread()

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Report that the script waits inside the block; an empty name: for one worker only."""
        reports = bool(name) and _is_main_thread()
        if reports:
            self._report(self._begun, name)
        yield
        if reports:
            self._report(self._begun, "")


class PoseidonWork(dist.Work):  # type: ignore[misc]
    """A call that runs in the background.

    Args:
        run: does it; its error is raised in `wait`.
        result: what `result` and the future have.
        name: of a call that needs all workers.
    """

    def __init__(self, run: Callable[[], None], result: Any, calls: Calls, name: str = "") -> None:
        super().__init__()
        self._run = run
        self._result = result
        self._calls = calls
        self._name = name
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def run(self) -> None:
        """Do it. Raises nothing."""
        try:
            with torch.inference_mode():  # only there tensors that were made there may be changed
                self._run()
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            self._error = error
        self._done.set()
        if isinstance(self._error, Exception):
            self._future.set_exception(self._error)
        else:
            self._future.set_result(self._result)

    def wait(self, timeout: Any = None) -> bool:
        with self._calls.waiting(self._name):
            self._done.wait()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Any:
        return self._future


class PoseidonGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A process group whose collectives travel over a `Mesh`.

    It has the methods of torch's ProcessGroup; torch.distributed calls them.

    Args:
        script: the calls of the script, of which those of this group are part if it has all
            workers.
    """

    def __init__(self, collectives: Collectives, script: Calls | None = None) -> None:
        super().__init__(collectives.rank, collectives.size)
        self._collectives = collectives
        has_all = collectives.size == collectives.mesh.size
        self._script = script if script is not None and has_all else Calls()
        self._calls: queue.SimpleQueue[PoseidonWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._name = self._description = ""

    @property
    def mesh(self) -> Mesh:
        """The messages that all groups of this worker share."""
        return self._collectives.mesh

    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> PoseidonWork:
        reduction = _reduction(opts)
        return self._start(
            lambda flat: self._collectives.all_reduce(flat, reduction),
            tensors,
            tensors,
            "all_reduce",
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> PoseidonWork:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> PoseidonWork:
        root = opts.rootRank
        return self._start(
            lambda flat: self._collectives.broadcast(flat, root), tensors, tensors, "broadcast"
        )

    def reduce(self, tensors: list[Tensor], opts: Any) -> PoseidonWork:
        reduction, root = _reduction(opts), opts.rootRank
        return self._start(
            lambda flat: self._collectives.reduce(flat, reduction, root), tensors, tensors, "reduce"
        )

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> PoseidonWork:
        def run() -> None:
            for own, results in zip(flats, outputs, strict=True):
                _fill(results, self._collectives.all_gather(own))

        flats = [_flat(tensor) for tensor in inputs]
        return self._submit(run, outputs, "all_gather")

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> PoseidonWork:
        by_input = [list(column) for column in zip(*outputs, strict=True)]
        return self.allgather(by_input, inputs, opts)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> PoseidonWork:
        return self.all_gather_single_coalesced([output], [own], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> PoseidonWork:
        parts = [list(output.view(-1).chunk(self.size())) for output in outputs]
        return self.allgather(parts, inputs, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> PoseidonWork:
        def run() -> None:
            parts = self._collectives.gather(own, opts.rootRank)
            if parts:
                _fill(outputs[0], parts)

        own = _flat(inputs[0])
        return self._submit(run, outputs, "gather")

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> PoseidonWork:
        root = opts.rootRank
        parts = [_flat(tensor) for tensor in inputs[0]] if inputs else []
        return self._start(
            lambda flat: self._collectives.scatter(flat, parts, root), outputs, outputs, "scatter"
        )

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> PoseidonWork:
        def run() -> None:
            for output, parts in zip(outputs, flats, strict=True):
                _fill([output], [self._collectives.reduce_scatter(parts, reduction)])

        reduction = _reduction(opts)
        flats = [[_flat(tensor) for tensor in parts] for parts in inputs]
        return self._submit(run, outputs, "reduce_scatter")

    def reduce_scatter_single(
        self, output: Tensor, whole: Tensor, opts: Any = None
    ) -> PoseidonWork:
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> PoseidonWork:
        parts = [list(whole.reshape(-1).chunk(self.size())) for whole in inputs]
        return self.reduce_scatter(outputs, parts, opts)

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> PoseidonWork:
        def run() -> None:
            results = [torch.empty(t.numel(), dtype=t.dtype, device="cpu") for t in outputs]
            self._collectives.all_to_all(parts, results)
            _fill(outputs, results)

        parts = [_flat(tensor) for tensor in inputs]
        return self._submit(run, outputs, "all_to_all")

    def all_to_all_single(
        self,
        output: Tensor,
        whole: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> PoseidonWork:
        size = self.size()
        results = output.split(list(output_sizes)) if output_sizes else output.chunk(size)
        parts = whole.split(list(input_sizes)) if input_sizes else whole.chunk(size)
        return self.alltoall(list(results), list(parts), opts)

    def barrier(self, opts: Any = None) -> PoseidonWork:
        return self._submit(self._collectives.barrier, [], "barrier")

    def send(self, tensors: list[Tensor], receiver: int, tag: int) -> PoseidonWork:
        self._collectives.send(_flat(tensors[0]), receiver, tag)
        work = PoseidonWork(lambda: None, tensors, self._script)
        work.run()
        return work

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> PoseidonWork:
        flat = torch.empty(tensors[0].numel(), dtype=tensors[0].dtype, device="cpu")
        receive = self._collectives.receiving(flat, sender, tag)

        def run() -> None:
            receive()
            _fill(tensors, [flat])

        work = PoseidonWork(run, tensors, self._script)
        # a thread of its own: a later message may have to leave before this one can come
        threading.Thread(target=work.run, name="poseidon-receive", daemon=True).start()
        return work

    def shutdown(self) -> None:
        """End the thread, after the collectives that have begun. The mesh belongs to all groups."""
        self._calls.put(None)

    # the names of these collectives in earlier versions of torch
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start(
        self, collective: Callable[[Tensor], None], tensors: list[Tensor], result: Any, name: str
    ) -> PoseidonWork:
        """Start a collective in place on each of these tensors."""

        def run() -> None:
            for tensor, flat in zip(tensors, flats, strict=True):
                collective(flat)
                if flat.data_ptr() != tensor.data_ptr():
                    _fill([tensor], [flat])

        flats = [_flat(tensor) for tensor in tensors]
        return self._submit(run, result, name)

    def _submit(self, run: Callable[[], None], result: Any, name: str) -> PoseidonWork:
        self._script.begin()
        work = PoseidonWork(run, result, self._script, name)
        if threading.current_thread() is self._thread:
            # a callback of the collective that has just ended, which may wait for this one
            work.run()
            return work
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="poseidon-collectives", daemon=True
            )
            self._thread.start()
        self._calls.put(work)
        return work

    def _serve(self) -> None:
        while (work := self._calls.get()) is not None:
            work.run()


# torch calls them within the forward pass of a compiled DistributedDataParallel
for _method in (*vars(PoseidonWork).values(), *vars(PoseidonGroup).values()):
    if isinstance(_method, FunctionType):
        leave_out_of_graphs(_method, "a collective of the process group 'poseidon'")


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _flat(tensor: Tensor) -> Tensor:
    """Return the tensor's elements in the host's memory: a view where they are there, in order."""
    return tensor.detach().cpu().contiguous().reshape(-1)


def _fill(tensors: Sequence[Tensor], flats: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for tensor, flat in zip(tensors, flats, strict=True):
            tensor.detach().copy_(flat.view(tensor.shape))
        if tensors and tensors[0].is_cuda:
            torch.cuda.current_stream(tensors[0].device).synchronize()


def _reduction(options: Any) -> Reduction:
    operation = options.reduceOp if options is not None else dist.ReduceOp.SUM
    for name, reduction in _REDUCTIONS.items():
        if operation == getattr(dist.ReduceOp, name):
            return reduction
    raise UsageError(
        f"the process group '{NAME}' does not know the reduction {operation}; expected one of "
        f"{', '.join(_REDUCTIONS)}"
    )


def register(mesh: Mesh, script: Calls | None = None) -> None:
    """Make the backend "poseidon" known to torch.distributed, with the messages of a job.

    Args:
        script: notes the calls of groups of all workers.
    """

    generation = itertools.count()
    """Of default groups: a script may destroy one and make the next, whose groups have the same
    names.
    """
    current = 0

    def create(options: Any, _: Any = None) -> PoseidonGroup:
        nonlocal current
        ranks = list(options.global_ranks_in_group)
        if not ranks:
            current = next(generation)
            ranks = list(range(mesh.size))
        return PoseidonGroup(Collectives(mesh, f"{current}.{options.group_id}", ranks), script)

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])


def initialize(mesh: Mesh, **arguments: Any) -> None:
    """Make a group of all workers torch.distributed's default group.

    Args:
        arguments: of `init_process_group`, besides its backend, store, rank and size.
    """
    init_process_group(
        NAME, store=dist.HashStore(), rank=mesh.rank, world_size=mesh.size, **arguments
    )
