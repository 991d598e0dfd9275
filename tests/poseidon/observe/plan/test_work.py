"""The pieces of work that are timed."""

from __future__ import annotations

import pytest

from poseidon.observe.plan import work
from poseidon.observe.plan.costs import ARITHMETIC
from poseidon.observe.plan.small_job import CHUNK_ELEMENTS, CHUNKS, SMALL_ELEMENTS, store_of


@pytest.mark.parametrize("name", ARITHMETIC)
def test_every_piece_takes_some_time(name: str) -> None:
    assert 0 < getattr(work, name)(0.0) < 100


def test_products_are_told_from_the_rest_by_the_number_of_rows() -> None:
    row_s, rest_s = 1e-4, 3e-3
    few_s, many_s = (rest_s + rows * row_s for rows in (work.FEW, work.MANY))
    flops, per_byte = work.products(few_s, many_s)
    assert flops == pytest.approx(2 * work.OUTPUTS * work.INPUTS / row_s)
    assert per_byte == pytest.approx(rest_s / (4 * work.OUTPUTS * work.INPUTS))


def test_powersgds_time_for_each_rank_is_told_from_the_rest() -> None:
    size, rank_s, rest_s = 4 * work.OUTPUTS * work.INPUTS, 1e-2, 5e-2
    per_byte, per_rank = work.of_ranks(rest_s + work.LOW * rank_s, rest_s + work.HIGH * rank_s)
    assert (per_byte * size, per_rank * size) == pytest.approx((rest_s, rank_s))


def test_a_store_of_int8_encodes_both_directions() -> None:
    tables = store_of(workers=2, small=0, int8=True).tables
    assert all(table.gradient_codec == table.value_codec is not None for table in tables)
    assert store_of(workers=2, small=0).tables[0].gradient_codec is None


def test_a_store_has_small_tables_between_its_chunks() -> None:
    sizes = [table.size for table in store_of(workers=2, small=10).tables]
    assert sizes.count(CHUNK_ELEMENTS) == 2 * CHUNKS
    assert sizes.count(SMALL_ELEMENTS) == 10
    assert sizes[0] == CHUNK_ELEMENTS
    assert sizes[1] == SMALL_ELEMENTS or sizes[2] == SMALL_ELEMENTS
