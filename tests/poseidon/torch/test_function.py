"""What `poseidon.launch` sends to workers and refuses; `tests/distributed/test_notebooks.py` has
its jobs.
"""

from __future__ import annotations

import runpy
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

import poseidon
from poseidon.engine.this_process import place_of, running_in
from poseidon.engine.worker_context import WorkerContext
from poseidon.errors import JobError, UsageError
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.launcher.request import LauncherKind, ScriptRequest
from poseidon.torch.function import _of_function, _request, _write_call

FACTOR = 3


def note(path: str, value: int) -> None:
    Path(path).write_text(str(FACTOR * value), encoding="utf-8")


def test_the_archive_calls_the_function(tmp_path: Path) -> None:
    script = tmp_path / "note"
    _write_call(script, note, (str(tmp_path / "noted"), 4))
    with running_in(WorkerContext()):
        runpy.run_path(str(script), run_name="__main__")
    assert (tmp_path / "noted").read_text(encoding="utf-8") == "12"


class Shell:
    """IPython's, as far as `launch` asks it."""

    compile: Any = SimpleNamespace(format_code_name=lambda _: ("Cell", "In[5]"))


def fail(path: str, value: int) -> None:
    raise ValueError(path, value)


@pytest.mark.parametrize(
    ("function", "file", "shell", "place"),
    [
        (fail, __file__, None, f"test_function.py, line {fail.__code__.co_firstlineno + 1}"),
        (fail, "<stdin>", None, f"function fail, line {fail.__code__.co_firstlineno + 1}"),
        (fail, "/tmp/ipykernel_1/2.py", Shell(), f"Cell In[5], line {fail.__code__.co_firstlineno + 1}"),
        (partial(fail, "x"), "", None, "function partial"),
    ],
    ids=["file", "session", "notebook", "object"],
)  # fmt: skip
def test_an_error_names_the_line_of_the_function(
    function: Callable[..., object], file: str, shell: Shell | None, place: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The script that calls it is a file that is gone when the user reads the sentence."""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    if isinstance(function, FunctionType):
        function = FunctionType(function.__code__.replace(co_filename=file), {}, "fail")
        function.__module__ = "__main__"
    script = tmp_path / "fail"
    _write_call(script, function, ("x", 4))
    with running_in(WorkerContext()), pytest.raises((ValueError, TypeError)) as raised:
        runpy.run_path(str(script), run_name="__main__")
    assert place_of(raised.value, str(script)) == place
    with running_in(WorkerContext()):  # a later script of this process
        assert place_of(raised.value, str(script)).startswith("fail")


def test_options_are_those_of_the_command_line(tmp_path: Path) -> None:
    request = _request(
        {
            "workers": 2,
            "ddp": True,
            "exchange": ExchangeKind.SERVER,
            "gpu": None,
            "table_staleness": 1,
            "outer_lr": 1.5,
            "local_steps": "4",
            "wait_free": False,
            "elastic": 0,
            "launcher": "local",
        },
        tmp_path,
    )
    assert request == ScriptRequest(
        script=tmp_path,
        workers=2,
        ddp=True,
        elastic=0,
        launcher=LauncherKind.LOCAL,
        exchange=ExchangeOptions(
            kind=ExchangeKind.SERVER, staleness=1, outer_lr=1.5, local_steps=4, wait_free=False
        ),
        server_requested=True,
    )


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(UsageError, match=r"launch\(\) cannot send 'note' .*; expected a function"):
        poseidon.launch(note, args=(threading.Lock(),))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"exchanges": "ps"}, "launch() has no argument 'exchanges'; did you mean 'exchange'?"),
        ({"worker": 2}, "launch() has no argument 'worker'; did you mean 'workers'?"),
        ({"threads": "x"}, "launch(): threads: expected a whole number, found 'x'"),
    ],
)
def test_an_unknown_flag_is_refused(
    flags: dict[str, object], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        poseidon.launch(note, args=("x", 1), **flags)  # type: ignore[arg-type]
    assert (str(caught.value), capsys.readouterr().err) == (sentence, "")


def test_a_worker_starts_no_job(tmp_path: Path) -> None:
    with (
        running_in(WorkerContext(folder=tmp_path)),
        pytest.raises(UsageError, match="called by a worker of a job"),
    ):
        poseidon.launch(note)


def test_an_interrupt_while_workers_start_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(job: object) -> int:
        error = JobError("the job was stopped before it had started")
        error.exit_code = 130
        raise error

    monkeypatch.setattr("poseidon.torch.function.start", interrupted)
    with pytest.raises(KeyboardInterrupt, match="stopped before it had started"):
        poseidon.launch(note, args=("nowhere", 1))


def test_a_traceback_begins_in_the_function() -> None:
    trace = (
        "Traceback (most recent call last):\n"
        '  File "/poseidon/process.py", line 1, in main\n    run()\n'
        '  File "/tmp/x/train/__main__.py", line 13, in <module>\n    function(*arguments)\n'
        '  File "cell", line 9, in train\n    fail()\n'
        "ValueError: bad luck\n"
    )
    assert _of_function(trace, "/tmp/x/train") == (
        "Traceback (most recent call last):\n"
        '  File "cell", line 9, in train\n    fail()\n'
        "ValueError: bad luck\n"
    )
    assert _of_function(trace, "/tmp/y.py") == trace
