"""The model replica of one worker's process, and the nets of its virtual workers.

Law: a process has one copy of the parameters. Each of its virtual workers has a train net and test
nets of its own, which share the parameters. Readers, random generators and everything that layers
keep belong to these nets, so they do not depend on which process computes for a virtual worker.

Users' layers may draw from the generators of the process: numpy's, torch's, Python's. Before each
iteration, and each test batch, of a virtual worker these get seeds of its own. So the numbers that
it draws depend on nothing but the seed, its number and the iteration, also in a resumed run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import Tensor, nn

from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.layers.registry import known_types, layer_class
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.net.net import Net
from poseidon.caffe.net.params import derive_seed
from poseidon.caffe.proto.definition import NetDefinition, SolverDefinition, TestNet
from poseidon.caffe.solver.settings import SolverSettings
from poseidon.caffe.tools.preflight import require_loss
from poseidon.caffe.tools.solo import load_models
from poseidon.engine.random_streams import seed_generators
from poseidon.exchange.base import Trained
from poseidon.exchange.broadcast import bring_parts
from poseidon.exchange.job_control import JobControl
from poseidon.exchange.membership import Membership
from ps_server.protocol.virtual_workers import VirtualWorkers

Values = Mapping[nn.Parameter, Tensor]
OWN_LAYERS = "poseidon.caffe.layers."
"""The package of Poseidon's own layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNets:
    """The nets of one virtual worker.

    Attributes:
        number: of the virtual worker, 0..V-1.
        name: of the virtual worker in messages.
    """

    number: int
    name: str
    train: Net
    tests: tuple[Net, ...]

    def all(self) -> Iterator[Net]:
        """Return the train net, then the test nets."""
        yield self.train
        yield from self.tests


