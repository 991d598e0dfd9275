"""`poseidon.distribute`: any torch module, trained by all workers of a job.

    import poseidon

    with poseidon.distribute(model, poseidon.SGD(lr=0.1, momentum=0.9)) as group:
        for x, y in DataLoader(dataset, sampler=group.sampler(dataset), batch_size=32):
            criterion(model(x), y).backward()
            group.step()

`poseidon run` starts a script on every worker; under plain `python` the same script trains alone.

Law: `_PROCESS` is the only process-wide state of this library. A process is one worker, and a
user's script cannot receive its context as an argument. `poseidon.torch.script` sets it
once. Under plain `python`, `distribute` also sets `sys.excepthook`, unless the script has one.
"""

from __future__ import annotations

import gc
import inspect
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from poseidon.base.settings import are_threads_set, variable_of_tasks
from poseidon.engine.worker_context import Loops, ThisWorker, WorkerContext
from poseidon.errors import PoseidonError, UsageError
from poseidon.exchange.kinds import ExchangeKind
from poseidon.exchange.module_hooks import uncompiled
from poseidon.exchange.options import ExchangeOptions
from poseidon.torch.group import Group
from poseidon.torch.group_loop import Update
from poseidon.torch.tables.plan import check_tables, optimizers_of, plan_tables
from poseidon.torch.tensors import (
    Buffers,
    DistributeOptions,
    Example,
    ModuleTensors,
    RunsOn,
    module_tensors,
    rows_by_batch_size,
    rows_by_example,
)
from poseidon.torch.update_rules import Outer, UpdateRule
from poseidon.torch.updates.local_optimizer import LocalOptimizerUpdate, is_synchronous
from poseidon.torch.updates.rule import RuleUpdate
from poseidon.torch.updates.shard_optimizer import ShardOptimizerUpdate
from poseidon.torch.updates.worker_optimizer import MeanOptimizerUpdate
from ps_server.protocol.virtual_workers import VirtualWorkers

Choice = TypeVar("Choice", RunsOn, Buffers)


class _Process:
    """The context of this process in its job, and its groups; if it trains alone, its loops. Of a
    function that `poseidon.launch` calls, the file and its name.
    """

    context: WorkerContext | None = None
    called: tuple[str, str] | None = None
    loops: Loops = Loops()
    groups: ClassVar[list[Group]] = []


_PROCESS = _Process()


@contextmanager
def running_in(context: WorkerContext) -> Iterator[None]:
    """Make this process one worker of a job inside the block.

    Groups that are open at the end are closed.
    """
    _PROCESS.context, _PROCESS.called = context, None
    try:
        yield
    finally:
        groups = list(_PROCESS.groups)
        _PROCESS.context = None
        _PROCESS.groups.clear()
        with ExitStack() as closing:  # the last one first
            for group in groups:
                closing.callback(group.close)


def current_context() -> WorkerContext:
    """Return the context of this process; outside of a job, a context for training alone."""
    return _PROCESS.context or WorkerContext()


def this_worker() -> ThisWorker:
    """Return rank, number of workers and device of this process.

    May be called before `distribute`.
    """
    return current_context().worker


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
    context.log(context.loops.steps if iteration is None else iteration, values)


def compute_with_one_thread(say: Callable[[str], object]) -> None:
    """Compute with one thread, as the workers of a job with virtual workers do, unless the user
    has set a number: bits may depend on it.
    """
    if torch.get_num_threads() > 1 and not are_threads_set():
        torch.set_num_threads(1)
        say(
            "virtual workers: computing with 1 thread, as in a job; OMP_NUM_THREADS=N sets "
            "another number"
        )


