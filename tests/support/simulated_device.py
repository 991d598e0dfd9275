"""A device that is simulated on CPU tensors: it runs work late, in an order drawn from a seed, and
finds every access without an event between it and the one before.

A tensor of the device is a `SimulatedTensor` of torch's device `lazy:N`: an operation on it is put
on the current stream and runs later, on plain memory. Until then its result holds NaN. The host
makes work run only where it waits for it, and here and there by a draw.

Found as races, by vector clocks of the streams and of the host:

* two streams use the same memory of the device, or the same host memory in copies, one of them
  writes, and no event or host wait lies between;
* memory is freed while a stream other than the one that made it may still use it;
* memory is used on a different stream than the one that made it, before the work that this one had
  then, which may still use what was there before;
* the host has written to host memory between the begin and the end of a copy from or to it. (What
  the host reads too early is NaN.)

A device can lend memory to another one, which stands for a GPU of another process of the host.
Between the two nothing orders work but messages of a host's `WorkerLinks` and of `Mesh`: the receiver knows to be done what
the sender's host knew when it sent.

Not simulated: random numbers of the device, and what NCCL and cuDNN do.

All threads of a process share the host's clock: what one has waited for, all know.

Counted: `waits` of the training loop on the device, by the operation that waited; copies and bytes
out of the device, into it, and between it and memory that it has borrowed. Threads that are named in `background` may wait.
"""

from __future__ import annotations

import random
import sys
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from poseidon.exchange.device import KINDS, Device, Event
from poseidon.exchange.worker_links import WorkerLinks
from poseidon.torch.process_group.mesh import Mesh
from ps_server.transport.base import Frames

TYPE = "lazy"
"""A device type of torch that has no kernels of its own; autograd runs its work on the thread that
calls `backward`, as it does for the CPU."""
VIEWS = {
    "alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view",
    "_reshape_alias", "_unsafe_view", "chunk", "narrow", "view_as",
}  # fmt: skip
READ_BY_HOST = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2"}
"""Operations whose result, or its shape, the host needs."""
LOCK = threading.RLock()
"""Of all devices: memory of one may be freed while another one works."""
EARLY = (0.0, 0.05, 0.4)
"""How probable it is that some work that is due runs when new work comes; one of them by draw."""


BEFORE = "the work before the memory was taken"
DEVICE_STREAMS = 1_000
"""Streams of different devices have different numbers."""


class Race(AssertionError):
    """Work without an event between."""


@dataclass(slots=True)
class _Access:
    start: int
    stop: int
    stream: int
    number: int
    writes: bool
    what: str
    place: list[tuple[CodeType, int]]


@dataclass(eq=False)
class _Block:
    """Memory of the device, or host memory that copies use. It lives as long as its tensors."""

    home: int | None
    """The stream that made it, on whose later work it may be used again; None: it is borrowed."""
    accesses: list[_Access] = field(default_factory=list)
    pending: int = 0
    """Copies that are begun and have not run."""
    kept: set[int] = field(default_factory=set)
    """The streams whose work so far is waited for when it is freed."""


@dataclass(slots=True, eq=False)
class _Work:
    run: Callable[[], None]
    after: list[_Work]
    ended: bool = False


