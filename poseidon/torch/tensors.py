"""The tensors of a torch module that workers exchange, and which weights may travel as
sufficient factors.

    trained     parameters that require a gradient: float32
    statistics  running mean and variance of normalization layers: averaged after every step
    rest        frozen parameters and all other buffers: broadcast once, then each worker's own

Law: every worker finds the same tensors in the same order, the order of the module's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from poseidon.errors import UsageError
from poseidon.exchange.base import Trained, local_of
from poseidon.exchange.factors.taps import hooks_on, layers_with_factors
from poseidon.torch.masters import TYPES, as_float32
from poseidon.torch.shards import Shards
from poseidon.torch.tables.plan import PlannedTable, users_of_parameters
from poseidon.torch.update_rules import Outer, ShardRules
from ps_server import Rule, RuleKind


class RunsOn(Enum):
    """What applies the update rule of a torch.optim optimizer."""

    WORKERS = "workers"
    """The optimizer itself, on every worker."""
    SHARDS = "shards"
    """The shards: workers keep no state of the optimizer."""


RUNNING = ("running_mean", "running_var")
Example = Tensor | Sequence[Any] | Mapping[str, Any]
"""The module's input, its positional arguments, or its arguments by name."""


class Buffers(Enum):
    """Treatment of the running statistics of normalization layers."""

    AVERAGE = "average"
    """After every step they are the mean over the workers."""
    OWN = "own"
    """Each worker keeps its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributeOptions:
    """The arguments of `distribute`, which has their meaning.

    Raises:
        UsageError: one is out of range, or two exclude each other.
    """

    clip: float | None = None
    passes: int = 1
    buffers: Buffers = Buffers.AVERAGE
    on: RunsOn = RunsOn.WORKERS
    example: Example | None = None
    batch_size: int = 0
    compress: str = ""
    local_steps: int | None = None
    outer: Outer | None = None
    virtual_workers: int | None = None

    def __post_init__(self) -> None:
        if self.virtual_workers is not None and self.virtual_workers < 1:
            raise UsageError(
                f"virtual_workers is {self.virtual_workers}; expected 1 or more, or None for "
                "--virtual_workers"
            )
        if self.local_steps is not None and self.local_steps < 0:
            raise UsageError(
                f"local_steps is {self.local_steps}; expected 1 or more, 0 for none, or None for "
                "--local_steps"
            )
        if self.passes < 1:
            raise UsageError(f"passes is {self.passes}; expected 1 or more")
        if self.clip is not None and not self.clip > 0:
            raise UsageError(f"clip is {self.clip}; expected a number above 0, or None")
        if self.example is not None and self.batch_size:
            raise UsageError("give an example or a batch_size, not both")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTensors:
    """The tensors of a module by name.

    Attributes:
        exchanged: trained parameters and statistics, exchanged in every step in this order.
        rest: tensors that are broadcast once.
        looked_up: the weights of its embeddings.
        rows: rows of the factors of each weight that may travel as factors.
        shards: how the parameters are divided among the workers of a host; None: they are not.
    """

    exchanged: dict[str, Tensor]
    rest: dict[str, Tensor]
    looked_up: Collection[Tensor] = frozenset()
    rows: Mapping[nn.Parameter, int] = field(default_factory=dict)
    tables: Sequence[PlannedTable] = ()
    shards: Shards | None = None

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
        options: DistributeOptions,
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
                factor_rows=rows * options.passes,
                looked_up=whole in self.looked_up and part.dtype is torch.float32,
            )

        here = {n: t for n, t in self.exchanged.items() if local_of(t).numel()}
        return GroupPlan(
            tensors=[
                trained(name, held(name))
                if name in of_parameters
                else Trained(name=name, tensor=as_float32(tensor), statistics=True)
                for name, tensor in here.items()
            ],
            sources=list(here.values()),
            rest=self.rest,
            options=options,
            sends_gradients=sends_gradients,
            tables=self.tables,
            shards=() if self.shards is None else self.shards.planes([*of_parameters], trained),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """The tensors that a group exchanges.

    Attributes:
        tensors: the tensors of the exchange.
        sources: the module's parameter or buffer behind each of them.
        rest: tensors that are broadcast once, by name.
        options: the arguments of `distribute`.
        sends_gradients: whether the exchange gets the gradients; otherwise an optimizer of this
            worker uses them.
        shards: of a module that is divided: the tensors of each plane, without values.
    """

    tensors: list[Trained]
    sources: list[Tensor]
    rest: dict[str, Tensor]
    options: DistributeOptions
    sends_gradients: bool = True
    tables: Sequence[PlannedTable] = ()
    shards: Sequence[Sequence[Trained]] = ()

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

    @property
    def rest_of_tables(self) -> set[nn.Parameter]:
        """The weights of the row tables, of which this worker has a copy."""
        return {parameter for table in self.tables for parameter in table.module.parameters()}


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
    found = ModuleTensors(exchanged={}, rest={}, looked_up=looked_up(module), tables=tables)
    of_tables = {parameter for table in tables for parameter in table.module.parameters()}
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


def rows_by_batch_size(module: nn.Module, batch_size: int) -> dict[nn.Parameter, int]:
    """Return the rows of the factors of each fully-connected weight, if all layers see one row a
    record.

    A layer whose own forward pass does not run (inside torch.nn.MultiheadAttention) is a subclass,
    and left out.
    """
    return {
        weight: batch_size for weight, layer in _layers(module).items() if type(layer) is nn.Linear
    }


def rows_by_example(module: nn.Module, example: Example) -> dict[nn.Parameter, int]:
    """Return the rows of the factors of each fully-connected weight, found by one run without
    gradients.

    Weights whose layer runs never or more than once are left out, and those that are used outside
    their layer. Dropout, statistics and random numbers stay as they were.
    """
    uses = [_Use(weight, layer) for weight, layer in _layers(module).items()]
    try:
        with _NotingUses(uses):
            _run(module, example)
    finally:
        for use in uses:
            use.close()
    return {use.weight: use.rows[0] for use in uses if len(use.rows) == 1 and not use.used_outside}


def _layers(module: nn.Module) -> dict[nn.Parameter, nn.Module]:
    """Return the layers whose weights may travel as factors.

    A user's hook on a weight needs its whole gradient.
    """
    found = layers_with_factors(module)
    return {weight: layer for weight, layer in found.items() if not hooks_on(weight)}


class _Use:
    """The uses of one weight while its module runs on an example.

    Attributes:
        rows: rows of each run of its own layer.
        used_outside: True if anything is computed from it outside these runs.
    """

    def __init__(self, weight: nn.Parameter, layer: nn.Module) -> None:
        self.weight = weight
        self.rows: list[int] = []
        self.used_outside = False
        self._running = False
        self._handles = [
            layer.register_forward_pre_hook(self._enter),
            layer.register_forward_hook(self._leave),
        ]

    def note(self) -> None:
        """Note that something is computed from the weight."""
        self.used_outside = self.used_outside or not self._running

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._running = True
        self.rows.append(arguments[0].numel() // max(1, arguments[0].shape[-1]))

    def _leave(self, *_: object) -> None:
        self._running = False


class _NotingUses(TorchFunctionMode):
    """Reports all functions that compute a tensor from a weight to the weight's `_Use`."""

    def __init__(self, uses: Sequence[_Use]) -> None:
        super().__init__()
        self._uses: dict[Tensor, _Use] = {use.weight: use for use in uses}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(True for _ in tensors_in(result)):
            for tensor in tensors_in((args, kwargs)):
                if tensor in self._uses:
                    self._uses[tensor].note()
        return result


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors of nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def _run(module: nn.Module, example: Example) -> None:
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            run_example(module, example)
    finally:
        for child, training in modes:
            child.training = training


def run_example(module: nn.Module, example: Example) -> object:
    """Return the module's output for an example."""
    if isinstance(example, Mapping):
        return module(**example)
    return module(example) if isinstance(example, Tensor) else module(*example)
