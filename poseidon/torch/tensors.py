"""The tensors of a torch module that workers exchange.

    trained     parameters that require a gradient: float32
    statistics  running mean and variance of normalization layers: averaged after every step
    rest        frozen parameters and all other buffers: broadcast once, then each worker's own

Law: every worker finds the same tensors in the same order, the order of the module's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from poseidon.engine.worker_context import WorkerContext
from poseidon.errors import UsageError
from poseidon.exchange.base import Trained, local_of
from poseidon.torch.masters import TYPES, as_float32
from poseidon.torch.options import Buffers, DistributeOptions
from poseidon.torch.shards import Shards
from poseidon.torch.tables.plan import PlannedTable, users_of_parameters
from poseidon.torch.update_rules import ShardRules
from ps_server import Rule, RuleKind
from ps_server.json_fields import fields_of

RUNNING = ("running_mean", "running_var")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTensors:
    """The tensors of a module by name, in one call of `distribute`.

    Attributes:
        entry: the module, or `torch.compile` of it.
        exchanged: trained parameters and statistics, exchanged in every step in this order.
        rest: tensors that are broadcast once.
        looked_up: the weights of its embeddings.
        rows: rows of the factors of each weight that may travel as factors.
        divided: how the parameters are divided among the workers of a host; None: they are not.
        context: of the worker, with the exchange that `distribute` asks for.
    """

    entry: nn.Module
    exchanged: dict[str, Tensor]
    rest: dict[str, Tensor]
    looked_up: Collection[Tensor] = frozenset()
    rows: Mapping[nn.Parameter, int] = field(default_factory=dict)
    tables: Sequence[PlannedTable] = ()
    divided: Shards | None = None
    options: DistributeOptions = field(default_factory=DistributeOptions)
    context: WorkerContext = field(default_factory=WorkerContext)

    @property
    def of_tables(self) -> set[nn.Parameter]:
        """The weights of the row tables, of which this worker has a copy."""
        return {parameter for table in self.tables for parameter in table.module.parameters()}

    def trained_by(self, wanted: Collection[Tensor]) -> ModuleTensors:
        """Return these tensors where only some parameters are trained: the others are broadcast
        once.
        """
        rest = {name: tensor for name, tensor in self.trained.items() if tensor not in wanted}
        return replace(
            self,
            exchanged={n: t for n, t in self.exchanged.items() if n not in rest},
            rest={**self.rest, **rest},
        )

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters of `exchanged`."""
        return {name: t for name, t in self.exchanged.items() if isinstance(t, nn.Parameter)}

    def plan(
        self,
        rules: ShardRules | None,
        held: Callable[[str], Tensor],
        *,
        sends_gradients: bool = True,
    ) -> GroupPlan:
        """Return what a group exchanges of these tensors, and by which rules.

        Args:
            rules: of the shards; None: parameters get the means of their gradients.
            held: returns what the exchange holds of a parameter, or of this worker's part of it.
            sends_gradients: see `GroupPlan`.
        """
        of_parameters = self.trained

        def trained(name: str, part: Tensor) -> Trained:
            whole = of_parameters[name]
            rule, rate_index = Rule(kind=RuleKind.MEAN), 0
            if rules is not None:
                rule = rules.server_rule(name, whole.shape)
                rate_index = rules.rate_index(name, whole.shape)
            rows = self.rows.get(whole, 0) if rule.matrix is None else 0
            return Trained(
                name=name,
                tensor=part,
                rule=rule,
                rate_index=rate_index,
                factor_rows=rows * self.options.passes,
                looked_up=whole in self.looked_up and part.dtype is torch.float32,
            )

        here = {n: t for n, t in self.exchanged.items() if local_of(t).numel()}
        return GroupPlan(
            **fields_of(self),
            tensors=[
                trained(name, held(name))
                if name in of_parameters
                else Trained(name=name, tensor=as_float32(tensor), statistics=True)
                for name, tensor in here.items()
            ],
            sources=list(here.values()),
            sends_gradients=sends_gradients,
            shards=() if self.divided is None else self.divided.planes([*of_parameters], trained),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan(ModuleTensors):
    """What a group exchanges, and by what.

    Attributes:
        tensors: the tensors of the exchange.
        sources: the module's parameter or buffer behind each of them.
        sends_gradients: whether the exchange gets the gradients; otherwise an optimizer of this
            worker uses them.
        shards: of a module that is divided: the tensors of each plane, without values.
    """

    tensors: list[Trained]
    sources: list[Tensor]
    sends_gradients: bool
    shards: Sequence[Sequence[Trained]]

    @property
    def values(self) -> dict[int, Tensor]:
        """The tensors of the module that get values from the exchange, by their index; the
        rest get means of gradients.
        """
        return {
            index: source
            for index, (trained, source) in enumerate(zip(self.tensors, self.sources, strict=True))
            if trained.statistics
            or trained.rule.kind is not RuleKind.MEAN
            or trained.tensor is source
        }


def module_tensors(
    module: nn.Module, buffers: Buffers, tables: Sequence[PlannedTable] = ()
) -> ModuleTensors:
    """Return the tensors of a module, without `rows`.

    Args:
        tables: its row tables; their weights are in `rest`.

    Raises:
        UsageError: there is nothing to train, or a parameter that cannot be exchanged.
    """
    if any(
        isinstance(child, torch.jit._script.RecursiveScriptModule) for child in module.modules()
    ):
        raise UsageError(
            f"{type(module).__name__} has layers of torch.jit.script, which take no hooks; give "
            "distribute() the module before torch.jit.script, or use torch.compile"
        )
    if any(isinstance(child, DistributedDataParallel) for child in module.modules()):
        raise UsageError(
            "the module has a DistributedDataParallel, which averages gradients itself; give "
            "distribute() the module within it, or use `poseidon run --ddp` without distribute()"
        )
    found = ModuleTensors(
        entry=module, exchanged={}, rest={}, looked_up=looked_up(module), tables=tables
    )
    of_tables = found.of_tables
    seen: set[Tensor] = set()
    for name, tensor, statistics in _tensors(module):
        if tensor in seen:
            continue
        seen.add(tensor)
        if is_lazy(tensor):
            raise UsageError(
                f"'{name}' has no shape yet: run the module once before it is distributed"
            )
        if tensor.is_meta:
            raise UsageError(
                f"'{name}' is on torch's meta device and has no values; call "
                "module.to_empty(device=...) and set the values before distribute()"
            )
        if tensor in of_tables:
            found.rest[name] = tensor
        elif tensor.requires_grad:
            if tensor.dtype not in TYPES:
                raise UsageError(
                    f"'{name}' is {tensor.dtype}; expected parameters of torch.float32, "
                    "torch.bfloat16 or torch.float16"
                )
            found.exchanged[name] = tensor
        elif statistics and buffers is Buffers.AVERAGE and tensor.dtype in TYPES:
            found.exchanged[name] = tensor
        else:
            found.rest[name] = tensor
    if not (found.trained or tables):
        raise UsageError(f"{type(module).__name__} has no parameter that requires a gradient")
    devices = sorted({str(tensor.device) for tensor in found.exchanged.values()})
    if len(devices) > 1:
        raise UsageError(f"the module is on {' and '.join(devices)}; expected one device")
    return found


def looked_up(module: nn.Module) -> set[Tensor]:
    """Return the weights of nn.Embedding and nn.EmbeddingBag that no other module uses: few rows of
    their gradients are not zero. Where the script itself uses one elsewhere, its gradient travels
    whole.
    """
    users = users_of_parameters(module)
    return {
        child.weight
        for child in module.modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and users[child.weight] == 1
    }


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (name, tensor, whether it is a running statistic), layer by layer."""
    for path, child in module.named_modules():
        for name, parameter in child.named_parameters(recurse=False):
            yield _joined(path, name), parameter, False
        for name, buffer in child.named_buffers(recurse=False):
            # torch.jit.trace gives all layers one class
            normalizes = isinstance(child, _NormBase | torch.jit.ScriptModule)
            yield _joined(path, name), buffer, normalizes and name in RUNNING


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