def distribute(
    module: nn.Module,
    how: UpdateRule | torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    clip: float | None = None,
    passes: int = 1,
    buffers: str = "average",
    example: Example | None = None,
    batch_size: int = 0,
    compress: str = "",
    local_steps: int | None = None,
    outer: Outer | None = None,
    virtual_workers: int | None = None,
    on: str | None = None,
) -> Group:
    """Train a module on all workers of this job. Return once all workers have rank 0's tensors.

    Every worker calls it with the same arguments and a module of the same shape, on its device. A
    script may distribute several modules, each with a rule or an optimizer of its own: all workers
    in the same order.

    Args:
        module: a module, or `torch.compile(module)`. Its parameters are
            float32, bfloat16 or float16. Its `state_dict`
            keeps its form.
        how: a rule that the shards apply, such as `poseidon.SGD`; or a torch.optim optimizer.
            Several optimizers of one module with `on="shards"`.
        clip: largest L2 norm of all mean gradients together, with local steps of this worker's own;
            None: no limit.
        passes: backward passes of a step, whose gradients add up; they are sent in the last one.
        buffers: `average`: after each step, running means and variances are the mean over the
            workers; `own`: each worker keeps its own.
        example: an input, positional arguments as a tuple, or arguments by name. The module runs on
            it once, without gradients, to find the fully-connected weights that may travel as
            factors, and their rows.
        batch_size: instead of an example, if every fully-connected layer runs once, on one row a
            record. With neither, whole gradients travel.
        compress: lossy codecs of parameters, as `--compress` of `poseidon run`: `int8`, or
            `head.*=topk:0.01,int8` with patterns of parameter names. Empty: the flag's.
            docs/compression.md has the codecs.
        local_steps: steps that each worker makes by itself before all exchange what they have
            changed; 0: none, all exchange in every step. None: as --local_steps of the job says.
        outer: the rule that applies the mean change of a round of local steps; None:
            as --local_steps of the job says.
        virtual_workers: how many the job has, the number of workers or more. Bits depend on it, and
            not on the number of workers. Under plain `python` one process computes for all, with
            one thread unless OMP_NUM_THREADS is set. None: as --virtual_workers of the job says, by default one
            a worker.
        on: what applies the rule of a torch.optim optimizer. `workers`, the default: the optimizer
            itself, on every worker, on mean gradients. `shards`: the shards; workers keep no state
            of it.

    Raises:
        UsageError: an argument is out of range, or the module cannot be distributed.
        ServerError: other workers did not join, or have a different module.
    """
    _explain_errors()
    options = DistributeOptions(
        clip=clip,
        passes=passes,
        buffers=_member(Buffers, "buffers", buffers),
        example=example,
        batch_size=batch_size,
        compress=compress,
        local_steps=local_steps,
        outer=outer,
        virtual_workers=virtual_workers,
        on=_runs_on(on, how),
    )
    context = _context()
    if _PROCESS.context is None and virtual_workers is not None:
        compute_with_one_thread(context.say)
    group = join(module, how, options, context)
    if _PROCESS.context is not None:
        _PROCESS.groups.append(group)
        gc.collect()
        # the module and imported code stay to the end: the collector need not scan them
        gc.freeze()
    return group


def join(
    module: nn.Module,
    how: UpdateRule | torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    options: DistributeOptions,
    context: WorkerContext,
) -> Group:
    """Distribute a module on a worker with a given context. See `distribute`."""
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"distribute() was given a {type(module).__name__} as its module; expected a "
            "torch.nn.Module, such as nn.ModuleList([...]) of several"
        )
    context = _with_virtual_workers(context, options.virtual_workers)
    context = _with_local_steps(_compressed(context, options.compress), options)
    inner = uncompiled(module)
    tables = plan_tables(inner, how, context.member.options)
    check_tables(tables, context.member, options.clip)
    tensors = module_tensors(inner, options.buffers, tables)
    # the layers of a compiled module do not run, so there are no factors to take
    if inner is module:
        tensors = replace(tensors, rows=_rows(module, options))
    update, context = _update_of(how, tensors, options, context)
    return Group(module, update, context)


def _update_of(
    how: UpdateRule | torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    tensors: ModuleTensors,
    options: DistributeOptions,
    context: WorkerContext,
) -> tuple[Update, WorkerContext]:
    """Return what applies gradients, and the context with the exchange that it needs."""
    if isinstance(how, UpdateRule):
        return RuleUpdate(how, tensors, options, context), context
    if options.on is RunsOn.SHARDS and (optimizers := optimizers_of(how)):
        context = _through_shards(context)
        return ShardOptimizerUpdate(optimizers, tensors, options, context), context
    if isinstance(how, torch.optim.Optimizer):
        exchange = context.member.options
        if is_synchronous(how, options, exchange):
            context = _with_options(context, exchange.without_local_steps)
        elif exchange.local_steps:
            return LocalOptimizerUpdate(how, tensors, options, context), context
        return MeanOptimizerUpdate(how, tensors, options, context), context
    raise UsageError(
        f"distribute() was given a {type(how).__name__}; expected a rule such as "
        "poseidon.SGD(lr=0.1), a torch.optim optimizer, or several of one module with "
        'on="shards"'
    )


def _compressed(context: WorkerContext, compress: str) -> WorkerContext:
    given = context.member.options.compress
    if not compress or compress == given:
        return context
    if given:
        raise UsageError(
            f"distribute() has compress={compress!r} and the job --compress={given}; expected one "
            "of them"
        )
    return _with_options(context, replace(context.member.options, compress=compress))


