"""Placement is a balanced partition that everyone computes alike."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_server.protocol.placement import (
    BALANCE,
    LEAST_CHUNK_ELEMENTS,
    SMALLEST_ELEMENTS,
    UNEVEN,
    Placement,
    chunk_elements,
)
from ps_server.protocol.placement import place as place_store
from ps_server.protocol.settings import (
    CHUNK_ELEMENTS,
    CHUNKS_A_SERVER,
    CHUNKS_A_SHARD,
    Keeping,
    NewtonSchulz,
    Rule,
    RuleKind,
    StoreSpec,
    TableSpec,
)

SIZES = st.lists(st.integers(1, 4 * CHUNK_ELEMENTS), min_size=1, max_size=30)


def tables(sizes: list[int], rows: int = 0) -> list[TableSpec]:
    return [TableSpec(name=str(i), size=size, rows=rows) for i, size in enumerate(sizes)]


def place(
    specs: list[TableSpec], shards: int, loads: tuple[int, ...] = (), chunks: int = CHUNKS_A_SHARD
) -> Placement:
    return place_store(
        StoreSpec(workers=1, shards=shards, tables=tuple(specs), loads=loads, chunks=chunks)
    )


def elements(placement: Placement, shards: int) -> list[int]:
    """The number of elements on each shard."""
    return [sum(chunk.size for chunk in placement.of_shard(shard)) for shard in range(shards)]


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(1, 9), st.integers(0, 50))
def test_every_element_is_in_one_chunk_and_the_load_is_even(
    sizes: list[int], shards: int, rows: int
) -> None:
    placement = place(tables(sizes, rows), shards)
    for size, row in zip(sizes, placement.chunks, strict=True):
        assert row[0].start == 0
        assert row[-1].stop == size
        assert all(a.stop == b.start for a, b in itertools.pairwise(row))
        assert [chunk.index for chunk in row] == list(range(len(row)))
    on_shards = elements(placement, shards)
    assert sum(on_shards) == sum(sizes)
    mean = sum(sizes) / shards
    if not rows and mean >= SMALLEST_ELEMENTS:
        assert max(on_shards) <= max(
            BALANCE * mean, min(UNEVEN * mean, mean + 2 * LEAST_CHUNK_ELEMENTS)
        )


@pytest.mark.parametrize("shards", range(2, 20))
def test_one_chunk_too_many_is_still_even(shards: int) -> None:
    placement = place(tables([CHUNK_ELEMENTS] * (10 * shards + 1)), shards)
    assert max(elements(placement, shards)) <= BALANCE * (10 * shards + 1) * CHUNK_ELEMENTS / shards


def test_vgg_fc6_is_spread_over_all_shards() -> None:
    placement = place(tables([25088 * 4096, 4096 * 4096, 4096 * 1000]), 8)
    on_shards = elements(placement, 8)
    assert max(on_shards) * 8 <= BALANCE * sum(on_shards)
    assert len({chunk.shard for chunk in placement.chunks[0]}) == 8


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_a_model_of_some_megabytes_has_an_even_load(shards: int) -> None:
    convolutions = [34_848, 96, 307_200, 256, 884_736, 384, 663_552, 384, 442_368, 256]
    placement = place(tables(convolutions), shards)
    assert max(elements(placement, shards)) * shards <= 1.25 * sum(convolutions)


@pytest.mark.parametrize(
    ("shards", "chunks", "over"), [(2, 12, 1.05), (4, 12, 1.05), (8, 12, 1.1), (32, 20, 2.0)]
)
def test_a_small_model_has_few_chunks(shards: int, chunks: int, over: float) -> None:
    """530,000 elements of which two matrices have 262,144 each."""
    sizes = [262_144, 512, 262_144, 512, 5120, 10]
    placement = place(tables(sizes), shards)
    assert sum(map(len, placement.chunks)) <= chunks
    assert max(elements(placement, shards)) * shards <= over * sum(sizes)


@pytest.mark.parametrize(
    ("elements", "planes", "used"),
    [(100, 1, 1), (145_578, 1, 2), (530_442, 1, 4), (530_442, 4, 2), (20_000_000, 1, 16)],
)
@pytest.mark.parametrize("shards", [1, 4, 32])
def test_on_one_machine_the_shards_used_do_not_grow_with_the_workers(
    shards: int, elements: int, planes: int, used: int
) -> None:
    store = StoreSpec(
        workers=planes * shards,
        hosts=(planes,) * shards,
        shards=shards,
        chunks=1,
        tables=tuple(tables([elements // 2, elements // 4, elements // 4])),
    )
    chunks = itertools.chain(*place_store(store).chunks)
    assert {chunk.shard for chunk in chunks} == set(range(min(used, shards)))


@pytest.mark.parametrize("rows", [0, 5])
def test_a_matrix_is_one_chunk_and_does_not_cut_the_others_to_pieces(rows: int) -> None:
    rule = Rule(kind=RuleKind.MUON, matrix=NewtonSchulz(columns=CHUNK_ELEMENTS))
    matrix = TableSpec(name="matrix", size=40 * CHUNK_ELEMENTS, rows=rows, rule=rule)
    others = tables([CHUNK_ELEMENTS] * 9, rows=rows)
    placement = place([*others, matrix], 3)
    (whole,) = placement.chunks[-1]
    assert (whole.start, whole.stop) == (0, matrix.size)
    assert elements(placement, 3)[whole.shard] == matrix.size
    assert sum(map(len, placement.chunks)) == 9 * (rows or 1) + 1


def test_copies_do_not_count_for_the_load() -> None:
    copy = TableSpec(name="fc6", size=10 * CHUNK_ELEMENTS, keeping=Keeping.COPY)
    specs = [copy, *tables([CHUNK_ELEMENTS] * 4)]
    placement = place(specs, 2)
    assert elements(Placement(placement.chunks[1:]), 2) == [2 * CHUNK_ELEMENTS] * 2
    assert len({chunk.shard for chunk in placement.chunks[0]}) == 2


@pytest.mark.parametrize("loads", [(1, 3), (5, 2, 2)])
def test_shards_carry_their_loads(loads: tuple[int, ...]) -> None:
    specs = tables([7 * CHUNK_ELEMENTS, 3 * CHUNK_ELEMENTS, 1000])
    placement = place(specs, len(loads), loads)
    whole = sum(spec.size for spec in specs)
    for own, load in zip(elements(placement, len(loads)), loads, strict=True):
        assert own <= BALANCE * whole * load / sum(loads)


@pytest.mark.parametrize(
    ("elements", "shards", "chunks", "expected"),
    [
        (1, 1, CHUNKS_A_SHARD, 2**16),
        (25_500_000, 4, CHUNKS_A_SHARD, 2**19),  # ResNet-50: 2 MiB
        (25_500_000, 4, CHUNKS_A_SERVER, 2**18),
        (61_000_000, 4, CHUNKS_A_SERVER, 2**19),  # AlexNet
        (10**9, 1, CHUNKS_A_SHARD, 2**19),
    ],
)
def test_a_chunk_is_a_small_part_of_what_a_shard_carries(
    elements: int, shards: int, chunks: int, expected: int
) -> None:
    assert chunk_elements(elements, shards, chunks) == expected
    (row,) = place(tables([elements]), shards, chunks=chunks).chunks
    assert max(chunk.size for chunk in row) <= expected


def test_rows_cut_a_table() -> None:
    (row,) = place(tables([10], rows=3), 1).chunks
    assert [(chunk.start, chunk.stop) for chunk in row] == [(0, 4), (4, 8), (8, 10)]


def test_more_rows_than_elements() -> None:
    (row,) = place(tables([3], rows=100), 1).chunks
    assert len(row) == 3


def test_shards_share_the_parts_of_each_tensor_among_planes() -> None:
    parts = [
        TableSpec(name=f"w{layer}, part {plane}", size=LEAST_CHUNK_ELEMENTS, plane=plane)
        for plane in range(4)
        for layer in range(3)
    ]
    store = StoreSpec(workers=8, hosts=(4, 4), shards=2, tables=tuple(parts))
    chunks = place_store(store).chunks
    for layer in range(3):
        homes = [chunks[3 * plane + layer][0].shard for plane in range(4)]
        assert sorted(homes) == [0, 0, 1, 1]