class SimulatedStream:
    """A queue of work."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.clock = {number: 0}
        self.known = 0
        """The version of what the host knows that is in the clock."""
        self.queue: deque[_Work] = deque()
        self.barriers: list[_Work] = []
        """Work of other streams that the next one waits for."""
        self.last: _Work | None = None


class SimulatedEvent:
    """A point on a stream."""

    def __init__(self, device: SimulatedDevice, stream: SimulatedStream) -> None:
        self.clock = dict(stream.clock)
        self.work = [*stream.barriers, *([stream.last] if stream.last else [])]
        self._device = device

    def synchronize(self) -> None:
        self._device.host_waits("Event.synchronize", self.work, self.clock)

    def query(self) -> bool:
        with self._device.lock:
            return all(work.ended for work in self.work)


class SimulatedDevice(Device):
    """See the module.

    Attributes:
        races: what was found, as sentences.
        waits: by operation: how often a thread that is not in the background has waited.
        copies: by direction, `out`, `in` and `peer`: how many there were.
        bytes: of them.
        background: prefixes of names of threads that may wait.
    """

    is_host = False

    def __init__(self, index: int, seed: int) -> None:
        self.torch = torch.device(TYPE, index)
        self.lock = LOCK
        self.races: list[str] = []
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.background = (
            "pushes-",
            "factors-out-",
            "sums-out-",
            "host-out-",
            "rebuild-",
            "owner-",
            "add-",
            "poseidon-read-",
            "poseidon-collectives",
            "poseidon-receive",
            "poseidon-send",
        )
        self.draw(seed)
        self._clock: dict[int, int] = {}
        """What the host knows to be done."""
        self._known = 0
        """Its version."""
        self._streams: list[SimulatedStream] = []
        self._first = self.stream()
        self._current = threading.local()
        self._blocks: weakref.WeakValueDictionary[int, _Block] = weakref.WeakValueDictionary()
        """By the address of their storage."""
        self._pinned: dict[int, tuple[int, _Block]] = {}
        """By the address of their storage: its bytes, and it."""
        self._work: deque[_Work] = deque()

    def draw(self, seed: int) -> None:
        """Draw the order of what is to come from a seed."""
        self._draw = random.Random(seed)
        self._early = self._draw.choice(EARLY)

    # The contract.

    def stream(self) -> SimulatedStream:
        stream = SimulatedStream(DEVICE_STREAMS * self.torch.index + len(self._streams))
        self._streams.append(stream)
        return stream

    @property
    def current(self) -> SimulatedStream:
        return getattr(self._current, "stream", self._first)

    @contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        before, self._current.stream = self.current, stream
        try:
            yield
        finally:
            self._current.stream = before

    def event(self) -> Event:
        with self.lock:
            return SimulatedEvent(self, self.current)

    def wait(self, event: Event) -> None:
        if isinstance(event, SimulatedEvent):
            with self.lock:
                _merge(self.current.clock, event.clock)
                self.current.barriers += event.work

    def keep(self, tensor: Tensor) -> None:
        if isinstance(tensor, SimulatedTensor):
            with self.lock:
                tensor.block.kept.add(self.current.number)

    def host_memory(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        memory = _spoilt(torch.zeros(shape, dtype=dtype))
        if memory.numel():
            self.pin(memory)
            storage = memory.untyped_storage()
            weakref.finalize(storage, self._pinned.pop, storage.data_ptr(), None)
        return memory

    def pin(self, memory: Tensor) -> bool:
        storage = memory.untyped_storage()
        with self.lock:
            block = self._blocks[storage.data_ptr()] = _Block(self._first.number)
            self._pinned[storage.data_ptr()] = storage.nbytes(), block
        return True

    def unpin(self, memory: Tensor) -> None:
        with self.lock:
            self._pinned.pop(memory.untyped_storage().data_ptr(), None)

    def _pinned_at(self, memory: Tensor) -> _Block | None:
        """Return the block of pinned memory; None: it is not pinned."""
        at = memory.data_ptr()  # of a view through numpy the storage has an address of its own
        return next((b for start, (n, b) in self._pinned.items() if start <= at < start + n), None)

    def lend(self, memory: Tensor) -> bytes:
        assert isinstance(memory, SimulatedTensor) and memory.dtype is torch.float32
        with self.lock:
            handle = b"%d" % next(HANDLES)
            LENT[handle] = memory
            return handle

    def borrow(self, handle: bytes) -> Tensor:
        with self.lock:
            if not handle:
                raise RuntimeError("it is not lent")
            lent = LENT.pop(handle)
            assert lent.owner is not self
            block = _Block(None, accesses=lent.block.accesses)
            self._blocks[lent.plain.untyped_storage().data_ptr()] = block
            weakref.finalize(block, self._freed, block.home, block.accesses, block.kept)
            return SimulatedTensor(lent.plain, self, block)

    def knows(self) -> dict[int, int]:
        """Return what the host knows to be done."""
        with self.lock:
            return dict(self._clock)

    def learns(self, clock: dict[int, int]) -> None:
        """Let the host know what another one knew when it sent a message."""
        with self.lock:
            self._known += 1
            _merge(self._clock, clock)

    def synchronize(self) -> None:
        work = [stream.last for stream in self._streams if stream.last]
        clock: dict[int, int] = {}
        for stream in self._streams:
            _merge(clock, stream.clock)
        self.host_waits("synchronize", work, clock)

    # Tensors.

    def put(self, tensor: Tensor) -> SimulatedTensor:
        """Return a copy of a tensor on the device, which is there already."""
        return self._own(tensor.detach().clone())

    def _own(self, plain: Tensor) -> SimulatedTensor:
        with self.lock:
            address = plain.untyped_storage().data_ptr()
            block = self._blocks.get(address)
            if block is None:
                stream = self.current
                block = _Block(stream.number)
                if address:
                    self._blocks[address] = block
                    stop, made = address + plain.untyped_storage().nbytes(), stream.clock
                    block.accesses.append(
                        _Access(address, stop, stream.number, made[stream.number], True, BEFORE, [])
                    )
                weakref.finalize(block, self._freed, block.home, block.accesses, block.kept)
            return SimulatedTensor(plain, self, block)

    def _freed(self, home: int | None, accesses: list[_Access], kept: set[int]) -> None:
        with self.lock:
            known = self._clock
            ordered = {} if home is None else self._streams[home % DEVICE_STREAMS].clock
            for access in accesses:
                stream = access.stream
                if stream // DEVICE_STREAMS != self.torch.index:
                    continue  # who lends frees it only once its borrowers have
                done = max(known.get(stream, 0), ordered.get(stream, 0))
                if done < access.number and stream not in kept:
                    self.races.append(
                        f"memory of {'another process' if home is None else f'stream {home}'} is freed while {access.what} on stream "
                        f"{access.stream} may use it\n{_lines(_place())}"
                    )
                    return

    def is_pinned(self, tensor: Tensor) -> bool:
        return self._pinned_at(tensor) is not None

    # Work.

    def call(self, function: Any, arguments: Any, named: Any) -> Any:
        """Run an operation, or put it on the current stream."""
        with self.lock:
            return self._call(function, arguments, named)

    def _call(self, function: Any, arguments: Any, named: Any) -> Any:
        operation = OPERATIONS.get(function) or _known(function)
        if operation.is_composite:
            return function.decompose(*arguments, **named)
        used: list[Tensor] = []
        plain = _plain(arguments, used)
        named_ = {key: _plain([value], used)[0] for key, value in named.items()}
        device = named_.get("device")
        to_host = device is not None and device.type == "cpu"
        if device is not None and not to_host:
            named_["device"] = torch.device("cpu")
        if operation.is_view:
            base, found = arguments[0], function(*plain, **named_)
            if torch.is_inference_mode_enabled() == base.is_inference():
                return _views(found, base)
            with torch.inference_mode(base.is_inference()):  # as torch: as its base
                return _views(found, base)
        name = operation.name
        if name == "copy_":
            return self._copy(arguments)
        if name == "_to_copy":
            return self._to_copy(arguments[0], named)
        written = operation.written(arguments, named)
        if written:
            self._put(lambda: function(*plain, **named_), name, used, written)
            return _returned(function, written)
        if name in READ_BY_HOST or (name == "index" and _has_masks(plain)):
            return self._at_once(function, name, plain, named_)
        # what it returns on what is there now has the shape of the result
        early = function(*_in_range(name, plain), **named_)
        if isinstance(early, Tensor):
            out = self._own(_spoilt(early))
            self._put(lambda: early.copy_(function(*plain, **named_)), name, used, [out])
            return out
        outs = _mapped(Tensor, lambda found: self._own(_spoilt(found)), early)
        flat = _tensors(outs)

        def run() -> None:
            found = _tensors(function(*plain, **named_))
            for out, result in zip(flat_plain, found, strict=True):
                out.copy_(result)

        flat_plain = [out.plain for out in flat]
        self._put(run, name, used, flat)
        return outs

    def _at_once(self, function: Any, name: str, arguments: Any, named: Any) -> Any:
        stream = self.current
        self.host_waits(name, [stream.last, *stream.barriers] if stream.last else [], stream.clock)
        found = function(*arguments, **named)
        return _mapped(Tensor, self._own, found)

    def _to_copy(self, source: Tensor, named: Any) -> Tensor:
        device = named.get("device")
        dtype = named.get("dtype") or source.dtype
        if device is not None and device.type == "cpu":
            host = _spoilt(torch.empty(source.shape, dtype=dtype))
            self._copy((host, source, False))
            return host
        other = self if device is None else DEVICES[device.index or 0]
        out = other._own(_spoilt(torch.empty_like(source.plain, dtype=dtype)))
        if other is not self:  # as torch: both current streams wait for each other
            self.wait(other.event())
        self._copy((out, source, True))
        if other is not self:
            other.wait(self.event())
        return out

    def _copy(self, arguments: Sequence[Any]) -> Tensor:
        to, source, *rest = arguments
        here = [isinstance(t, SimulatedTensor) for t in (to, source)]
        plain_to, plain = (t.plain if own else t for t, own in zip((to, source), here, strict=True))
        if all(here):
            if None in (to.block.home, source.block.home):
                self.copies["peer"] += 1
                self.bytes["peer"] += plain.nbytes
            self._put(lambda: plain_to.copy_(plain), "copy", [source], [to])
            return to
        direction = "in" if here[0] else "out"
        self.copies[direction] += 1
        self.bytes[direction] += plain.nbytes
        host = plain if here[0] else plain_to
        block = self._pinned_at(host)
        pinned = block is not None
        # a copy before this one, in order, may still read the memory
        spoils = not here[0] and block is not None and not block.pending
        if spoils:
            _spoilt(host)
        mark = host.clone() if here[0] or spoils else host
        if block:
            block.pending += 1

        def run() -> None:
            if block:
                block.pending -= 1
            if mark is not host and pinned and not _same(host, mark):
                self.races.append(f"the host wrote to memory of a copy {direction} under way")
            plain_to.copy_(mark if here[0] and not pinned else plain)

        self._put(run, f"copy {direction}", [source], [to])
        if not (pinned and rest and rest[0]):
            stream = self.current
            assert stream.last is not None
            self.host_waits(f"copy {direction}", [stream.last], stream.clock)
        return to

    def _put(
        self, run: Callable[[], None], what: str, used: Sequence[Tensor], written: Sequence[Tensor]
    ) -> None:
        stream, place = self.current, _place()
        if stream.known != self._known:
            stream.known = self._known
            _merge(stream.clock, self._clock)
        stream.clock[stream.number] += 1
        changed = {id(tensor) for tensor in written}
        for tensor in used:
            self._access(stream, tensor, what, place, writes=id(tensor) in changed)
        read = {id(tensor) for tensor in used}
        for tensor in written:
            if id(tensor) not in read:
                self._access(stream, tensor, what, place, writes=True)
        work = _Work(run, [*stream.barriers, *([stream.last] if stream.last else [])])
        stream.barriers, stream.last = [], work
        self._work.append(work)
        if self._draw.random() < self._early:
            self._run([self._draw.choice(self._work)])

    def _access(
        self,
        stream: SimulatedStream,
        tensor: Tensor,
        what: str,
        place: list[tuple[CodeType, int]],
        *,
        writes: bool,
    ) -> None:
        if isinstance(tensor, SimulatedTensor):
            plain, block = tensor.plain, tensor.block
        else:
            plain = tensor
            found = self._pinned_at(plain)
            if found is None:
                return
            block = found
        if not plain.numel():
            return
        start, stop = _extent(plain)
        own, kept = stream.number, []
        for other in block.accesses:
            if other.stream != own:
                kept.append(other)
                apart = other.stop <= start or stop <= other.start
                if apart or not (writes or other.writes):
                    continue
                if stream.clock.get(other.stream, 0) < other.number:
                    self.races.append(
                        f"{what} {'writes' if writes else 'reads'} on stream {own} what "
                        f"{other.what} {'writes' if other.writes else 'reads'} on stream "
                        f"{other.stream}, with no event between\n{_lines(place)}after\n"
                        f"{_lines(other.place)}"
                    )
            elif start > other.start or other.stop > stop or (other.writes and not writes):
                kept.append(other)
        kept.append(_Access(start, stop, own, stream.clock[own], writes, what, place))
        block.accesses[:] = kept

    def host_waits(self, what: str, work: Sequence[_Work], clock: dict[int, int]) -> None:
        """Let the host wait until work is done."""
        with self.lock:
            # of an event that has come no one waits
            waits = what != "Event.synchronize" or any(not one.ended for one in work)
            if waits and not threading.current_thread().name.startswith(self.background):
                self.waits[what] += 1
            self._run(list(work))
            self._known += 1
            _merge(self._clock, clock)

    def _run(self, work: list[_Work]) -> None:
        """Run this work and all that it waits for."""
        waiting = list(work)
        with torch.inference_mode():  # only there its tensors may be changed
            while waiting:
                one = waiting[-1]
                before = [each for each in one.after if not each.ended]
                if one.ended:
                    waiting.pop()
                elif before:
                    self._draw.shuffle(before)
                    waiting += before
                else:
                    one.run()
                    one.ended, one.after = True, []
                    one.run = _nothing
                    waiting.pop()
        while self._work and self._work[0].ended:
            self._work.popleft()

    def check(self) -> None:
        """Run all that is left.

        Raises:
            Race: one was found.
        """
        with self.lock:
            self._run(list(self._work))
        self.raise_races()

    def raise_races(self) -> None:
        """Raise what was found so far.

        Raises:
            Race: one was found.
        """
        if self.races:
            raise Race(f"{len(self.races)} races, the first: {self.races[0]}")


class SimulatedTensor(Tensor):
    """A tensor of a simulated device.

    Attributes:
        plain: its memory, which only the device uses.
        owner: its device.
    """

    plain: Tensor
    owner: SimulatedDevice
    block: _Block

    @staticmethod
    def __new__(cls, plain: Tensor, owner: SimulatedDevice, block: _Block) -> SimulatedTensor:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls,
            plain.size(),
            strides=plain.stride(),
            storage_offset=plain.storage_offset(),
            dtype=plain.dtype,
            device=owner.torch,
        )

    def __init__(self, plain: Tensor, owner: SimulatedDevice, block: _Block) -> None:
        self.plain = plain
        self.owner = owner
        self.block = block

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        first = arguments[0] if arguments else None
        if not isinstance(first, SimulatedTensor):
            tensors = _tensors(arguments, named or {})
            first = next(t for t in tensors if isinstance(t, SimulatedTensor))
        return first.owner.call(function, arguments, named or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SimulatedTensor({tuple(self.shape)})"


DEVICES: dict[int, SimulatedDevice] = {}
"""The devices of the test that runs, by number: that of the worker of this rank."""
LENT: dict[bytes, SimulatedTensor] = {}
"""Memory that is lent, by its handle, until it is borrowed."""
HANDLES = count()


def _empty(size: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    found = DEVICES[device.index or 0]
    plain = torch.empty(size, dtype=dtype or torch.float32)
    return found._own(_spoilt(plain))


_LIBRARY = torch.library.Library("aten", "IMPL", TYPE.capitalize())
_LIBRARY.impl("empty.memory_format", _empty)


@contextmanager
def simulated_devices(number: int, seed: int) -> Iterator[list[SimulatedDevice]]:
    """Yield devices `lazy:0`, `lazy:1`, ... that the exchange finds by `device_of`.

    Raises:
        Race: at the end, if one was found.
    """
    devices = [SimulatedDevice(index, seed * 1000 + index) for index in range(number)]
    DEVICES.update(enumerate(devices))
    KINDS[TYPE] = lambda device: DEVICES[device.index or 0]
    try:
        try:
            with _messages_with_clocks():
                yield devices
        finally:  # a race explains what it has led to
            for device in devices:
                device.check()
    finally:
        del KINDS[TYPE]
        DEVICES.clear()
        LENT.clear()


@contextmanager
def _messages_with_clocks() -> Iterator[None]:
    """Let each message between the workers of a host bring what the sender's host knows."""
    carried: defaultdict[tuple[str, int, int], deque[dict[int, int]]] = defaultdict(deque)
    """By host, sender and receiver. Messages keep their order."""
    of_meshes: defaultdict[tuple[int, int], deque[dict[int, int]]] = defaultdict(deque)
    send, handle, receive = WorkerLinks.send, WorkerLinks._handle, Mesh._receive

    def device(links: WorkerLinks, rank: int) -> SimulatedDevice | None:
        return DEVICES.get(links._network.rank_of(rank))

    def host_of(links: WorkerLinks) -> str:
        return links.address.rpartition("-")[0]

    def noted_send(
        links: WorkerLinks, ranks: Sequence[int], priority: int, frames: list[Any]
    ) -> None:
        if isinstance(mesh := getattr(links._deliver, "__self__", None), Mesh):
            own = DEVICES.get(mesh.rank)
            for rank in ranks:
                of_meshes[mesh.rank, rank].append(own.knows() if own is not None else {})
        elif links._out.wire.near:
            own = device(links, links._network.rank)
            for rank in ranks:
                clock = own.knows() if own is not None else {}
                carried[host_of(links), links._network.rank, rank].append(clock)
        send(links, ranks, priority, frames)

    def learning_handle(links: WorkerLinks, peer: bytes, frames: Frames) -> None:
        if links._out.wire.near and len(frames) > 1:
            own = device(links, links._network.rank)
            clocks = carried[host_of(links), links._ranks[peer], links._network.rank]
            clock = clocks.popleft() if clocks else {}  # `fail` tells the others without a clock
            if own is not None:
                own.learns(clock)
        handle(links, peer, frames)

    def learning_receive(mesh: Mesh, sender: int, frames: Frames) -> None:
        clock, own = of_meshes[sender, mesh.rank].popleft(), DEVICES.get(mesh.rank)
        if own is not None:
            own.learns(clock)
        receive(mesh, sender, frames)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerLinks, "send", noted_send)
        patch.setattr(WorkerLinks, "_handle", learning_handle)
        patch.setattr(Mesh, "_receive", learning_receive)
        yield


