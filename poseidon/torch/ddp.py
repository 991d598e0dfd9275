"""Scripts that are written for torch's DistributedDataParallel, run by `poseidon run --ddp`.

The process group "poseidon" takes the place of gloo and NCCL, and the exchange of the job reduces
the gradients: a communication hook of DistributedDataParallel hands it each bucket.

Laws:
* After `backward()` a gradient is the mean over all workers, added in the order of their ranks:
  what `poseidon.distribute` gives a torch optimizer, with the same bits.
* Of gradients of float64 and complex numbers the exchange would keep a part: the process group
  reduces them. So it does sparse gradients, of which only the rows travel.
* The last bucket's hook waits for all means. By then the backward pass has computed all gradients,
  so nothing waits for it, and an error is raised in the script's `backward()`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeGuard
from weakref import ref

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from poseidon.engine.mean_loop import MeanReducer, check_one_batch
from poseidon.engine.worker_context import Closing, WorkerContext
from poseidon.errors import UsageError
from poseidon.exchange.base import Trained
from poseidon.exchange.factors.taps import FactorTap, layers_with_factors, rows_of
from poseidon.exchange.module_hooks import OfOneModule, uncompiled
from poseidon.exchange.turns import stacked
from poseidon.torch.ddp_replicas import DdpReplicas, each_made, has_hook, reduced_parameters
from poseidon.torch.divided_reducer import reduced_between_hosts
from poseidon.torch.masters import TYPES
from poseidon.torch.process_group.functions import (
    HAS_GROUP,
    groups_of_job,
    initialize,
    make_default_group,
    refusal,
)
from poseidon.torch.process_group.mesh import Mesh
from poseidon.torch.tensors import looked_up
from ps_server import Rule, RuleKind

LOGGER = logging.getLogger(__name__)
OWN_HOOK = (
    "the script has registered its own communication hook on a DistributedDataParallel module: "
    "{given} has no effect on it, and its replicas are not compared"
)


class BucketReducer(MeanReducer):
    """Reduces the buckets of one DistributedDataParallel module by an exchange.

    The exchange opens where the first backward pass has all gradients. They show which weights of
    fully-connected layers may travel as factors, and with how many rows: those of which all workers
    have factors and nothing else. Whatever else a later pass adds to such a gradient leaves as
    further rows (`exchange/factors/taps.py`). The first pass is reduced as all others are, so a
    script that continues from its own checkpoint has the bits of one that was not interrupted.

    It does not keep the module alive, and an exchange that opens closes those of modules that no
    worker has any more: a script may make many modules, for cross-validation for instance.
    """

    def __init__(self, module: DistributedDataParallel, context: WorkerContext) -> None:
        super().__init__(context)
        self._module = known = ref(module)
        self._waiting: list[tuple[Any, torch.futures.Future[Tensor]]] = []
        reduced = reduced_parameters(module)
        self._names = {parameter: name for name, parameter in reduced.items()}
        sparse = _with_sparse_gradients(module.module)
        self._sent = [p for p in self._names if p.dtype in TYPES and p.numel() and p not in sparse]
        """The parameters whose gradients the exchange reduces."""
        self._index = {parameter: index for index, parameter in enumerate(self._sent)}
        is_compiled = uncompiled(module.module) is not module.module
        may_send_factors = context.member.options.kind.sends_factors and not is_compiled
        self._reduces = False
        """Whether a backward pass that begins now ends with this reducer."""
        layers = layers_with_factors(module.module) if may_send_factors else {}
        self._taps = {
            weight: FactorTap(
                [layer],
                takes=lambda: self._reduces,
                of_16_bits=False,
                # torch leaves the `grad` of an unused parameter as it is
                shows_use=lambda: _shows_use(known()),
            )
            for weight, layer in layers.items()
            # of another order in memory torch's buckets show no product
            if weight in self._index and weight.dtype is torch.float32 and weight.is_contiguous()
        }
        self._wait_free = context.member.options.wait_free
        self._replicas = DdpReplicas(
            module,
            reduced,
            context.member.options,
            collect=self._collect,
            rank=context.rank,
            ranks=range(context.size),
        )
        self._means: list[Tensor] = []
        module.register_forward_pre_hook(OfOneModule(self._before_forward))
        self._is_hook = self._says_hook = False

    def is_of(self, module: DistributedDataParallel | None) -> bool:
        """Return whether it reduces a module; None: whether its own is gone."""
        return self._module() is module

    def close(self) -> None:
        for tap in self._taps.values():
            tap.close()
        super().close()

    def _before_forward(self, module: nn.Module, _: object) -> None:
        """Become the communication hook unless the script has registered one of its own.

        Raises:
            KeyboardInterrupt: the job was asked to stop.
        """
        assert isinstance(module, DistributedDataParallel)
        if not (self._is_hook or self._says_hook) and torch.is_grad_enabled():
            if has_hook(module):
                self._says_hook = True
                for tap in self._taps.values():  # DDP orders gradients as they come: as without
                    tap.close()
                self._taps.clear()
                given = self._context.member.options.first_given()
                if given and self._context.rank == 0:
                    LOGGER.warning(OWN_HOOK.format(given=given))
            else:
                self._is_hook = True
                module.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))
                module._comm_hooks.clear()  # what torch pickles: torch itself reduces copies
        # as torch decides it: in a forward pass, for the next backward pass alone
        is_reduced = module.require_backward_grad_sync and torch.is_grad_enabled()
        self._reduces = self._is_hook and is_reduced
        for tap in self._taps.values():  # of a backward pass that has failed
            tap.take()
        self._waiting.clear()
        self.check_asked_to_stop()

    def _reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Send the gradients of a bucket. The last one ends the iteration."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._waiting.append((bucket, future))
        if self._observed is not None:
            self._begin()
            if self._wait_free and self._sends(bucket):
                self._send(bucket)
        if bucket.is_last() or (self._observed is None and self._are_all()):
            if self._observed is None:
                self._open_in_first_pass(self._context.of_next_loop())
            self._end_pass()
            factor = self._replicas.factor()
            self._replicas.compare(self._session.steps)
            self._collections.finish_step()
            self._reduces = False
            waiting, self._waiting = self._waiting, []
            for done, one in waiting:
                one.set_result(done.buffer() if factor == 1.0 else done.buffer().mul_(factor))
        return future

    def _are_all(self) -> bool:
        """Return whether the buckets that wait have all parameters. In the first backward pass of a
        static graph torch calls none of several buckets the last.
        """
        return sum(len(bucket.parameters()) for bucket, _ in self._waiting) == len(self._names)

    def _sends(self, bucket: Any) -> bool:
        return any(parameter in self._index for parameter in bucket.parameters())

    def _send(self, bucket: Any) -> None:
        exchange = self._exchange
        for parameter, gradient in _gradients(bucket):
            index = self._index[parameter]
            if index not in exchange.by_factors:
                exchange.begin(index, gradient.float().contiguous())
                continue
            factors = self._taps[parameter].take() + _rest(parameter, gradient)
            if factors:
                exchange.begin_factors(index, *stacked(factors))
                exchange.release(index)  # no layer uses the mean

    def _send_rest(self) -> None:
        for own, _ in self._waiting:
            if not self._sends(own):
                _average(own)
            elif not self._wait_free:
                self._send(own)
        super()._send_rest()

    def _take_means(self) -> None:
        """Fill the buckets with the means."""
        for bucket, _ in self._waiting:
            for parameter, gradient in _gradients(bucket) if self._sends(bucket) else ():
                index = self._index[parameter]
                self._exchange.wait(index)
                gradient.copy_(self._means[index])

    def _open_in_first_pass(self, context: WorkerContext) -> None:
        """Open the exchange where the first pass has all gradients, and send them."""
        rows, gradients = [0] * len(self._sent), dict[nn.Parameter, Tensor]()
        for bucket, _ in self._waiting:
            gradients.update(_gradients(bucket) if self._sends(bucket) else ())
        for parameter, tap in self._taps.items():
            if not _rest(parameter, gradients[parameter]):
                rows[self._index[parameter]] = tap.rows
        distributed: Any = torch.distributed
        opened = [one for one in self._context.reducers if one is not self and _is_open(one)]
        gone = [int(one.is_of(None)) for one in opened]
        least, most = (torch.tensor(rows + gone, device="cpu") for _ in range(2))
        distributed.all_reduce(least, op=distributed.ReduceOp.MIN)
        distributed.all_reduce(most, op=distributed.ReduceOp.MAX)
        for one, is_gone in zip(opened, least.tolist()[len(rows) :], strict=True):
            if is_gone:
                self._context.reducers.remove(one)
                one.close()
        self._means = [
            torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            for parameter in self._sent
        ]
        module = self._module()
        assert module is not None
        mean, embeddings = Rule(kind=RuleKind.MEAN), looked_up(module.module)
        tensors = [
            Trained(
                name=self._names[parameter],
                tensor=tensor,
                rule=mean,
                factor_rows=high if low else 0,
                looked_up=parameter in embeddings,
            )
            for parameter, tensor, low, high in zip(
                self._sent, self._means, least.tolist(), most.tolist(), strict=False
            )
        ]
        self._open(context, tensors, module.module)
        self._watch()
        used = {p for p, index in self._index.items() if index in self._exchange.by_factors}
        for parameter in self._taps.keys() - used:
            tap = self._taps.pop(parameter)
            for u, v in tap.take():
                gradients[parameter].addmm_(u.t(), v)
            tap.close()
        self._begin()
        for bucket, _ in self._waiting:
            if self._wait_free and self._sends(bucket):
                self._send(bucket)


def _with_sparse_gradients(module: nn.Module) -> set[Tensor]:
    """Return the parameters whose gradients DistributedDataParallel expects to be sparse."""
    return {
        layer.weight
        for layer in module.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    }


def _shows_use(module: DistributedDataParallel | None) -> bool:
    return module is not None and (module.find_unused_parameters or module.static_graph)


def _is_open(reducer: Closing) -> TypeGuard[BucketReducer]:
    return isinstance(reducer, BucketReducer) and reducer._observed is not None


def _gradients(bucket: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Return what has elements of a bucket of dense gradients, which have one type."""
    pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
    return (pair for pair in pairs if pair[0].numel())


