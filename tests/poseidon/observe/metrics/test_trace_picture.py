from __future__ import annotations

from poseidon.observe.metrics.trace_iteration import Bar, IterationView, Transfer
from poseidon.observe.metrics.trace_picture import MOST_TENSORS, draw_iteration


def view(tensors: int) -> IterationView:
    bars = (
        Bar(row=1, kind="forward", name="conv", begin_ms=0, end_ms=5),
        Bar(row=1, kind="wait", name="t0", begin_ms=1, end_ms=3),
        Bar(row=2, kind="send", name="t0", begin_ms=4, end_ms=6),
    )
    ways = tuple(
        Transfer(name=f"t{i}", begin_ms=5, arrival_ms=6 + i, waited_ms=1, used_ms=20)
        for i in range(tensors)
    )
    return IterationView(
        iteration=3,
        length_ms=10,
        until_ms=20,
        bars=bars,
        transfers=ways,
        rows={1: "compute", 2: "send"},
    )


def test_rows_tensors_and_title_are_written_and_two_pictures_are_alike() -> None:
    picture = draw_iteration(view(3), title="worker 0, iteration 3")
    text = picture.decode()
    assert all(
        word in text for word in ("compute", "send", ">t0<", ">t2<", "worker 0, iteration 3")
    )
    assert picture == draw_iteration(view(3), title="worker 0, iteration 3")


def test_of_many_tensors_those_that_took_longest() -> None:
    text = draw_iteration(view(MOST_TENSORS + 5), title="t").decode()
    assert ">t4<" not in text
    assert ">t5<" in text
    assert f">t{MOST_TENSORS + 4}<" in text


def test_other_kinds_and_an_iteration_without_tensors() -> None:
    assert draw_iteration(view(0), title="t", kind="png").startswith(b"\x89PNG")
