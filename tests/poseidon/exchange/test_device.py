"""The contract of a device: on the host there is nothing to wait for."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest
import torch

from poseidon.errors import UsageError
from poseidon.exchange.compute_options import Arithmetic, ComputeOptions
from poseidon.exchange.device import DONE, HOST, CudaDevice, choose_fastest, compute_on, device_of


def test_on_the_host_nothing_waits() -> None:
    assert device_of(torch.device("cpu")) is HOST
    assert HOST.is_host
    with HOST.on(HOST.stream()):
        memory = HOST.host_memory(2, 3)
        event = HOST.event()
    HOST.wait(event)
    assert event.query()
    assert memory.shape == (2, 3)
    copied = HOST.copy(torch.ones(2, 3), memory, None, DONE)
    assert copied.query()
    assert torch.equal(memory, torch.ones(2, 3))


@pytest.mark.needs("gpu")
def test_a_copy_from_a_gpu_comes_after_what_it_waits_for() -> None:
    torch_device = torch.device("cuda")
    device = device_of(torch_device)
    x = torch.ones(1 << 20, device=torch_device)
    for _ in range(50):
        x = x * 1.0001
    host = device.host_memory(1 << 20)
    assert host.is_pinned()
    copied = device.copy(x, host, device.stream(), device.event())
    copied.synchronize()
    assert torch.equal(host, x.cpu())


def test_the_host_lends_no_memory() -> None:
    assert HOST.lend(torch.ones(3)) == b""
    with pytest.raises(RuntimeError, match="by files"):
        HOST.borrow(b"")


def test_a_stream_of_a_gpu_is_used_with_that_gpu_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new thread GPU 0 is, and torch would make a context there when the stream is left."""
    entered: list[object] = []

    @contextmanager
    def enters(what: object) -> Iterator[None]:
        entered.append(what)
        yield
        assert entered.pop() == what

    monkeypatch.setattr(torch.cuda, "device", enters)
    monkeypatch.setattr(torch.cuda, "stream", enters)
    with CudaDevice(torch.device("cuda:1")).on("its stream"):  # type: ignore[arg-type]
        assert entered == [torch.device("cuda:1"), "its stream"]


class Lender:
    """What torch does with handles, without a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released: list[tuple[bytes, int]] = []
        self.reachable = True
        for name in ("_share_cuda_", "_new_shared_cuda", "_release_ipc_counter_cuda"):
            monkeypatch.setattr(torch.UntypedStorage, name, getattr(self, name[1:].strip("_")))

    def share_cuda(self) -> tuple[object, ...]:
        return 1, b"handle", 16, 8, b"counter", 7, b"event", True

    def new_shared_cuda(self, index: int, *parts: object) -> torch.UntypedStorage:
        assert parts == (b"handle", 16, 8, b"counter", 7, b"", False)
        if not self.reachable:
            raise RuntimeError("peer access is not supported")
        return torch.UntypedStorage(16)

    def release_ipc_counter_cuda(self, counter: bytes, place: int) -> None:
        self.released.append((counter, place))


def test_a_handle_opens_the_memory_of_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    lender, device = Lender(monkeypatch), CudaDevice(torch.device("cpu"))
    handle = device.lend(torch.zeros(4))
    found = device.borrow(handle)
    assert (found.dtype, found.shape) == (torch.float32, (4,))
    assert lender.released == []


def test_memory_out_of_reach_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    lender, device = Lender(monkeypatch), CudaDevice(torch.device("cpu"))
    lender.reachable = False
    handle = device.lend(torch.zeros(4))
    with pytest.raises(RuntimeError, match="peer access is not supported"):
        device.borrow(handle)
    assert lender.released == [(b"counter", 7)]
    with pytest.raises(RuntimeError, match="it is not lent"):
        device.borrow(b"")


class Result:
    """As pybind11 has the values of an enumeration: no object is false."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __int__(self) -> int:
        return self.number


@pytest.mark.parametrize(("number", "is_pinned"), [(0, True), (712, False)])
def test_memory_is_pinned_unless_the_driver_refuses(
    number: int, is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int, int]] = []

    class Library:
        @staticmethod
        def cudaHostRegister(*arguments: int) -> Result:
            asked.append(arguments)  # type: ignore[arg-type]
            return Result(number)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Library)
    memory, device = torch.zeros(4), CudaDevice(torch.device("cpu"))
    assert device.pin(memory) is is_pinned
    assert asked == [(memory.data_ptr(), 16, 0)]
    assert device.pin(torch.zeros(0))


def lend_twos(ends: Connection) -> None:
    """Lend memory, and end once another process has changed it."""
    device = CudaDevice(torch.device("cuda", 0))
    memory = torch.full((1000,), 2.0, device="cuda:0")
    device.synchronize()
    ends.send(device.lend(memory))
    ends.recv()
    ends.send(float(memory.sum()))


@pytest.mark.needs("gpu")
@pytest.mark.processes
def test_two_processes_use_one_memory() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=lend_twos, args=(theirs,))
    process.start()
    device = CudaDevice(torch.device("cuda", torch.cuda.device_count() - 1))
    memory = device.borrow(ours.recv())
    assert memory.tolist() == [2.0] * 1000
    memory.add_(1.0)
    device.synchronize()
    del memory
    ours.send(None)
    assert ours.recv() == 3000.0
    process.join(60)
    assert process.exitcode == 0


def test_a_process_computes_on_its_gpu_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    compute_on(torch.device("cpu"))
    assert torch.backends.cudnn.allow_tf32
    assert not chosen
    compute_on(torch.device("cuda", 1))
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32
    assert chosen == [torch.device("cuda", 1)]


@pytest.fixture
def flags_of_torch() -> Iterator[None]:
    """Restores what `compute_on` sets beside attributes."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("flags_of_torch")
def test_flags_set_torch_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for module, name in (
        (torch.backends.cudnn, "deterministic"),
        (torch.backends.cudnn, "benchmark"),
    ):
        monkeypatch.setattr(module, name, False)
    tf32 = ComputeOptions(precision=Arithmetic.TF32)
    with pytest.raises(UsageError, match=r"--precision=tf32 is for GPUs.*--gpu=IDS"):
        compute_on(torch.device("cpu"), tf32)
    compute_on(torch.device("cuda", 0), tf32)
    assert torch.backends.cudnn.allow_tf32 and torch.backends.cuda.matmul.allow_tf32
    exact = ComputeOptions(deterministic=True)
    compute_on(torch.device("cuda", 0), exact)
    assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.deterministic and torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    for options, shapes_change, expected in (
        (tf32, False, True),
        (tf32, True, False),
        (exact, False, False),
    ):
        choose_fastest(options, shapes_change=shapes_change)
        assert torch.backends.cudnn.benchmark is expected
