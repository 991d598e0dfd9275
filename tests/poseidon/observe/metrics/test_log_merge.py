"""Logs of many processes in one order."""

from __future__ import annotations

from poseidon.observe.metrics.log_merge import merge_logs


def line(second: int, text: str, severity: str = "I") -> str:
    return f"{severity}1126 20:40:{second:02d}.731869 29444 solver.cpp:294] {text}"


def test_lines_come_in_the_order_of_their_times() -> None:
    logs = {
        "worker 0": [line(1, "a"), line(5, "b"), line(5, "c")],
        "worker 1": [line(2, "d"), line(5, "e", "W"), line(6, "f")],
    }
    order = [(name[-1], text[-1]) for name, text in merge_logs(logs)]
    assert order == [("0", "a"), ("1", "d"), ("0", "b"), ("0", "c"), ("1", "e"), ("1", "f")]


def test_a_line_without_a_time_stays_behind_the_one_before_it() -> None:
    logs = {
        "0": ["no head", line(3, "a"), "Traceback", "  in b", line(4, "c")],
        "1": [line(3, "d")],
    }
    assert [text[-4:] for _, text in merge_logs(logs)] == [
        "head",
        "94] a"[-4:],
        "back",
        "in b",
        "4] d",
        "4] c",
    ]


def test_a_clock_that_is_set_back_changes_no_order() -> None:
    logs = {"0": [line(9, "a"), line(2, "b")], "1": [line(5, "c"), line(9, "d")]}
    assert [text[-1] for _, text in merge_logs(logs)] == ["c", "a", "b", "d"]


def test_nothing_of_nothing() -> None:
    assert list(merge_logs({})) == []
    assert list(merge_logs({"0": []})) == []