class Replica:
    """The nets of one worker's process, built from a solver and filled.

    Args:
        context: device, seed and so on of this process; the nets set the phase.

    Attributes:
        nets: the nets of each virtual worker of this process, in order.
        exchanged: the blobs that are trained, or averaged as statistics.
        trained: the same, as tensors of an exchange.
    """

    def __init__(
        self,
        solver: SolverDefinition,
        settings: SolverSettings,
        context: LayerContext,
        member: Membership,
    ) -> None:
        self.solver = solver
        self.settings = settings
        self.context = context
        self.member = member
        self.tests: tuple[TestNet, ...] = solver.test_nets()
        self._models: Sequence[Path] = ()
        """What layers that only test nets have begin with."""
        self._open: list[Net] = []
        self._draws = any(
            draws_from_process(definition)
            for definition in (solver.net_definition(), *(test.definition for test in self.tests))
        )
        try:
            self.nets = self._nets_of({}, None)
            self._divide_prefetch()
            self.exchanged = [
                info
                for info in self.train.parameters_info
                if info.parameter.requires_grad or info.statistics
            ]
            require_loss(solver.net_definition(), self.train.plan, settings)
            rows = self.batch_records * settings.iter_size
            self.trained = [
                Trained(
                    name=info.name,
                    tensor=info.parameter,
                    rule=settings.rule(info.lr_mult, info.decay_mult),
                    factor_rows=rows if info.factors else 0,
                    statistics=info.statistics,
                    looked_up=info.looked_up,
                )
                for info in self.exchanged
            ]
            self._is_filled = False
            """Whether other blobs are the job's; a process that joins it later has those of
            fillers."""
        except BaseException:
            self.close()
            raise

    @property
    def rank(self) -> int:
        """The rank of this process in its job."""
        return self.member.network.rank

    @property
    def virtual_workers(self) -> VirtualWorkers:
        """The virtual workers of the job, and the processes that compute for them."""
        return self.member.by_worker

    @property
    def train(self) -> Net:
        """The train net of the first virtual worker of this process."""
        return self.nets[0].train

    @property
    def keeps_state(self) -> str:
        """Which layer keeps a state that `go_on` loses, a clause; empty: none does."""
        for net in self.nets[0].all():
            for name, layer in net.layer_modules:
                if layer.KEEPS_STATE:
                    return f"layer '{name}' ({layer.param.type}) keeps its own state"
        return ""

    def go_on(self, member: Membership) -> None:
        """Compute for other virtual workers of a job that continues with other processes. The state
        of all of them is to be restored.

        Args:
            member: the place of this process among these; with as many virtual workers as before.
        """
        self.member = member
        for net in self._open:
            net.drop_graph()
            net.drop_data()
        for info in self.train.parameters_info:
            info.parameter.grad = None
        before, owner = list(self._open), self.train
        # what layers keep by themselves is of a later iteration
        kept = {} if self.keeps_state else {nets.number: nets for nets in self.nets}
        self.nets = self._nets_of(kept, owner)
        used = [net for nets in self.nets for net in nets.all()]
        for net in before:
            if net not in used:
                net.close()
                self._open.remove(net)
        self._divide_prefetch()

    def _nets_of(
        self, present: Mapping[int, WorkerNets], owner: Net | None
    ) -> tuple[WorkerNets, ...]:
        """Return the nets of each virtual worker of this process.

        Args:
            present: the nets that this process has of them, by virtual worker.
            owner: owns the parameters; None: the first net to be compiled will.
        """
        found = []
        for number in self.member.own:
            nets = present.get(number) or self._compile(number, owner)
            owner = owner or nets.train
            found.append(nets)
        return tuple(found)

    def _compile(self, number: int, owner: Net | None) -> WorkerNets:
        """Compile the nets of a virtual worker, whose parameters are the owner's."""
        definition = self.solver.net_definition()
        state = self.solver.train_state(definition)
        placed, seat = self.virtual_workers, self.member.seat
        context = replace(self.context, rank=number, workers=placed.count, seat=seat)
        self.seed_process("setup", number)
        train = self._kept(compile_net(definition, context, state=state, share_with=owner))
        donor = owner or train
        tests = tuple(
            self._kept(compile_net(test.definition, context, state=test.state, share_with=donor))
            for test in self.tests
        )
        kind = "worker" if placed.is_one_each else "virtual worker"
        nets = WorkerNets(number=number, name=f"{kind} {number}", train=train, tests=tests)
        _load_tests(nets, self._models)
        return nets

    def seed_process(self, *path: int | str) -> None:
        """Seed the generators of the process, if layers of the nets may draw from them.

        Args:
            path: what the seed follows from, besides the job's: with a virtual worker's number.
        """
        if self._draws:
            seed_generators(derive_seed(self.context.seed, *path), self.context.device)

    def _kept(self, net: Net) -> Net:
        """Return a net, which `close` closes."""
        self._open.append(net)
        return net

    def _divide_prefetch(self) -> None:
        """Divide the batches that readers prepare ahead among the virtual workers of this
        process.
        """
        for net in self._open:
            for _, reader in net.readers():
                reader.divide_prefetch(len(self.nets))

    def load(self, models: Sequence[Path], *, own: bool = False) -> list[str]:
        """Copy the weights of models by layer name, later ones over earlier ones. Return what was
        and was not copied, as sentences.

        Args:
            own: this job has written them, for a state.

        Raises:
            SnapshotError: a model cannot be read, or a layer's blobs have other shapes.
        """
        reports = load_models(self.train, models, own=own)
        self._is_filled = True
        notes = [f"{path}: {report.summary()}" for path, report in reports]
        return notes if own else [*notes, *self.load_tests(models)]

    def bring_fixed(self, control: JobControl) -> None:
        """Bring blobs that are not exchanged from rank 0 to processes that have joined the job. All
        workers call it together.
        """
        names = {info.name for info in self.exchanged}
        fixed = {
            info.name: info.parameter.detach()
            for info in self.train.parameters_info
            if info.name not in names
        }
        given = {name: value.cpu().numpy() for name, value in fixed.items()}
        bring_parts(fixed, given if self._is_filled else {}, control, rank=self.rank)
        self._is_filled = True

    def load_tests(self, models: Sequence[Path]) -> list[str]:
        """Copy the weights of models to layers that only test nets have, as Caffe copies them to
        each test net. What it returns and raises is as for `load`.
        """
        self._models = models
        found = [_load_tests(nets, models) for nets in self.nets]
        return found[0]

    def forward_backward(
        self,
        nets: WorkerNets,
        iteration: int,
        after_pass: Callable[[], None],
        on_loss: Callable[[Tensor], None],
        scaled: Callable[[Tensor], Tensor] = lambda loss: loss,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run `iter_size` forward and backward passes of one virtual worker, whose gradients add
        up. Return the mean loss and the last pass's outputs, detached.

        Args:
            on_loss: called with the loss of each pass, before its backward pass.
            scaled: returns the multiple of a loss whose gradients are computed.
        """
        net, passes = nets.train, self.settings.iter_size
        self.seed_process("train", nets.number, iteration)
        total: Tensor | None = None
        outputs: dict[str, Tensor] = {}
        for _ in range(passes):
            outputs = net()
            loss = net.loss
            on_loss(loss.detach())
            if loss.requires_grad:  # not if nothing below the loss is trained
                net.backward(scaled(loss))
            net.log_backward()
            total = loss.detach() if total is None else total + loss.detach()
            after_pass()
        net.drop_graph()
        assert total is not None
        return total / passes, {name: value.detach() for name, value in outputs.items()}

    def values(self) -> Values:
        """Return copies of all blobs."""
        return {
            info.parameter: info.parameter.detach().clone() for info in self.train.parameters_info
        }

    def changes_since(self, before: Values) -> list[tuple[str, str, list[NDArray[Any]]]]:
        """Return what was subtracted from each blob of each layer since then: Caffe's diff."""
        return [
            (
                name,
                layer.param.type,
                [
                    (before.get(source, source) - source).detach().cpu().numpy().reshape(spec.shape)
                    for source, spec in zip(layer.sources(), layer.blob_specs, strict=True)
                ],
            )
            for name, layer in self.train.layer_modules
        ]

    @property
    def batch_records(self) -> int:
        """Records that one pass of a virtual worker reads; 0 if the net has no data layer."""
        shapes = [reader.shape for _, reader in self.train.readers()]
        return shapes[0][0] if shapes else 0

    def close(self) -> None:
        """Stop reading data."""
        for net in self._open:
            net.close()


def draws_from_process(definition: NetDefinition) -> bool:
    """Return whether a net has a layer of a user's own: Poseidon's draw from generators of theirs."""
    types = {layer.type for layer in definition.param.layer}
    known = types & set(known_types())
    others = {kind for kind in known if not layer_class(kind).__module__.startswith(OWN_LAYERS)}
    return bool(others or "Python" in types)


def _load_tests(nets: WorkerNets, models: Sequence[Path]) -> list[str]:
    """Copy the weights of models to the test nets that have layers of their own with weights."""
    shared = nets.train.layers_by_name
    return [
        f"{path}, test net #{index}: {report.summary()}"
        for index, test in enumerate(nets.tests)
        if any(
            layer.blob_specs and name not in shared for name, layer in test.layers_by_name.items()
        )
        for path, report in load_models(test, models)
    ]