def _merge(clock: dict[int, int], other: dict[int, int]) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


def _mapped(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """As torch's `tree_map_only`, which takes most of the time of a run."""
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, tuple | list):
        found = [_mapped(kind, function, each) for each in tree]
        return found if isinstance(tree, list) else tuple(found)
    if isinstance(tree, dict):
        return {name: _mapped(kind, function, each) for name, each in tree.items()}
    return tree


def _tensors(*trees: Any) -> list[Any]:
    found: list[Any] = []
    _mapped(Tensor, found.append, trees)
    return found


@dataclass(frozen=True, slots=True)
class _Operation:
    """What is known of an operation of torch.

    Attributes:
        is_view: whether what it returns is a view of its first argument.
        is_composite: whether it is made of others. torch takes it apart itself, but not in its
            inference mode.
        writes: the places and the names of the arguments that it writes to.
    """

    name: str
    is_view: bool
    is_composite: bool
    writes: tuple[tuple[int, str], ...]

    def written(self, arguments: Any, named: Any) -> list[Tensor]:
        """Return the arguments that it writes to."""
        found: list[Tensor] = []
        for place, name in self.writes:
            value = named.get(name, arguments[place] if place < len(arguments) else None)
            found += [value] if isinstance(value, Tensor) else _tensors(value)
        return found


