"""`poseidon.distribute`: any torch module, trained by all workers of a job.

    import poseidon

    with poseidon.distribute(model, poseidon.SGD(lr=0.1, momentum=0.9)) as group:
        for x, y in DataLoader(dataset, sampler=group.sampler(dataset), batch_size=32):
            criterion(model(x), y).backward()
            group.step()

`poseidon run` starts a script on every worker; under plain `python` the same script trains alone.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from poseidon.engine.this_process import (
    close_at_end,
    compute_as_everywhere,
    explain_errors,
    is_in_job,
    next_context,
)
from poseidon.engine.worker_context import WorkerContext
from poseidon.errors import UsageError
from poseidon.exchange.membership import Membership
from poseidon.exchange.module_hooks import uncompiled
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.torch.factor_rows import Example, rows_by_batch_size, rows_by_example
from poseidon.torch.group import Group
from poseidon.torch.options import Buffers, DistributeOptions, Outer, RunsOn
from poseidon.torch.shards import shards_of
from poseidon.torch.sync_norm import check_norms
from poseidon.torch.tables.plan import check_tables, optimizers_of, plan_tables
from poseidon.torch.tensors import ModuleTensors, module_tensors
from poseidon.torch.update_rules import UpdateRule
from poseidon.torch.updates.group_update import GroupUpdate
from poseidon.torch.updates.local_optimizer import LocalOptimizerUpdate, is_synchronous
from poseidon.torch.updates.optimizer import ShardOptimizerUpdate
from poseidon.torch.updates.rule import RuleUpdate
from poseidon.torch.updates.worker_optimizer import MeanOptimizerUpdate
from ps_server.protocol.virtual_workers import VirtualWorkers

Choice = TypeVar("Choice", RunsOn, Buffers)
How = UpdateRule | torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


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
            one thread unless OMP_NUM_THREADS is set. None: as --virtual_workers of the job says, by
            default one a worker.
        on: what applies the rule of a torch.optim optimizer. `workers`, the default: the optimizer
            itself, on every worker, on mean gradients. `shards`: the shards; workers keep no state
            of it.

    Raises:
        UsageError: an argument is out of range, or the module cannot be distributed.
        ServerError: other workers did not join, or have a different module.
    """
    explain_errors()
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
    context = next_context()
    if virtual_workers is not None:
        compute_as_everywhere(context.job.say)
    group = join(module, how, options, context)
    if is_in_job():
        close_at_end(group)
        gc.collect()
        # the module and imported code stay to the end: the collector need not scan them
        gc.freeze()
    return group


def join(module: nn.Module, how: How, options: DistributeOptions, context: WorkerContext) -> Group:
    """Distribute a module on a worker with a given context. See `distribute`."""
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"distribute() was given a {type(module).__name__} as its module; expected a "
            "torch.nn.Module, such as nn.ModuleList([...]) of several"
        )
    member = _placed(context.member, options.virtual_workers)
    member = replace(member, options=_exchange_of(member, how, options))
    inner = uncompiled(module)
    tables = plan_tables(inner, how, member.options)
    check_tables(tables, member, options.clip)
    shards = shards_of(inner, member)
    tensors = module_tensors(inner, Buffers.OWN if shards else options.buffers, tables)
    if shards is not None:
        _check_shards(tensors, options)
        tensors = replace(tensors, divided=shards, looked_up=frozenset())
        member = replace(member, divides=True)
    # the layers of a compiled module do not run, so there are no factors to take
    elif inner is module:
        tensors = replace(tensors, rows=_rows(module, options))
    context = replace(context, member=member)
    update = _update_of(how, replace(tensors, entry=module, options=options, context=context))
    check_norms(inner, member)
    return Group(update)


def _check_shards(tensors: ModuleTensors, options: DistributeOptions) -> None:
    """Refuse what needs whole parameters of a module that is divided."""
    reason = ""
    if tensors.tables:
        reason = f"the rows of table '{tensors.tables[0].spec.name}' are on the shards already"
    elif options.example is not None or options.batch_size:
        reason = "factors (example= and batch_size=) are of whole weights"
    if reason:
        raise UsageError(
            f"the module was divided by fully_shard(), and {reason}; call distribute() without them"
        )