def _with_virtual_workers(context: WorkerContext, count: int | None) -> WorkerContext:
    given = context.member.virtual_workers
    if count is None or (given is not None and given.count == count):
        return context
    if given is not None:
        raise UsageError(
            f"distribute() has virtual_workers={count}, and the job --virtual_workers="
            f"{given.count}; expected one of them"
        )
    if count < context.worker.size:
        raise UsageError(
            f"virtual_workers is {count}, and the job has {context.worker.size} workers; expected "
            "one or more for each"
        )
    virtual = VirtualWorkers.spread(count, [1.0] * context.worker.size)
    return replace(context, member=replace(context.member, virtual_workers=virtual))


def _with_local_steps(context: WorkerContext, options: DistributeOptions) -> WorkerContext:
    """Return the context with the local steps that the arguments ask for in place of the flags'."""
    exchange, steps, outer = context.member.options, options.local_steps, options.outer
    if steps is None:
        steps = exchange.local_steps
    if not steps:
        if outer is not None:
            raise UsageError(
                "outer is for local steps; expected local_steps=H too, with H of 1 or more"
            )
        return _with_options(context, exchange.without_local_steps)
    if outer is not None:
        exchange = replace(
            exchange,
            local_steps=steps,
            outer_lr=float(outer.lr),
            outer_momentum=float(outer.momentum),
            outer_nesterov=outer.nesterov,
            sync_fragments=outer.fragments,
            sync_delay=outer.delay,
            sync_mix=float(outer.mix),
            quorum=outer.quorum,
            quorum_grace=float(outer.grace),
        )
    exchange = replace(exchange, local_steps=steps)
    return _with_options(context, exchange.of_workers(context.member.placed))


def _with_options(context: WorkerContext, options: ExchangeOptions) -> WorkerContext:
    return replace(context, member=replace(context.member, options=options))


def _through_shards(context: WorkerContext) -> WorkerContext:
    """Return the context with all gradients sent to the shards, unless the job names an exchange:
    by others the workers apply the rules themselves, and keep the state.
    """
    options = context.member.options
    if options.kind is not ExchangeKind.AUTO:
        return context
    return _with_options(context, replace(options, kind=ExchangeKind.SERVER))


def _rows(module: nn.Module, options: DistributeOptions) -> dict[nn.Parameter, int]:
    if options.example is not None:
        rows = rows_by_example(module, options.example)
    else:
        rows = rows_by_batch_size(module, options.batch_size)
    return {weight: count for weight, count in rows.items() if weight.dtype is torch.float32}


def _explain_errors() -> None:
    """Let errors that end a script under plain `python` be one sentence."""
    if _PROCESS.context is None and sys.excepthook is sys.__excepthook__:
        sys.excepthook = print_uncaught


def _context() -> WorkerContext:
    if _PROCESS.context is None:
        _check_alone(variable_of_tasks())
        script, loops = _script(), _PROCESS.loops
        return WorkerContext(
            script=Path(script).stem if script else "checkpoint",
            say=_say,
            number=len(loops.open),  # a session may begin as many as it likes, one after the other
            loops=loops,
        )
    return _PROCESS.context.of_next_loop()


def _check_alone(tasks: str) -> None:
    """Refuse a script that torchrun has started several times by itself; warn of
    one that mpirun or srun has started so.
    """
    if not tasks:
        return
    sentence = (
        f"{tasks}: this process is one of several, but no worker of a job, so each would train "
        "alone; expected `-m poseidon worker --key_file=FILE run SCRIPT` in place of the script "
        "(docs/schedulers), or `poseidon run`"
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


def _say(sentence: str) -> None:
    print(f"poseidon: {sentence}", file=sys.stderr, flush=True)


def name_lines_of(file: str, name: str) -> None:
    """Let errors name lines of this file in place of the script's: the script only calls a function
    of it.

    Args:
        file: as tracebacks have it.
        name: of the file for the user.
    """
    _PROCESS.called = file, name


def place_of(error: BaseException, script: str) -> str:
    """Return the line of a script that raised an error, as `train.py, line 7`; without the line, if
    it was raised elsewhere.
    """
    file, name = _PROCESS.called or (script, Path(script).name)
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
    file, name = _PROCESS.called or (script, Path(script).name)
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return f"{name}, line {frame.f_lineno}" if frame is not None else ""


def _runs_on(name: str | None, how: object) -> RunsOn:
    is_rule = isinstance(how, UpdateRule)
    if name is None:
        return RunsOn.SHARDS if is_rule else RunsOn.WORKERS
    found = _member(RunsOn, "on", name)
    if is_rule and found is RunsOn.WORKERS:
        raise UsageError(
            f"on is 'workers' with poseidon.{type(how).__name__}, a rule that the shards apply; "
            "expected on='shards', or a torch.optim optimizer"
        )
    return found


def _member(kind: type[Choice], argument: str, name: str) -> Choice:
    try:
        return kind(name)
    except ValueError as error:
        names = " or ".join(f"'{member.value}'" for member in kind)
        raise UsageError(f"{argument} is {name!r}; expected {names}") from error