OPERATIONS: dict[Any, _Operation] = {}


def _known(function: Any) -> _Operation:
    name, schema = function.overloadpacket.__name__, function._schema
    writes = tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    is_view = name in VIEWS and schema.name.startswith("aten::")
    is_composite = not is_view and function._can_decompose()
    return OPERATIONS.setdefault(function, _Operation(name, is_view, is_composite, writes))


def _plain(arguments: Sequence[Any], used: list[Tensor]) -> list[Any]:
    """Return arguments with plain tensors; note the tensors among them."""
    found: list[Any] = []
    for one in arguments:
        if isinstance(one, SimulatedTensor):
            used.append(one)
            found.append(one.plain)
        elif isinstance(one, Tensor):
            used.append(one)
            found.append(one)
        elif isinstance(one, list | tuple):
            found.append(_plain(one, used))
        else:
            found.append(one)
    return found


def _views(found: Any, base: SimulatedTensor) -> Any:
    if isinstance(found, Tensor):
        return SimulatedTensor(found, base.owner, base.block)
    return type(found)(_views(one, base) for one in found)


def _returned(function: Any, written: Sequence[Tensor]) -> Any:
    if not function._schema.returns:
        return None
    return written[0] if len(function._schema.returns) == 1 else tuple(written)


def _in_range(name: str, arguments: Any) -> Any:
    """Return arguments with indices that are legal before they are there."""
    if name not in ("index", "gather"):
        return arguments
    return arguments[0], *_mapped(Tensor, torch.zeros_like, arguments[1:])


def _has_masks(arguments: Any) -> bool:
    return any(tensor.dtype is torch.bool for tensor in _tensors(arguments[1:]))


def _extent(plain: Tensor) -> tuple[int, int]:
    start = plain.data_ptr()
    if plain.is_contiguous():
        return start, start + plain.nbytes
    length = sum((size - 1) * step for size, step in zip(plain.shape, plain.stride(), strict=True))
    return start, start + (length + 1) * plain.element_size()


def _spoilt(tensor: Tensor) -> Tensor:
    if tensor.dtype.is_floating_point:
        tensor.fill_(torch.nan)
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype is torch.bfloat16:  # numpy has none
        one, other = one.view(torch.int16), other.view(torch.int16)
    return one.numpy().tobytes() == other.numpy().tobytes()


def _nothing() -> None:
    pass


def _place() -> list[tuple[CodeType, int]]:
    """Return the last lines of this thread that are Poseidon's, the last one first."""
    found: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None and len(found) < 4:  # `traceback` would read the files each time
        if "/poseidon/" in frame.f_code.co_filename:
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found


def _lines(place: list[tuple[CodeType, int]]) -> str:
    return "".join(
        f"  {code.co_filename}:{line} in {code.co_name}\n" for code, line in reversed(place)
    )