def _update_of(how: How, tensors: ModuleTensors) -> GroupUpdate:
    """Return what applies gradients."""
    if isinstance(how, UpdateRule):
        return RuleUpdate(how, tensors)
    if tensors.options.on is RunsOn.SHARDS and (optimizers := optimizers_of(how)):
        return ShardOptimizerUpdate(optimizers, tensors)
    if isinstance(how, torch.optim.Optimizer):
        has_rounds = tensors.context.member.options.local_steps > 0
        return (LocalOptimizerUpdate if has_rounds else MeanOptimizerUpdate)(how, tensors)
    raise UsageError(
        f"distribute() was given a {type(how).__name__}; expected a rule such as "
        "poseidon.SGD(lr=0.1), a torch.optim optimizer, or several of one module with "
        'on="shards"'
    )


def _placed(member: Membership, count: int | None) -> Membership:
    """Return the membership with so many virtual workers; None: as the job has them."""
    given, size = member.virtual_workers, member.network.size
    if count is None or (given is not None and given.count == count):
        return member
    if given is not None:
        raise UsageError(
            f"distribute() has virtual_workers={count} and the job "
            f"--virtual_workers={given.count}; give one of them"
        )
    if count < size:
        raise UsageError(
            f"virtual_workers is {count}, and the job has {size} workers; expected one or more for "
            "each"
        )
    return replace(member, virtual_workers=VirtualWorkers.spread(count, [1.0] * size))


def _exchange_of(member: Membership, how: How, options: DistributeOptions) -> ExchangeOptions:
    """Return the options with what the arguments ask for in place of the flags.

    An optimizer on the shards has all gradients sent there, unless the job names an exchange: by
    others the workers apply the rules themselves, and keep the state.
    """
    exchange, steps, outer = member.options, options.local_steps, options.outer
    given, compress = exchange.compress, options.compress
    if given and compress not in ("", given):
        raise UsageError(
            f"distribute() has compress={compress!r} and the job --compress={given}; give one of "
            "them"
        )
    exchange = replace(exchange, compress=compress or given)
    on_shards = options.on is RunsOn.SHARDS and not isinstance(how, UpdateRule)
    if on_shards and exchange.kind is ExchangeKind.AUTO:
        exchange = replace(exchange, kind=ExchangeKind.SERVER)
    if steps is None:
        steps = exchange.local_steps
    if not steps:
        if outer is not None:
            raise UsageError(
                "outer= needs local steps; give local_steps=H too, with H of 1 or more"
            )
        return exchange.without_local_steps
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
    exchange = replace(exchange, local_steps=steps).of_workers(member.placed)
    is_plain = not on_shards and is_synchronous(how, options.clip, exchange)
    return exchange.without_local_steps if is_plain else exchange


def _rows(module: nn.Module, options: DistributeOptions) -> dict[nn.Parameter, int]:
    if options.example is not None:
        rows = rows_by_example(module, options.example)
    else:
        rows = rows_by_batch_size(module, options.batch_size)
    return {weight: count for weight, count in rows.items() if weight.dtype is torch.float32}


def _runs_on(name: str | None, how: object) -> RunsOn:
    is_rule = isinstance(how, UpdateRule)
    if name is None:
        return RunsOn.SHARDS if is_rule else RunsOn.WORKERS
    found = _member(RunsOn, "on", name)
    if is_rule and found is RunsOn.WORKERS:
        raise UsageError(
            f"on is 'workers' with poseidon.{type(how).__name__}, a rule that the shards apply; "
            "use on='shards', or a torch.optim optimizer"
        )
    return found


def _member(kind: type[Choice], argument: str, name: str) -> Choice:
    try:
        return kind(name)
    except ValueError as error:
        names = " or ".join(f"'{member.value}'" for member in kind)
        raise UsageError(f"{argument} is {name!r}; expected {names}") from error
