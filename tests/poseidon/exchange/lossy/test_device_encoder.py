"""Pushes that are encoded on the device have the bits of those that the host encodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from poseidon.exchange.lossy.device_encoder import DeviceEncoder, device_encoders
from ps_server import CodecPair, Precision, StoreSpec, TableSpec
from ps_server.codecs.base import SEGMENT_ELEMENTS
from ps_server.codecs.blocks import BlockCodec
from ps_server.codecs.registry import codec_of
from ps_server.codecs.segments import RandomK, TopK
from ps_server.protocol.placement import Chunk, place
from ps_server.protocol.precision import Compressor, Feedback, as_array
from tests.support.simulated_device import simulated_devices

How = BlockCodec | TopK | RandomK | Precision
HOW: dict[str, How] = {
    name: codec
    for name in ("int8", "int4", "sign", "topk:0.01", "topk:0.5", "randomk:0.01", "randomk:0.5")
    if isinstance(codec := codec_of(name), BlockCodec | TopK | RandomK)
} | {precision.value: precision for precision in (Precision.FLOAT16, Precision.BFLOAT16)}
SIZES = [1, 3, 63, 65, 255, 256, 257, 1_000, SEGMENT_ELEMENTS, 5 * SEGMENT_ELEMENTS + 777]
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-42, -1e-42, 1.2e-38, -1.2e-38, 3e38, 65_504, 1e5]


@pytest.fixture(autouse=True, params=[1, 3], ids=["one thread", "three threads"])
def as_in_a_job(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes of a job flush denormal numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(request.param)
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)


def gradients(size: int, special: bool) -> list[np.ndarray]:
    """Return the gradients of some iterations, with magnitudes from denormal numbers on."""
    draw = np.random.default_rng(size)
    found = []
    for _ in range(4):
        scale = 2.0 ** draw.uniform(-148, 3, size) if special else 1.0
        own = (draw.standard_normal(size) * scale).astype(np.float32)
        if special:
            at = draw.integers(0, size, min(size, 5))
            own[at] = draw.choice(SPECIAL, len(at))
        found.append(own)
    return found


def chunks_of(size: int, cuts: int) -> list[Chunk]:
    """Cut at segments: chunks of one size, then smaller ones."""
    bounds = [0, *(SEGMENT_ELEMENTS * n for n in (1, 2, 4)[:cuts] if SEGMENT_ELEMENTS * n < size)]
    return [
        Chunk(table=3, index=index, start=start, stop=stop, shard=0)
        for index, (start, stop) in enumerate(zip(bounds, [*bounds[1:], size], strict=True))
    ]


def bits(sent: np.ndarray, how: How) -> bytes:
    """Every NaN with one payload: which it has depends on the instructions."""
    if isinstance(how, TopK | RandomK):
        numbers = sent.view(np.uint32)
        return np.where(numbers & 0x7FFFFFFF > 0x7F800000, 0x7FC00000, numbers).tobytes()
    if isinstance(how, BlockCodec):
        return sent.tobytes()
    own = torch.from_numpy(sent.view(np.int16)).view(
        torch.float16 if how is Precision.FLOAT16 else torch.bfloat16
    )
    return own.masked_fill(own.isnan(), torch.nan).view(torch.int16).numpy().tobytes()


@pytest.mark.parametrize("name", HOW)
def test_it_has_the_bits_of_the_host(name: str) -> None:
    for size, cuts, special in itertools.product(SIZES, (0, 3), (False, True)):
        assert_equal_bits(HOW[name], size, cuts, special)


def assert_equal_bits(how: How, size: int, cuts: int, special: bool) -> None:
    chunks = chunks_of(size, cuts)
    here = DeviceEncoder(chunks, how, torch.device("cpu"))
    there = (
        Feedback(size, how, reuse=False) if isinstance(how, Precision) else Compressor(chunks, how)
    )
    for clock, gradient in enumerate(gradients(size, special)):
        if isinstance(there, Compressor):
            expected = there.encode(gradient, clock).copy()
            left = torch.from_numpy(there.held_back)
        else:
            expected, left = there.round(gradient), there.left
        sent = as_array(here.encode(torch.from_numpy(gradient), clock))
        assert bits(sent, how) == bits(expected, how), (size, cuts, special, clock)
        found = here.held_back
        assert torch.equal(found.isnan(), left.isnan())
        finite = ~left.isnan()
        assert torch.equal(found[finite].view(torch.int32), left[finite].view(torch.int32))


@pytest.mark.parametrize("name", HOW)
def test_it_waits_for_no_device(name: str) -> None:
    size = SEGMENT_ELEMENTS + 300
    chunks, how = chunks_of(size, 1), HOW[name]
    (gradient,) = gradients(size, False)[:1]
    expected = DeviceEncoder(chunks, how, torch.device("cpu")).encode(torch.from_numpy(gradient), 7)
    with simulated_devices(1, 3) as (device,):
        encoder = DeviceEncoder(chunks, how, device.torch)
        device.waits.clear()
        device.copies.clear()
        sent = encoder.encode(device.put(torch.from_numpy(gradient)), 7)
        assert not device.waits
        assert not device.copies
        assert torch.equal(sent.cpu(), expected)


def test_the_host_encodes_changes() -> None:
    def found(
        codec: str, staleness: int = 0, precision: Precision = Precision.FLOAT32
    ) -> list[DeviceEncoder]:
        pair = CodecPair.parse(codec) if codec else None
        spec = TableSpec(name="w", size=900, codec=pair, staleness=staleness)
        store = StoreSpec(workers=1, shards=1, tables=(spec,), precision=precision)
        return device_encoders(store, spec, place(store).chunks[0], 0, torch.device("cpu"))

    assert len(found("int8")) == 1
    assert found("int8/none")[0].codec == codec_of("int8")
    assert len(found("", precision=Precision.FLOAT16)) == 1
    changes = found("", staleness=1, precision=Precision.FLOAT16)
    assert found("topk:0.1/none")[0].codec == codec_of("topk:0.1")
    for other in (found("none/int8"), changes):
        assert other == []
