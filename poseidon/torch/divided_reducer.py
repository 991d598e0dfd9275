"""Modules that `fully_shard` divides among the workers of each host (HSDP), in scripts that
`poseidon run --ddp` runs.

    mesh = init_device_mesh("cpu", (hosts, workers), mesh_dim_names=("replicate", "shard"))

FSDP adds the gradients of a host and divides them among its workers, by the process group. An
exchange takes the place of the all-reduce between hosts: each worker sends its shards as soon as
FSDP has reduced them.

Laws:
* After `backward()` a gradient is what it is under torchrun: the mean over all workers, added to
  what was there before.
* What no exchange can reduce, the process group does, as under torchrun: meshes of a different
  form, gradients of other types, parameters whose gradients the script uses within the backward
  pass (its own hooks), and the second reduction of a module in a backward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from poseidon.engine.loop_table import State
from poseidon.engine.mean_loop import MeanReducer, check_one_batch
from poseidon.engine.worker_context import WorkerContext
from poseidon.exchange.base import Trained, local_of
from poseidon.exchange.module_hooks import leave_out_of_graphs
from poseidon.torch.ddp_replicas import DdpReplicas
from poseidon.torch.masters import TYPES
from poseidon.torch.process_group.backend import PoseidonGroup
from poseidon.torch.process_group.functions import after_import, ranks_of, replaced
from poseidon.torch.process_group.worker_parts import ReduceRule
from poseidon.torch.shards import Shards, groups_of, wait_for_copy
from ps_server import Rule, RuleKind

LOGGER = logging.getLogger(__name__)
FSDP_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
"""The module of torch that runs a module of `fully_shard`; it imports the compiler."""
OTHER_MESH = (
    "{given} has no effect on a module of fully_shard() whose mesh is not init_device_mesh(device, "
    '(hosts, workers), mesh_dim_names=("replicate", "shard")) with the hosts and workers of the job'
)


class _Sent(NamedTuple):
    """A gradient that has left.

    Attributes:
        dtype: in which torch would reduce it.
        factor: by what to multiply the mean over hosts.
    """

    parameter: nn.Parameter
    gradient: Tensor
    dtype: torch.dtype
    factor: int


class ShardReducer(MeanReducer):
    """Reduces the shards of a root module between hosts.

    Args:
        groups: torch's groups of parameters, which one reduction has together.
    """

    def __init__(self, module: nn.Module, groups: Sequence[Any], context: WorkerContext) -> None:
        member = replace(context.member, divides=True)
        super().__init__(replace(context, member=member).of_next_loop())
        found = {p._param_fqn: p.sharded_param for group in groups for p in group.fsdp_params}
        own = {n: p for n, p in sorted(found.items()) if p.requires_grad and p.dtype in TYPES}
        shards = Shards(
            member.seat.local_workers,
            {name: parameter.placements[-1].dim for name, parameter in own.items()},
            {name: parameter.shape for name, parameter in own.items()},
        )
        mean = Rule(kind=RuleKind.MEAN)
        tensors = [
            Trained(
                name=name,
                tensor=torch.zeros_like(local, dtype=torch.float32),
                rule=mean,
            )
            for name, parameter in own.items()
            if (local := local_of(parameter)).numel()
        ]
        self._means = [trained.tensor for trained in tensors]
        self._index = {trained.name: index for index, trained in enumerate(tensors)}
        self._sent: dict[int, _Sent] = {}
        """Of this backward pass, by the index of the tensor."""
        self._wait_free = member.options.wait_free
        planes = shards.planes([*own], lambda n, part: Trained(name=n, tensor=part, rule=mean))
        self._replicas = DdpReplicas(
            module,
            {name: local_of(parameter) for name, parameter in own.items()},
            member.options,
            collect=lambda part: [*map(self._collect(part).__getitem__, member.plane_ranks)],
            rank=member.network.rank,
            ranks=member.plane_ranks,
        )
        self._open(self._context, tensors, module, shards=planes)
        self._watch()

    @contextmanager
    def reducing(self, group: Any) -> Iterator[None]:
        """Send what torch reduces for a group inside the block within the host."""
        if not self._can_reduce(group):
            yield
            return
        before = {p: p.sharded_param.grad for p in group.fsdp_params}
        for one in before:
            one.sharded_param.grad = None  # torch would add to it
        with group.mesh_info.replicate_process_group.leaving_sums() as reductions:
            yield
        factor = self._context.member.seat.host_count if ReduceRule.SUM in reductions else 1
        with group.device_handle.stream(group.comm_ctx.all_reduce_stream):
            for one, old in before.items():
                parameter, gradient = one.sharded_param, one.sharded_param.grad
                parameter.grad = old
                if gradient is None:
                    continue
                index = self._index.get(one._param_fqn)
                if index is None:  # it has no elements
                    parameter.grad = gradient
                    continue
                wait_for_copy(one)
                rounded = group._reduce_dtype or gradient.dtype
                self._sent[index] = _Sent(parameter, gradient, rounded, factor)
                self._begin()
                if self._wait_free:
                    self._send(index)

    def _can_reduce(self, group: Any) -> bool:
        known = [self._index.get(p._param_fqn) for p in group.fsdp_params if _has_elements(p)]
        hooks = [p.sharded_param._post_accumulate_grad_hooks for p in group.fsdp_params]
        return not (
            None in known
            or any(index in self._sent for index in known)
            or any(hooks)
            or group._all_reduce_hook
        )

    def _send(self, index: int) -> None:
        gradient = local_of(self._sent[index].gradient)
        self._exchange.begin(index, gradient.float().contiguous())

    def _send_rest(self) -> None:
        if not self._wait_free:
            for index in self._sent:
                self._send(index)
        super()._send_rest()

    def end_backward(self) -> None:
        """Give all gradients of the backward pass their means."""
        if self._session.state is State.BACKWARD:
            self._end_pass()
            self._replicas.compare(self._session.steps)
            self._collections.finish_step()

    def _take_means(self) -> None:
        for index, sent in self._sent.items():
            self._exchange.wait(index)
            own, parameter = local_of(sent.gradient), sent.parameter
            own.copy_((self._means[index] * sent.factor).to(sent.dtype))
            if parameter.grad is None:
                parameter.grad = sent.gradient
            else:
                local_of(parameter.grad).add_(own)
        self._sent.clear()


def _has_elements(parameter: Any) -> bool:
    trains: bool = parameter.sharded_param.requires_grad
    return trains and local_of(parameter.sharded_param).numel() > 0


class _Roots:
    """The reducers of the root modules of a script."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._reducers: WeakKeyDictionary[Any, ShardReducer | None] = WeakKeyDictionary()

    def of(self, group: Any) -> ShardReducer | None:
        """Return the reducer of a group's root, a new one in its first backward pass; None: the
        process group reduces it.
        """
        comm_ctx = group.comm_ctx
        if comm_ctx not in self._reducers:
            root = group.modules[0]._get_fsdp_state()._state_ctx.all_states[0]
            self._reducers[comm_ctx] = self._new(root)
        return self._reducers[comm_ctx]

    def known(self, comm_ctx: Any) -> ShardReducer | None:
        """Return the reducer of a root, if it has one by now."""
        return self._reducers.get(comm_ctx)

    def _new(self, root: Any) -> ShardReducer | None:
        if self._context.member.seat.host_count == 1:
            return None
        check_one_batch(self._context, "a module of fully_shard()")
        groups = [group for state in root._state_ctx.all_states for group in groups_of(state)]
        if all(map(self._is_of_hosts, groups)):
            reducer = ShardReducer(root._modules[0], groups, self._context)
            self._context.reducers.append(reducer)
            return reducer
        given = self._context.member.options.first_given()
        if given and self._context.rank == 0:
            LOGGER.warning("%s", OTHER_MESH.format(given=given))
        return None

    def _is_of_hosts(self, group: Any) -> bool:
        """Return whether a group is divided among the workers of each host, as all hosts have."""
        info, member = group.mesh_info, self._context.member
        if not isinstance(getattr(info, "replicate_process_group", None), PoseidonGroup):
            return False
        if info.mesh.ndim != 2 or getattr(info, "shard_mesh_dim", None) is None:
            return False
        replicas, shards = (
            ranks_of(info.mesh, d) for d in (info.replicate_mesh_dim, info.shard_mesh_dim)
        )
        return replicas == list(member.plane_ranks) and shards == list(member.host_ranks)


