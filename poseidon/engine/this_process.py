"""This process and its script: which worker it is, where in the script an error comes from, and
`breakpoint()` in it.

Law: a debugger reads the launcher's terminal. Only the worker of a job with one worker, on the
launcher's host, may do so; see `launcher_streams`.

Law: `PROCESS` is the only process-wide state of this library. A process is one worker, and a user's
script cannot receive its context as an argument. `poseidon.torch.script` sets it once. Under plain
`python`, the first group also sets `sys.excepthook`, unless the script has one.
"""

from __future__ import annotations

import inspect
import pdb
import sys
import traceback
import warnings
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor

from poseidon.base.settings import are_threads_set, variable_of_tasks
from poseidon.engine.worker_context import Closing, LoopJob, Loops, ThisWorker, WorkerContext
from poseidon.errors import JobError, PoseidonError, UsageError
from ps_server.numerics import prepare_process, take_code_for_all_alignments

if TYPE_CHECKING:  # it needs psutil, and plain scripts do not
    from poseidon.engine.heartbeat import Watchdog


class Process:
    """The context of this process in its job, and what its script has opened; if it trains alone,
    its loops. Of a function that `poseidon.launch` calls, the file and its name.
    """

    context: WorkerContext | None = None
    called: tuple[str, str] | None = None
    loops: Loops = Loops()
    opened: ClassVar[list[Closing]] = []


PROCESS = Process()


@contextmanager
def running_in(context: WorkerContext) -> Iterator[None]:
    """Make this process one worker of a job inside the block.

    What is open at the end is closed.
    """
    PROCESS.context, PROCESS.called = context, None
    try:
        yield
    finally:
        opened = list(PROCESS.opened)
        PROCESS.context = None
        PROCESS.opened.clear()
        with ExitStack() as closing:  # the last one first
            for one in opened:
                closing.callback(one.close)


def current_context() -> WorkerContext:
    """Return the context of this process; outside of a job, a context for training alone."""
    return PROCESS.context or WorkerContext()


def is_in_job() -> bool:
    """Return whether this process is a worker of a job."""
    return PROCESS.context is not None


def close_at_end(one: Closing) -> None:
    """Close what the script has opened at the end of its job."""
    PROCESS.opened.append(one)


def this_worker() -> ThisWorker:
    """Return rank, number of workers and device of this process.

    May be called before `distribute`.
    """
    context = current_context()
    return ThisWorker(rank=context.rank, size=context.size, device=context.device)


def log(*, iteration: int | None = None, **values: float | Tensor) -> None:
    """Log values of this worker for the job's curves, in a script without a group
    (`poseidon run --ddp`). Otherwise as `Group.log`.

    Args:
        iteration: to which the values belong, 0 or more. None: the steps of the first
            DistributedDataParallel module in this start of the job, so a script that resumes from a
            checkpoint gives its own number.
        values: see `Group.log`.

    Raises:
        UsageError: a name, a value or the iteration cannot be logged.
    """
    context = current_context()
    context.job.log(context.loops.steps if iteration is None else iteration, values)


def compute_as_everywhere(say: Callable[[str], object]) -> None:
    """Compute as every process of a job with virtual workers does: with one thread, unless the user
    has set a number, without denormal numbers, and with MKL's code for all alignments. Bits may
    depend on each.
    """
    context = PROCESS.context
    is_set = are_threads_set() if context is None else context.threads_given
    is_one = torch.get_num_threads() == 1 or is_set
    prepare_process(None if is_one else 1)
    if not is_one:
        setting = "OMP_NUM_THREADS=N" if context is None else "--threads=N"
        say(f"virtual workers: computing with 1 thread; {setting} sets a different number")
    if not take_code_for_all_alignments():
        say(
            "virtual workers: MKL has computed already, by code that a job does not use, so the "
            "bits may differ from a job's; set MKL_CBWR=AUTO,STRICT before Python starts"
        )


def explain_errors() -> None:
    """Let errors that end a script under plain `python` be one sentence."""
    if PROCESS.context is None and sys.excepthook is sys.__excepthook__:
        sys.excepthook = print_uncaught


