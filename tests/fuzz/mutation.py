"""Mutations of text and bytes, as by accidents and attackers; the given generator draws every
random number.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from random import Random

from poseidon.caffe.proto.caffe_pb2 import BlobProto, NetParameter

NUMBERS = (
    "0", "-1", "1", "3", "255", "2147483647", "2147483648", "4294967295", "4294967296", "-2147483648",
    "9223372036854775807", "18446744073709551616", "1000000000000000000", "1e30", "-1e-30", "1e400", "nan",
    "inf", "-inf", "0.5", "0x7f", "077", "1.", "--1", "true", "MAX", '"1"', "",
)  # fmt: skip
HUGE_VARINTS = (
    b"\xff\xff\xff\xff\x07",
    b"\xff\xff\xff\xff\x0f",
    b"\xff" * 9 + b"\x01",
    b"\x80" * 12,
    b"\xff" * 20,
)
INSERTS = (
    b"{", b"}", "\u00e9\u2028\x00".encode(), b"\xff\xfe", b"\xc3(", b"\x00", b"\x1b[31m", b'"', b"'", b"#", b":",
    b"layer {", b"}\n}\n", b"\\", b"[", b"]", b"<", b",", b"\r", b"name: '\xed\xa0\x80'",
)  # fmt: skip
DEPTHS = (20, 90, 110, 300, 3000)
TYPES = (
    b"Convolution", b"Pooling", b"InnerProduct", b"Reshape", b"Slice", b"Concat", b"LSTM", b"Deconvolution",
    b"SPP", b"Tile", b"Crop", b"PriorBox", b"Im2col", b"LRN", b"Embed", b"Flatten", b"Reduction", b"Scale",
    b"Input", b"DummyData", b"MemoryData", b"Data", b"ImageData", b"HDF5Data", b"Parameter", b"Interp",
    b"BN", b"Reorg", b"Upsample", b"PSROIPooling", b"Proposal", b"AnchorTarget", b"DenseImageData", b"ROIData",
)  # fmt: skip
Mutation = Callable[[bytes, Random], bytes]


def mutate(content: bytes, random: Random, mutations: tuple[Mutation, ...]) -> bytes:
    """Return the content after one to four mutations; one in fifty is unchanged."""
    if random.randrange(50) == 0:
        return content
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 4))):
        content = random.choice(mutations)(content, random)
    return content


def flip(content: bytes, random: Random) -> bytes:
    """Flip one to eight bits."""
    changed = bytearray(content)
    for _ in range(random.randint(1, 8) if changed else 0):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def noise(content: bytes, random: Random) -> bytes:
    """Replace up to sixteen bytes with random ones."""
    start, end = _slice(content, random, 16)
    return content[:start] + random.randbytes(end - start) + content[end:]


def cut_short(content: bytes, random: Random) -> bytes:
    """Remove the end."""
    return content[: random.randint(0, len(content))]


def remove(content: bytes, random: Random) -> bytes:
    """Remove a part."""
    start, end = _slice(content, random, 400)
    return content[:start] + content[end:]


def repeat(content: bytes, random: Random) -> bytes:
    """Repeat a part."""
    start, end = _slice(content, random, 4000)
    return content[:end] + content[start:]


def splice(content: bytes, random: Random) -> bytes:
    """Overwrite a part with another one."""
    start, end = _slice(content, random, 400)
    place = random.randint(0, len(content))
    return (
        content[:place]
        + content[start:end]
        + content[place + (end - start) * random.randrange(2) :]
    )


def insert(content: bytes, random: Random) -> bytes:
    """Insert a token that a reader knows in a wrong place."""
    place = random.randint(0, len(content))
    return content[:place] + random.choice(INSERTS) + content[place:]


def huge_varint(content: bytes, random: Random) -> bytes:
    """Make a length or number of a binary message huge."""
    place = random.randint(0, len(content))
    return content[:place] + random.choice(HUGE_VARINTS) + content[place + random.randrange(3) :]


def number(content: bytes, random: Random) -> bytes:
    """Replace a number of a text with an extreme one."""
    found = list(re.finditer(rb"(?<=[:\s])-?[0-9.]+(?=\s)", content))
    if not found:
        return content
    match = random.choice(found)
    return content[: match.start()] + random.choice(NUMBERS).encode() + content[match.end() :]


def word(content: bytes, random: Random) -> bytes:
    """Replace a word of a text with another word of it."""
    found = list(re.finditer(rb"[A-Za-z_]\w+", content))
    if not found:
        return content
    match = random.choice(found)
    return content[: match.start()] + random.choice(found).group() + content[match.end() :]


def layer_type(content: bytes, random: Random) -> bytes:
    """Change the type of a layer, with the same bottoms and settings."""
    found = list(re.finditer(rb'(?<=type: ")\w+', content))
    if not found:
        return content
    match = random.choice(found)
    return content[: match.start()] + random.choice(TYPES) + content[match.end() :]


def nest(content: bytes, random: Random) -> bytes:
    """Nest blocks deeply."""
    depth, place = random.choice(DEPTHS), random.randint(0, len(content))
    block = random.choice((b"layer {", b"net_param { ", b"a {", b"[", b"layers { layer { "))
    return (
        content[:place]
        + block * depth
        + (b"}" * depth if random.randrange(2) else b"")
        + content[place:]
    )


def nest_binary(content: bytes, random: Random) -> bytes:
    """Nest messages deeply: SolverParameter.net_param, unknown groups, NetParameter.layer."""
    depth = random.choice(DEPTHS)
    tag = random.choice((b"\x0b", b"\xa3\x06", b"\xca\x01", b"\xa2\x06"))
    if tag in (b"\x0b", b"\xa3\x06"):  # groups have no length
        return content + tag * depth
    inner = b""
    for _ in range(min(depth, 300)):
        inner = tag + _varint(len(inner)) + inner
    return content + inner


def huge_shape(content: bytes, random: Random) -> bytes:
    """Give a blob dimensions whose product is beyond any memory, or beyond 64 bits."""
    shape = BlobProto()
    shape.shape.dim.extend(
        random.choice((0, 1, 2**16, 2**31, 2**62, -1)) for _ in range(random.randint(1, 5))
    )
    layer = NetParameter()
    layer.layer.add(name=random.choice(("conv1", "ip1", "fc"))).blobs.append(shape)
    return content + layer.SerializeToString()


TEXT: tuple[Mutation, ...] = (
    flip, noise, cut_short, remove, repeat, splice, insert, number, number, number, number, word, word,
    layer_type, layer_type, nest,
)  # fmt: skip
BINARY: tuple[Mutation, ...] = (
    flip,
    flip,
    noise,
    cut_short,
    remove,
    repeat,
    splice,
    huge_varint,
    nest_binary,
)
MODEL: tuple[Mutation, ...] = (*BINARY, huge_shape)


def unpacked(net: NetParameter) -> bytes:
    """Return the net in binary form with unpacked numbers of its blobs, as older versions of
    protobuf wrote it.
    """
    written = b""
    for layer in net.layer:
        bare = type(layer)()
        bare.CopyFrom(layer)
        del bare.blobs[:]
        content = bare.SerializeToString()
        for blob in layer.blobs:
            numbers = BlobProto(data=blob.data).data
            rest = BlobProto()
            rest.CopyFrom(blob)
            rest.ClearField("data")
            body = rest.SerializeToString() + b"".join(_fixed(n) for n in numbers)
            content += b"\x3a" + _varint(len(body)) + body
        written += b"\xa2\x06" + _varint(len(content)) + content
    return written


def _fixed(value: float) -> bytes:
    """Return one number of BlobProto.data with its tag: field 5, 32 bits."""
    return b"\x2d" + struct.pack("<f", value)


def _slice(content: bytes, random: Random, longest: int) -> tuple[int, int]:
    start = random.randint(0, len(content))
    return start, min(len(content), start + random.randint(0, longest))


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])
