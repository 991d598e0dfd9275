"""The process group "poseidon" of torch.distributed.

Laws:

* The collectives of a group run in one thread, in the order of their calls, so that a call with
  `async_op=True` returns at once.
* Large tensors of a GPU stay there where a worker of this host is in the group (`lent_blocks.py`).
  Others travel through the host's memory: a call begins to copy them on the current stream. Its
  thread waits for the GPU's work so far, and all that it does on the GPU is on a stream of its own.
  Until `wait` returns, the script leaves the tensors alone. `wait` returns once this work has
  begun: the current stream waits for it. A future has its result once it has ended.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.distributed_c10d import init_process_group
from torch.utils._pytree import tree_leaves

from poseidon.errors import UsageError, counted
from poseidon.exchange.device import HOST, Device, Event, device_of
from poseidon.exchange.module_hooks import leave_out_of_graphs
from poseidon.torch.process_group.collectives import (
    SMALL_BYTES,
    Collectives,
    ReduceRule,
    described,
)
from poseidon.torch.process_group.mesh import Mesh
from ps_server import StalenessTimeout

NAME = "poseidon"
dist: Any = torch.distributed  # its stubs lack half of what is used here
_REDUCTIONS = {
    "SUM": ReduceRule.SUM,
    "AVG": ReduceRule.MEAN,
    "PRODUCT": ReduceRule.PRODUCT,
    "MIN": ReduceRule.MIN,
    "MAX": ReduceRule.MAX,
    "BAND": ReduceRule.AND,
    "BOR": ReduceRule.OR,
    "BXOR": ReduceRule.XOR,
}


class Calls:
    """The calls of a script that need all workers, in the order of the script.

    All workers make them in the same order, and after equally many steps. Other threads than the
    script's own have no such order, so their calls do not count.

    Args:
        report: called with the number of calls that have begun, and the name of the one that is
            waited for, or an empty text.
    """

    def __init__(self, report: Callable[..., int] = lambda *_: 0) -> None:
        self._report = report
        self._begun = 0

    def begin(self) -> int | None:
        """Count a call, which the script of one worker may wait for, and another's not. Return its
        number among those that `report` counts.
        """
        if not _is_main_thread():
            return None
        self._begun += 1
        return self._report(self._begun, "")

    @contextmanager
    def waiting(self, name: str, number: int | None) -> Iterator[None]:
        """Report that the script waits inside the block for a call, which `begin` has given a
        number; an empty name: for one worker only.
        """
        reports = bool(name) and _is_main_thread()
        if reports:
            self._report(self._begun, name, number)
        yield
        if reports:
            self._report(self._begun, "")


class _Copy(NamedTuple):
    """Results that are on their way to a device, or are computed there.

    Attributes:
        event: after which they are there.
        flats: what they are made of, which is kept until then.
    """

    device: Device
    event: Event
    flats: Sequence[Tensor]


class PoseidonWork(dist.Work):  # type: ignore[misc]
    """A call that runs in the background.

    Args:
        run: does it, and notes the copies that it has begun; its error is raised in `wait`. A
            receive returns the sender's rank.
        result: what `result` and the future have.
        fail: is given the error of `run`, before anything waits for the call any more.
        name: of a call that needs all workers.
        number: of `Calls.begin`.
    """

    def __init__(
        self,
        run: Callable[[list[_Copy]], int | None],
        result: Any,
        calls: Calls,
        fail: Callable[[Exception], None],
        name: str = "",
        number: int | None = None,
    ) -> None:
        super().__init__()
        self._run = run
        self._fail = fail
        self._sender: int | None = None
        self._result = result
        self._calls = calls
        self._name, self._number = name, number
        self._error: BaseException | None = None
        self._copies: list[_Copy] = []
        self._begun = threading.Event()
        """Only copies are left to do."""
        self._done = threading.Event()
        self._has_callbacks = self._is_waited_for = False
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def run(self) -> None:
        """Do it. Raises nothing."""
        try:
            with torch.inference_mode():  # only there tensors that were made there may be changed
                self._sender = self._run(self._copies)
            self._begun.set()
            for copy in self._copies:
                copy.event.synchronize()
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            self._error = error
            if isinstance(error, Exception):
                self._fail(error)
        self._begun.set()
        self._done.set()
        if isinstance(self._error, Exception):
            self._future.set_exception(self._error)
        else:
            self._future.set_result(self._result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is done, but for copies for which the current stream waits.

        Args:
            timeout: the longest wait; None or 0: the group's.

        Raises:
            StalenessTimeout: it is not done in time. It continues.
        """
        limit_s = timeout.total_seconds() if timeout else threading.TIMEOUT_MAX
        with self._calls.waiting(self._name, self._number):
            has_begun = self._begun.wait(min(limit_s, threading.TIMEOUT_MAX))
        if not has_begun:
            raise StalenessTimeout(f"{self._name or 'a message'} was not done within {limit_s:g} s")
        if self._error is not None:
            raise self._error
        for copy in self._copies:
            copy.device.wait(copy.event)
        self._is_waited_for = True
        if self._has_callbacks or not self._copies:
            self._future.wait()  # a callback may wait for the call before
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

    def _source_rank(self) -> int:
        assert self._sender is not None
        return self._sender

    def get_future(self) -> Any:
        self._has_callbacks = True
        if self._is_waited_for:  # torch reads its value then
            self._future.wait()
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
        self._ending: threading.Thread | None = None
        self._name = self._description = ""
        self._left: list[ReduceRule] | None = None
        self._streams: dict[torch.device, Any] = {}

    @property
    def mesh(self) -> Mesh:
        """The messages that all groups of this worker share."""
        return self._collectives.mesh

    def getBackendName(self) -> str:
        return NAME

    @property
    def _device_types(self) -> list[torch.device]:
        """Torch asks for them where a call needs the CPU."""
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> PoseidonGroup:
        return self

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> PoseidonWork:
        reduction = _reduction(opts, tensors)
        if self._left is not None:
            self._left.append(reduction)
            return self._done(tensors)
        if any(tensor.is_sparse for tensor in tensors):
            return self._all_reduce_rows(tensors, reduction)
        return self._start(
            lambda flat: self._collectives.all_reduce(flat, reduction),
            tensors,
            tensors,
            "all_reduce",
        )

    @contextmanager
    def leaving_sums(self) -> Iterator[list[ReduceRule]]:
        """Let all-reduces inside the block leave their tensors as they are, for an exchange. Yield
        what they would have done.
        """
        left: list[ReduceRule] = []
        self._left = left
        try:
            yield left
        finally:
            self._left = None

    def _all_reduce_rows(self, tensors: list[Tensor], reduction: ReduceRule) -> PoseidonWork:
        """As gloo: the sum of sparse tensors has the elements of all workers."""
        if reduction not in (ReduceRule.SUM, ReduceRule.MEAN):
            raise UsageError(
                f"all_reduce of sparse tensors knows SUM and AVG, not {reduction.name}"
            )

        def run(_: list[_Copy]) -> None:
            for tensor in tensors:
                # what a sparse tensor copies may be changed only where it was made
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    rows = self._collectives.all_reduce_rows(tensor.detach().cpu(), reduction)
                    tensor.copy_(rows)  # a view of a sparse tensor has its own elements

        return self._submit(run, tensors, "all_reduce")

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> PoseidonWork:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> PoseidonWork:
        root = opts.rootRank
        return self._start(
            lambda flat: self._collectives.broadcast(flat, root), tensors, tensors, "broadcast"
        )

    def reduce(self, tensors: list[Tensor], opts: Any) -> PoseidonWork:
        reduction, root = _reduction(opts, tensors), opts.rootRank
        return self._start(
            lambda flat: self._collectives.reduce(flat, reduction, root), tensors, tensors, "reduce"
        )

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> PoseidonWork:
        def run(copies: list[_Copy]) -> None:
            for own, results in zip(flats, outputs, strict=True):
                copies += _fill(results, self._collectives.all_gather(own))

        for own, results in zip(inputs, outputs, strict=True):
            self._check_one_each(results)
            _check_alike("all_gather", own, results)
        flats = [self._flat(tensor) for tensor in inputs]
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
        parts = [self._parts(output.view(-1)) for output in outputs]
        return self.allgather(parts, inputs, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> PoseidonWork:
        def run(copies: list[_Copy]) -> None:
            parts = self._collectives.gather(own, opts.rootRank)
            if parts:
                copies += _fill(outputs[0], parts)

        if outputs:
            self._check_one_each(outputs[0])
            _check_alike("gather", inputs[0], outputs[0])
        own = self._flat(inputs[0])
        return self._submit(run, outputs, "gather", after=inputs)  # others have no outputs

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> PoseidonWork:
        root = opts.rootRank
        if inputs:
            self._check_one_each(inputs[0])
            _check_alike("scatter", outputs[0], inputs[0])
        parts = [self._flat(tensor) for tensor in inputs[0]] if inputs else []
        return self._start(
            lambda flat: self._collectives.scatter(flat, parts, root), outputs, outputs, "scatter"
        )

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> PoseidonWork:
        def run(copies: list[_Copy]) -> None:
            for output, parts in zip(outputs, flats, strict=True):
                copies += _fill([output], [self._collectives.reduce_scatter(parts, reduction)])

        reduction = _reduction(opts, outputs)
        for output, parts in zip(outputs, inputs, strict=True):
            self._check_one_each(parts)
            _check_alike("reduce_scatter", output, [parts[self.rank()]])
        flats = [[self._flat(tensor) for tensor in parts] for parts in inputs]
        return self._submit(run, outputs, "reduce_scatter")

    def reduce_scatter_single(
        self, output: Tensor, whole: Tensor, opts: Any = None
    ) -> PoseidonWork:
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> PoseidonWork:
        parts = [self._parts(whole.reshape(-1)) for whole in inputs]
        return self.reduce_scatter(outputs, parts, opts)

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> PoseidonWork:
        def run(copies: list[_Copy]) -> None:
            results = [self._room(output) for output in outputs]
            self._collectives.all_to_all(parts, results)
            copies += _fill(outputs, results)

        self._check_one_each(inputs)
        self._check_one_each(outputs)
        _check_alike("all_to_all", inputs[self.rank()], [outputs[self.rank()]])
        parts = [self._flat(tensor) for tensor in inputs]
        return self._submit(run, outputs, "all_to_all")

    def all_to_all_single(
        self,
        output: Tensor,
        whole: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> PoseidonWork:
        results = output.split(list(output_sizes)) if output_sizes else self._parts(output)
        parts = whole.split(list(input_sizes)) if input_sizes else self._parts(whole)
        return self.alltoall(list(results), list(parts), opts)

    def barrier(self, opts: Any = None) -> PoseidonWork:
        return self._submit(lambda _: self._collectives.barrier(), [], "barrier")

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all workers; if one does not come, the error names it.

        Args:
            timeout: the longest wait; None: the group's.
            wait_all_ranks: has no effect: the error names the first worker that is missing.
        """
        limit_s = timeout.total_seconds() if timeout else None
        self._submit(lambda _: self._collectives.barrier(limit_s), [], "monitored_barrier").wait()

    def send(self, tensors: list[Tensor], receiver: int, tag: int) -> PoseidonWork:
        own, ready, device = self._flat(tensors[0]), _event_of(tensors), _device_of(tensors)
        send = self._collectives.sending(own, receiver, tag)
        if device.is_host:
            send()
            return self._done(tensors)

        def run(_: list[_Copy]) -> None:
            ready.synchronize()
            with device.on(device.stream()):
                send()

        work = PoseidonWork(run, tensors, self._script, self.mesh.fail)
        thread = threading.Thread(target=work.run, name="poseidon-send", daemon=True)
        self.mesh.sends(thread)
        return work

    def _done(self, tensors: list[Tensor]) -> PoseidonWork:
        """Return a call that has ended."""
        work = PoseidonWork(lambda _: None, tensors, self._script, self.mesh.fail)
        work.run()
        return work

    def recv(self, tensors: list[Tensor], sender: int | None, tag: int) -> PoseidonWork:
        flat, ready = self._room(tensors[0]), _event_of(tensors)
        receive, device = self._collectives.receiving(flat, sender, tag), _device_of(tensors)

        def run(copies: list[_Copy]) -> int:
            ready.synchronize()  # before that, earlier work may use the memory of `flat`
            with device.on(device.stream()):
                found = receive()
                copies += _fill(tensors, [flat])
            return found

        work = PoseidonWork(run, tensors, self._script, self.mesh.fail)
        # a thread of its own: a later message may have to leave before this one can come
        threading.Thread(target=work.run, name="poseidon-receive", daemon=True).start()
        return work

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> PoseidonWork:
        return self.recv(tensors, None, tag)

    def shutdown(self) -> None:
        """End the thread, after the collectives that have begun. The mesh belongs to all groups.

        A later call is made all the same, as under gloo: the default arguments of
        `torch.distributed.nn.functional` are the group that there was when it was imported.
        """
        self._calls.put(None)
        self._calls, self._ending, self._thread = queue.SimpleQueue(), self._thread, None

    # the names of these collectives in earlier versions of torch
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _stream_of(self, tensors: Any) -> Any:
        """Return the stream of this group on the device of tensors."""
        first = _first(tensors)
        if first is None:
            return None
        if first.device not in self._streams:
            self._streams[first.device] = device_of(first.device).stream()
        return self._streams[first.device]

    def _stays(self, tensor: Tensor) -> bool:
        """Return whether a tensor is sent, or received, where it is."""
        if device_of(tensor.device).is_host:
            return True
        return tensor.nbytes > SMALL_BYTES and self.mesh.lends_to(self._collectives.ranks)

    def _room(self, tensor: Tensor) -> Tensor:
        """Return memory for what is received for a tensor."""
        where = tensor.device if self._stays(tensor) else "cpu"
        return torch.empty(tensor.numel(), dtype=tensor.dtype, device=where)

    def _flat(self, tensor: Tensor) -> Tensor:
        """Return the tensor's elements, in order, where they are sent from: a view where they are
        there already. In the host's memory those of a GPU are there after `_event_of`.
        """
        device, own = device_of(tensor.device), tensor.detach().contiguous().reshape(-1)
        if self._stays(tensor):
            return own
        device.keep(tensor)
        return device.host_memory(own.numel(), dtype=own.dtype).copy_(own, non_blocking=True)

    def _check_one_each(self, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self.size():
            raise ValueError(
                f"a list has {counted(len(tensors), 'tensor')}; expected one for each of the "
                f"{self.size()} workers"
            )

    def _parts(self, whole: Tensor) -> list[Tensor]:
        """Return equal parts along the first axis, one for each worker."""
        size, length = self.size(), whole.shape[0] if whole.ndim else 1
        if length % size or not whole.ndim:
            raise ValueError(
                f"a tensor of shape {list(whole.shape)} cannot be divided equally among {size} "
                f"workers; expected a multiple of {size} as its first dimension"
            )
        return list(whole.split(length // size)) if length else [whole] * size

    def _start(
        self, collective: Callable[[Tensor], None], tensors: list[Tensor], result: Any, name: str
    ) -> PoseidonWork:
        """Start a collective in place on each of these tensors."""

        def run(copies: list[_Copy]) -> None:
            for tensor, flat in zip(tensors, flats, strict=True):
                collective(flat)
                if flat.device != tensor.device or not tensor.is_contiguous():
                    copies += _fill([tensor], [flat])
                elif not device_of(tensor.device).is_host:
                    copies += _copies([tensor], [flat])

        flats = [self._flat(tensor) for tensor in tensors]
        return self._submit(run, result, name)

    def _submit(
        self, run: Callable[[list[_Copy]], None], result: Any, name: str, *, after: Any = None
    ) -> PoseidonWork:
        number = self._script.begin()
        tensors = result if after is None else after
        place, ready, device = self.mesh.place(), _event_of(tensors), _device_of(tensors)

        def run_here(copies: list[_Copy]) -> None:
            ready.synchronize()
            self._collectives.place = place
            with device.on(self._stream_of(tensors)):
                run(copies)

        work = PoseidonWork(run_here, result, self._script, self.mesh.fail, name, number)
        if threading.current_thread() is self._thread:
            # a callback of the collective that has just ended, which may wait for this one
            work.run()
            return work
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve,
                args=(self._calls, self._ending),
                name="poseidon-collectives",
                daemon=True,
            )
            self._thread.start()
        self._calls.put(work)
        return work

    def _serve(
        self, calls: queue.SimpleQueue[PoseidonWork | None], before: threading.Thread | None
    ) -> None:
        if before is not None:
            before.join()
        while (work := calls.get()) is not None:
            work.run()


# torch calls them within the forward pass of a compiled DistributedDataParallel
for _method in (*vars(PoseidonWork).values(), *vars(PoseidonGroup).values()):
    if isinstance(_method, FunctionType):
        leave_out_of_graphs(_method, "a collective of the process group 'poseidon'")


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _first(tensors: Any) -> Tensor | None:
    """Return the first of tensors in lists of any depth."""
    return next((one for one in tree_leaves(tensors) if isinstance(one, Tensor)), None)


def _device_of(tensors: Any) -> Device:
    first = _first(tensors)
    return HOST if first is None else device_of(first.device)


def _event_of(tensors: Any) -> Event:
    """Return the event after the work so far on the current stream of the tensors' device."""
    return _device_of(tensors).event()


def _fill(tensors: Sequence[Tensor], flats: Sequence[Tensor]) -> list[_Copy]:
    """Begin to copy results to tensors that nothing uses meanwhile; return the copies."""
    with torch.no_grad():
        for tensor, flat in zip(tensors, flats, strict=True):
            tensor.copy_(flat.view(tensor.shape), non_blocking=True)
    return _copies(tensors, flats)


def _copies(tensors: Sequence[Tensor], flats: Sequence[Tensor]) -> list[_Copy]:
    device = _device_of(tensors)
    return [_Copy(device, device.event(), flats)]


def _reduction(options: Any, tensors: Sequence[Tensor]) -> ReduceRule:
    """Return how tensors are reduced.

    Raises:
        UsageError: the reduction is unknown, or not for tensors of this type.
    """
    operation = options.reduceOp if options is not None else dist.ReduceOp.SUM
    for name, reduction in _REDUCTIONS.items():
        if operation == getattr(dist.ReduceOp, name):
            types = [t.dtype for t in tensors if t.is_floating_point() or t.is_complex()]
            if types and reduction in (ReduceRule.AND, ReduceRule.OR, ReduceRule.XOR):
                raise UsageError(
                    f"the reduction {name} is for whole numbers; a tensor is {types[0]}"
                )
            if reduction is ReduceRule.MEAN and any(t.dtype is torch.bool for t in tensors):
                raise UsageError("the reduction AVG is for numbers; a tensor is torch.bool")
            return reduction
    raise UsageError(
        f"the process group '{NAME}' does not know the reduction {operation}; expected one of "
        f"{', '.join(_REDUCTIONS)}"
    )


def _check_alike(call: str, own: Tensor, others: Sequence[Tensor]) -> None:
    """Refuse tensors that differ from `own` in type or size, before anything is sent.

    Raises:
        ValueError: one differs.
    """
    for other in others:
        if other.dtype != own.dtype or other.numel() != own.numel():
            raise ValueError(
                f"{call} has tensors of {described(own)} and of {described(other)}; expected one "
                "type and size"
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
        name, timeout_s = f"{current}.{options.group_id}", options.timeout.total_seconds()
        return PoseidonGroup(Collectives(mesh, name, ranks, timeout_s), script)

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    # the recorder of torch 2.15 and later is for groups in C++, and fails on this one
    recorded: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recorded.add(NAME)


def initialize(mesh: Mesh, **arguments: Any) -> None:
    """Make a group of all workers torch.distributed's default group.

    Args:
        arguments: of `init_process_group`, besides its backend, store, rank and size.
    """
    store = mesh.new_store()
    init_process_group(NAME, store=store, rank=mesh.rank, world_size=mesh.size, **arguments)
    # without the prefix in C++, which leaves out queues and the list of keys
    dist.distributed_c10d._world.pg_map[dist.group.WORLD] = (dist.Backend(NAME), store)
