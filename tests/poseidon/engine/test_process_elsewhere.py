"""Errors of processes that the user's code has started."""

from __future__ import annotations

import concurrent.futures.process
import multiprocessing.pool
import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._utils import ExceptionWrapper
from torch.multiprocessing.spawn import ProcessRaisedException

from poseidon.engine.process import raised_elsewhere

HERE = os.path.basename(__file__)


def load(index: int) -> int:
    raise ValueError(f"picture {index}\nis damaged")


LINE = load.__code__.co_firstlineno + 1


def caught(run: Callable[[], object]) -> BaseException:
    try:
        run()
    except Exception as error:  # noqa: BLE001 - any
        return error
    raise AssertionError("nothing was raised")


def of_loader() -> BaseException:
    """As the loop gets it from a worker of a DataLoader."""
    try:
        load(3)
    except ValueError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    return caught(wrapped.reraise)


def of_pool() -> BaseException:
    return _with_cause(multiprocessing.pool.ExceptionWithTraceback)  # type: ignore[attr-defined]


def of_executor() -> BaseException:
    return _with_cause(concurrent.futures.process._ExceptionWithTraceback)


def _with_cause(wrapper: Any) -> BaseException:
    error = caught(lambda: load(3))
    rebuild, arguments = wrapper(error, error.__traceback__).__reduce__()
    return rebuild(*arguments)  # type: ignore[no-any-return]


def of_spawn() -> BaseException:
    """A DataLoader's error in a process of torch.multiprocessing.spawn."""
    inner = "".join(traceback.format_exception(of_loader()))
    return ProcessRaisedException(
        f"\n\n-- Process 1 terminated with the following error:\n{inner}\n", 1, 4711
    )


@pytest.mark.parametrize("make", [of_loader, of_pool, of_executor, of_spawn])
def test_the_innermost_line_of_the_user_and_its_error(make: Callable[[], BaseException]) -> None:
    found = raised_elsewhere(make())
    assert found is not None
    assert (found.location, found.problem) == (
        f"{HERE}, line {LINE}",
        "ValueError: picture 3 is damaged",
    )


def test_a_line_of_a_library_is_not_the_users() -> None:
    try:
        torch.utils.data.default_collate([object()])
    except Exception:  # noqa: BLE001 - any
        error = caught(ExceptionWrapper(where="in DataLoader worker process 0").reraise)
    text = str(error).replace(__file__, torch.__file__)
    found = raised_elsewhere(RuntimeError(text))
    assert found is not None
    assert found.location == ""


def test_a_long_text_is_cut() -> None:
    text = f"Original Traceback (most recent call last):\nValueError: {'long ' * 1000}"
    found = raised_elsewhere(RuntimeError(text))
    assert found is not None
    assert len(found.problem) < 420


@pytest.mark.parametrize("text", ["", "no Traceback", "Traceback (most recent call last):\n  cut"])
def test_an_error_of_this_process(text: str) -> None:
    assert raised_elsewhere(RuntimeError(text)) is None