@contextmanager
def reduced_between_hosts(context: WorkerContext) -> Iterator[None]:
    """Let exchanges reduce the modules of `fully_shard` that run inside the block between hosts."""
    with ExitStack() as undo:

        def wrap(fsdp: Any) -> None:
            roots, of_group, of_state = _Roots(context), fsdp.FSDPParamGroup, fsdp.FSDPState
            forward, backward = of_group.pre_forward, of_group.post_backward
            end = of_state._root_post_backward_final_callback

            def pre_forward(group: Any, *rest: Any) -> Any:
                reducer = roots.known(group.comm_ctx)
                if reducer is not None:
                    reducer.check_asked_to_stop()
                return forward(group, *rest)

            def post_backward(group: Any, *rest: Any) -> None:
                reducer = None
                if group.reduce_grads and group.all_reduce_grads:
                    reducer = roots.of(group)
                with nullcontext() if reducer is None else reducer.reducing(group):
                    backward(group, *rest)

            def final_callback(state: Any) -> None:
                end(state)
                reducer = roots.known(state._comm_ctx)
                if reducer is not None:
                    reducer.end_backward()

            for owner, name, function in (
                (of_group, "pre_forward", pre_forward),
                (of_group, "post_backward", post_backward),
                (of_state, "_root_post_backward_final_callback", final_callback),
            ):
                leave_out_of_graphs(function, "collectives of a module of fully_shard()")
                undo.enter_context(replaced(owner, name, function))

        with after_import({FSDP_STATE: wrap}):
            yield