def next_context() -> WorkerContext:
    """Return the context of the next training loop.

    Raises:
        UsageError: torchrun has started this process as one of several.
    """
    if PROCESS.context is None:
        _check_alone(variable_of_tasks())
        loops = PROCESS.loops
        return WorkerContext(
            job=_PlainJob(),
            number=len(loops.open),  # a session may begin as many as it likes, one after the other
            loops=loops,
        )
    return PROCESS.context.of_next_loop()


def _check_alone(tasks: str) -> None:
    """Refuse a script that torchrun has started several times by itself; warn of
    one that mpirun or srun has started so.
    """
    if not tasks:
        return
    sentence = (
        f"{tasks}: this process is one of several but not a worker of a job, so each would train "
        "alone; start `-m poseidon worker --key_file=FILE run SCRIPT` in place of the script "
        "(docs/schedulers), or use `poseidon run`"
    )
    if tasks.startswith("WORLD_SIZE="):
        raise UsageError(sentence)
    warnings.warn(sentence, stacklevel=4)


def print_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print one sentence for an error of Poseidon that ends a script under plain
    `python`; Python's traceback for others.
    """
    if not isinstance(error, PoseidonError):
        sys.__excepthook__(kind, error, trace)
        return
    script = _script()
    line = line_of(error, script) if script else None
    location = f"{Path(script).name}, line {line}: " if script and line else ""
    print(f"{location}{error}", file=sys.stderr)


def _script() -> str | None:
    """Return the script that this process runs; None in a session."""
    return getattr(sys.modules["__main__"], "__file__", None)


class _PlainJob(LoopJob):
    """The job of a script under plain `python`."""

    def __init__(self) -> None:
        if script := _script():
            self.script = Path(script).stem

    def say(self, sentence: str) -> None:
        print(f"poseidon: {sentence}", file=sys.stderr, flush=True)


def name_lines_of(file: str, name: str) -> None:
    """Let errors name lines of this file in place of the script's: the script only calls a function
    of it.

    Args:
        file: as tracebacks have it.
    """
    PROCESS.called = file, name


def place_of(error: BaseException, script: str) -> str:
    """Return the line of a script that raised an error, as `train.py, line 7`; without the line, if
    it was raised elsewhere.
    """
    file, name = PROCESS.called or (script, Path(script).name)
    line = line_of(error, file)
    return f"{name}, line {line}" if line else name


def line_of(error: BaseException, script: str) -> int | None:
    """Return the line of a script that raised an error; None if it was raised elsewhere."""
    if isinstance(error, SyntaxError) and error.filename == script:
        return error.lineno
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == script
    ]
    return lines[-1] if lines else None


def current_line(script: str) -> str:
    """Return the line of a script that the calling thread is in, as `train.py, line 7`; empty:
    it is in none.
    """
    file, name = PROCESS.called or (script, Path(script).name)
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return f"{name}, line {frame.f_lineno}" if frame is not None else ""


NO_DEBUGGER = (
    "breakpoint() needs a terminal, which only a job with one worker on the launcher's host has; "
    "use --workers=1 and one client"
)
ENDED = "the job was ended in its debugger, or the debugger's input has ended"


def refuse_breakpoints() -> None:
    """Let `breakpoint()` raise an error: a debugger would have nothing to read."""
    sys.breakpointhook = _refuse


def _refuse(*_: object, **__: object) -> NoReturn:
    raise UsageError(NO_DEBUGGER)


def ending(error: BaseException, workers: int) -> JobError | None:
    """Return the error of a job that has ended in a debugger; None: it ended otherwise.

    Args:
        error: what has ended the work; pdb's own, or one that follows from it.
        workers: of the job.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BdbQuit):
            own = JobError(NO_DEBUGGER if workers > 1 else ENDED)
            return own.with_traceback(error.__traceback__)
        cause = cause.__cause__
    return None


@contextmanager
def unwatched(watchdog: Watchdog) -> Iterator[None]:
    """Let a person take any time in pdb, or a debugger made of it, inside the block: the loop does
    not hang.
    """
    interact: Any = pdb.Pdb.interaction

    def interaction(*arguments: Any, **named: Any) -> Any:
        with watchdog.paused():
            return interact(*arguments, **named)

    pdb.Pdb.interaction = interaction  # type: ignore[method-assign]
    try:
        yield
    finally:
        pdb.Pdb.interaction = interact  # type: ignore[method-assign]