def _rest(parameter: nn.Parameter, gradient: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return what autograd has of the gradient of a weight besides the factors that are kept."""
    return [] if parameter.grad is None else rows_of(gradient)


def _average(bucket: Any) -> None:
    distributed: Any = torch.distributed
    distributed.all_reduce(bucket.buffer(), op=distributed.ReduceOp.AVG)


def reduce_by_exchange(module: DistributedDataParallel, context: WorkerContext) -> None:
    """Let an exchange of its own reduce the gradients of a module over all workers of a job.

    A module over a group of some workers is left to the process group.

    Raises:
        UsageError: a worker computes for several virtual workers, or the job has flags that
            such a module ignores.
    """
    context.member.options.check_ddp()
    if context.unfit_for_ddp and not context.loops.begun:  # else it is for a group
        raise UsageError(context.unfit_for_ddp)
    check_one_batch(context, "DistributedDataParallel")
    is_known = any(
        isinstance(known, BucketReducer) and known.is_of(module) for known in context.reducers
    )
    is_of_all = module.process_group is torch.distributed.group.WORLD
    is_of_all = is_of_all and hasattr(module, "reducer")  # else torch delays all gradients
    if context.size > 1 and is_of_all and not is_known:
        context.reducers.append(BucketReducer(module, context))


@contextmanager
def ddp_script(mesh: Mesh, context: WorkerContext) -> Iterator[ExitStack]:
    """Let a script of DistributedDataParallel that runs inside the block be part of a job.

    `init_process_group` makes the process group "poseidon", whatever backend it names. So does
    `new_group`. Each DistributedDataParallel over all workers is reduced by an exchange of its
    own, one over a group of some workers by all-reduce.

    Yields:
        what takes back all that was replaced, which a fork needs.
    """
    with ExitStack() as undo:
        undo.enter_context(groups_of_job(make_default_group(mesh)))
        undo.enter_context(each_made(lambda module: reduce_by_exchange(module, context)))
        undo.enter_context(reduced_between_hosts(context))
        yield undo


@contextmanager
def default_group(mesh: Mesh) -> Iterator[None]:
    """Make a group of all workers torch.distributed's default group for a script that runs inside
    the block. It makes none itself.
    """
    initialize(mesh)
    with groups_of_job(refusal(HAS_GROUP)):
        yield
