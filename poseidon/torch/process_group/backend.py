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

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from poseidon.exchange.device import device_of
from poseidon.exchange.module_hooks import leave_out_of_graphs
from poseidon.torch.process_group.collectives import Collectives
from poseidon.torch.process_group.mesh import Mesh
from poseidon.torch.process_group.short_forms import in_short_too
from poseidon.torch.process_group.work import (
    Calls,
    Copy,
    PoseidonWork,
    Staging,
    WorkThread,
    copies_of,
    device_of_all,
    ended,
    fill,
)
from poseidon.torch.process_group.worker_parts import (
    ReduceRule,
    check_one_each,
    check_own_memory,
    check_rank,
    equal_parts,
    reduction_of,
)

NAME = "poseidon"
dist: Any = torch.distributed  # its stubs lack half of what is used here


class PoseidonGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A process group whose collectives travel over a `Mesh`.

    It has the methods of torch's ProcessGroup, also in their short forms; torch.distributed calls
    them.

    Args:
        script: the calls of the script, of which those of this group are part if it has all
            workers.
    """

    def __init__(self, collectives: Collectives, script: Calls | None = None) -> None:
        super().__init__(collectives.rank, collectives.size)
        self._collectives = collectives
        has_all = collectives.size == collectives.mesh.size
        self._script = script if script is not None and has_all else Calls()
        self._thread = WorkThread()
        self._name = self._description = ""
        self._left: list[ReduceRule] | None = None
        self._staging = Staging(lambda: self.mesh.memory.lends_to(collectives.ranks))

    @property
    def mesh(self) -> Mesh:
        """The messages that all groups of this worker share."""
        return self._collectives.mesh

    # Torch asks for the types where a call needs the CPU.
    _device_types = (torch.device("cpu"), torch.device("cuda"))

    def getBackendName(self) -> str:
        return NAME

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

    @in_short_too("op")
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> PoseidonWork:
        reduction = reduction_of(opts, tensors)
        if self._left is not None:
            self._left.append(reduction)
            return ended(tensors)
        if any(tensor.is_sparse for tensor in tensors):
            return self._all_reduce_rows(tensors, reduction)
        return self._start(
            lambda flat: self._collectives.all_reduce(flat, reduction), tensors, "all_reduce"
        )

    @contextmanager
    def leaving_sums(self) -> Iterator[list[ReduceRule]]:
        """Let all-reduces inside the block leave their tensors as they are, for an exchange. Yield
        what they would have done.
        """
        self._left = left = list[ReduceRule]()
        try:
            yield left
        finally:
            self._left = None

    def _all_reduce_rows(self, tensors: list[Tensor], reduction: ReduceRule) -> PoseidonWork:
        """As gloo: the sum of sparse tensors has the elements of all workers."""

        def run(_: list[Copy]) -> None:
            for tensor in tensors:
                # what a sparse tensor copies may be changed only where it was made
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    rows = self._collectives.all_reduce_rows(tensor.detach().cpu(), reduction)
                    tensor.copy_(rows)  # a view of a sparse tensor has its own elements

        return self._submit(run, tensors, "all_reduce")

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> PoseidonWork:
        return self.allreduce(tensors, opts)

    @in_short_too("root")
    def broadcast(self, tensors: list[Tensor], opts: Any) -> PoseidonWork:
        root = check_rank(opts.rootRank, self.size())
        return self._start(
            lambda flat: self._collectives.broadcast(flat, root), tensors, "broadcast"
        )

    @in_short_too("root", "op")
    def reduce(self, tensors: list[Tensor], opts: Any) -> PoseidonWork:
        reduction, root = reduction_of(opts, tensors), check_rank(opts.rootRank, self.size())
        return self._start(
            lambda flat: self._collectives.reduce(flat, reduction, root), tensors, "reduce"
        )

    @in_short_too(of_lists=0)
    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> PoseidonWork:
        def run(copies: list[Copy]) -> None:
            for own, results in zip(flats, outputs, strict=True):
                copies += fill(results, self._collectives.all_gather(own))

        for own, results in zip(inputs, outputs, strict=True):
            check_one_each("all_gather", own, results, self.size())
        flats = [self._staging.flat(tensor) for tensor in inputs]
        return self._submit(run, outputs, "all_gather")

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> PoseidonWork:
        return self.allgather([list(one) for one in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> PoseidonWork:
        return self.all_gather_single_coalesced([output], [own], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> PoseidonWork:
        size = self.size()
        return self.allgather([equal_parts(size, o.view(-1)) for o in outputs], inputs, opts)

    @in_short_too("root", of_lists=0)
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> PoseidonWork:
        def run(copies: list[Copy]) -> None:
            parts = self._collectives.gather(own, root)
            if parts:
                copies += fill(outputs[0], parts)

        root = check_rank(opts.rootRank, self.size())
        if outputs:
            check_one_each("gather", inputs[0], outputs[0], self.size())
        own = self._staging.flat(inputs[0])
        return self._submit(run, outputs, "gather", after=inputs)  # others have no outputs

    @in_short_too("root", of_lists=1)
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> PoseidonWork:
        root = check_rank(opts.rootRank, self.size())
        if inputs:
            check_one_each("scatter", outputs[0], inputs[0], self.size())
        parts = [self._staging.flat(tensor) for tensor in inputs[0]] if inputs else []
        return self._start(
            lambda flat: self._collectives.scatter(flat, parts, root), outputs, "scatter"
        )

    @in_short_too("op", of_lists=1)
    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> PoseidonWork:
        def run(copies: list[Copy]) -> None:
            for output, parts in zip(outputs, flats, strict=True):
                copies += fill([output], [self._collectives.reduce_scatter(parts, reduction)])

        reduction = reduction_of(opts, outputs)
        for output, parts in zip(outputs, inputs, strict=True):
            check_one_each("reduce_scatter", output, parts, self.size(), only=self.rank())
        flats = [[self._staging.flat(tensor) for tensor in parts] for parts in inputs]
        return self._submit(run, outputs, "reduce_scatter")

    def reduce_scatter_single(
        self, output: Tensor, whole: Tensor, opts: Any = None
    ) -> PoseidonWork:
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> PoseidonWork:
        parts = [equal_parts(self.size(), whole.reshape(-1)) for whole in inputs]
        return self.reduce_scatter(outputs, parts, opts)

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> PoseidonWork:
        def run(copies: list[Copy]) -> None:
            results = [self._staging.room(output) for output in outputs]
            self._collectives.all_to_all(parts, results)
            copies += fill(outputs, results)

        own = self.rank()
        check_one_each("all_to_all", None, outputs, self.size())
        check_one_each("all_to_all", outputs[own], inputs, self.size(), only=own)
        parts = [self._staging.flat(tensor) for tensor in inputs]
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
        results = output.split(list(output_sizes)) if output_sizes else equal_parts(size, output)
        parts = whole.split(list(input_sizes)) if input_sizes else equal_parts(size, whole)
        return self.alltoall(list(results), list(parts), opts)

    def barrier(self, opts: Any = None, *, timeout: timedelta | None = None) -> PoseidonWork:
        return self._submit(lambda _: self._collectives.barrier(), [], "barrier")

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all workers, for `timeout` or the group's time; if some do not come, the error
        names the first, also with `wait_all_ranks`.
        """
        limit_s = timeout.total_seconds() if timeout else None
        self._submit(lambda _: self._collectives.barrier(limit_s), [], "monitored_barrier").wait()

    def send(self, tensors: list[Tensor], receiver: int, tag: int) -> PoseidonWork:
        device, own = device_of_all(tensors), self._staging.flat(tensors[0])
        ready = device.event()
        send = self._collectives.sending(own, check_rank(receiver, self.size()), tag)
        if device.is_host:
            send()
            return ended(tensors)

        def run(_: list[Copy]) -> None:
            ready.synchronize()
            with device.on(device.stream()):
                send()

        work = PoseidonWork(run, tensors, self.mesh.fail)
        self.mesh.sends(threading.Thread(target=work.run, name="poseidon-send", daemon=True))
        return work

    def recv(self, tensors: list[Tensor], sender: int | None, tag: int) -> PoseidonWork:
        device, flat = device_of_all(tensors), self._staging.room(tensors[0])
        known = None if sender is None else check_rank(sender, self.size())
        ready, receive = device.event(), self._collectives.receiving(flat, known, tag)

        def run(copies: list[Copy]) -> int:
            ready.synchronize()  # before that, earlier work may use the memory of `flat`
            with device.on(device.stream()):
                found = receive()
                copies += fill(tensors, [flat])
            return found

        work = PoseidonWork(run, tensors, self.mesh.fail)
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
        self._thread.end()

    # their names in earlier versions of torch
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start(
        self, collective: Callable[[Tensor], None], tensors: list[Tensor], name: str
    ) -> PoseidonWork:
        """Start a collective in place on each of these tensors."""

        def run(copies: list[Copy]) -> None:
            for tensor, flat in zip(tensors, flats, strict=True):
                collective(flat)
                if flat.device != tensor.device or not tensor.is_contiguous():
                    copies += fill([tensor], [flat])
                elif not device_of(tensor.device).is_host:
                    copies += copies_of([tensor], [flat])

        check_own_memory(name, tensors)
        flats = [self._staging.flat(tensor) for tensor in tensors]
        return self._submit(run, tensors, name)

    def _submit(
        self, run: Callable[[list[Copy]], None], result: Any, name: str, *, after: Any = None
    ) -> PoseidonWork:
        call = self._script.begin(name)
        place, tensors = self.mesh.place(), result if after is None else after
        device = device_of_all(tensors)
        ready = device.event()

        def run_here(copies: list[Copy]) -> None:
            ready.synchronize()
            self._collectives.place = place
            with device.on(self._staging.stream_of(tensors)):
                run(copies)

        work = PoseidonWork(run_here, result, self.mesh.fail, call)
        self._thread.add(work)
        return work


# torch calls them within the forward pass of a compiled DistributedDataParallel
for _method in (*vars(PoseidonWork).values(), *vars(PoseidonGroup).values()):
    if isinstance(_method, FunctionType):
        leave_out_of_graphs(_method, "a collective of the process group 'poseidon'")
