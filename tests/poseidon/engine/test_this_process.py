"""What a process knows of itself and of its script."""

from __future__ import annotations

import pytest
import torch

from poseidon.engine.this_process import (
    PROCESS,
    close_at_end,
    compute_as_everywhere,
    current_context,
    current_line,
    is_in_job,
    line_of,
    name_lines_of,
    next_context,
    place_of,
    running_in,
    this_worker,
)
from poseidon.engine.worker_context import ThisWorker, WorkerContext
from poseidon.exchange.membership import Membership
from ps_server.network import Network


class Opened:
    def __init__(self, name: str, closed: list[str], *, fails: bool = False) -> None:
        self._name, self._closed, self._fails = name, closed, fails

    def close(self) -> None:
        self._closed.append(self._name)
        if self._fails:
            raise ValueError(self._name)


def test_a_process_is_one_worker_inside_the_block_alone() -> None:
    context = WorkerContext(member=Membership(network=Network(rank=2, size=5)))
    assert not is_in_job()
    with running_in(context):
        assert is_in_job()
        assert current_context() is context
        assert (this_worker().rank, this_worker().size) == (2, 5)
        assert [next_context().number for _ in range(2)] == [0, 1]
    assert not is_in_job()
    assert this_worker() == ThisWorker()


def test_what_is_open_is_closed_last_first_also_after_an_error() -> None:
    closed: list[str] = []
    with pytest.raises(ValueError, match="second"), running_in(WorkerContext()):
        close_at_end(Opened("first", closed))
        close_at_end(Opened("second", closed, fails=True))
        close_at_end(Opened("third", closed))
    assert closed == ["third", "second", "first"]
    assert not PROCESS.opened


def raised() -> BaseException:
    try:
        raise KeyError("x")
    except KeyError as error:
        return error


def test_an_error_has_the_line_of_the_script_or_of_the_function_that_it_calls() -> None:
    error = raised()
    line = line_of(error, __file__)
    assert line is not None
    assert place_of(error, __file__) == f"test_this_process.py, line {line}"
    assert place_of(error, "/elsewhere/train.py") == "train.py"
    with running_in(WorkerContext()):
        name_lines_of(__file__, "train() in page.ipynb")
        assert place_of(error, "/elsewhere/train.py") == f"train() in page.ipynb, line {line}"
        assert current_line("/elsewhere/train.py").startswith("train() in page.ipynb, line ")
        PROCESS.called = None
    assert current_line("/elsewhere/train.py") == ""


def test_a_script_that_does_not_parse_has_the_line_of_its_error() -> None:
    with pytest.raises(SyntaxError) as caught:
        compile("x = 1\ny = (\n", "train.py", "exec")
    assert place_of(caught.value, "train.py") == f"train.py, line {caught.value.lineno}"


@pytest.mark.parametrize(("given", "threads"), [(False, 1), (True, 3)])
def test_virtual_workers_of_a_job_compute_with_one_thread_unless_it_has_a_number(
    given: bool, threads: int
) -> None:
    said: list[str] = []
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with running_in(WorkerContext(threads_given=given)):
            compute_as_everywhere(said.append)
        assert torch.get_num_threads() == threads
        assert any("--threads=N sets" in sentence for sentence in said) is not given
    finally:
        torch.set_num_threads(before)
