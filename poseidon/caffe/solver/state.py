"""The state of a solver's loop: what its next iteration depends on, as leaves of a tree
(`poseidon/engine/state_tree.py`).

Laws:
* Nets that were compiled for a virtual worker and got its state compute what the nets that the state
  is of would have computed, on any process. Layers that keep more (`Layer.KEEPS_STATE`) are excepted.
* Caffe applies its rule also to blobs that no rate moves: frozen ones (lr_mult 0) and statistics. The
  gradient and the rate are 0 there, so the values stay, but weight decay enters the histories of
  AdaGrad, RMSProp, AdaDelta and Adam. `FrozenHistories` has these for snapshots; nothing else reads
  them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poseidon.caffe.net.net import Net
from poseidon.caffe.net.params import ParamInfo
from poseidon.caffe.proto.blob import from_array, to_array
from poseidon.caffe.proto.caffe_pb2 import PoseidonLayerState, PoseidonNetState, PoseidonWorkerState
from poseidon.caffe.solver.averages import SmoothedLoss
from poseidon.caffe.solver.replica import Replica, WorkerNets
from poseidon.caffe.solver.settings import SolverSettings
from poseidon.engine.exchange_leaves import ExchangeLeaves, Named
from poseidon.engine.leaf import Found, Leaf, LeafStage, Scope, StateSource, on_host
from poseidon.engine.session import TrainingSession
from poseidon.engine.state_tree import StateTree
from poseidon.errors import counted
from poseidon.exchange.base import History
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.options import Scheme
from ps_server import Rule, RuleKind
from ps_server.collection import Coming
from ps_server.numerics import Computation
from ps_server.rules import change, history_count

LOGGER = logging.getLogger(__name__)


class SolverState:
    """The state of the loop of one process.

    Args:
        local_steps: iterations of a round; 0: none.
        schemes: of each trained tensor, where a resumed run cannot find it out again.

    Attributes:
        tests_done: test passes made.
        smoothed: the loss of each virtual worker of this process, in order.
        frozen: the histories of blobs that do not learn.
    """

    def __init__(
        self,
        replica: Replica,
        exchange: Exchange,
        session: TrainingSession,
        *,
        local_steps: int,
        schemes: Sequence[Scheme],
    ) -> None:
        self._replica = replica
        self._session = session
        self._schemes = schemes
        self.tests_done = 0
        self.smoothed = {
            nets.number: SmoothedLoss(replica.settings.param.average_loss) for nets in replica.nets
        }
        self.frozen = FrozenHistories(replica.train.parameters_info, replica.settings)
        self.tree = StateTree(replica.member)
        self._of_exchange = ExchangeLeaves(
            replica.trained, exchange, own=self.tree.own, local_steps=local_steps
        )
        self.tree.add(self._leaves())

    def histories(self) -> list[History] | None:
        """Return the histories with which the exchange opens; None: none were loaded."""
        return self._of_exchange.loaded()

    def replicated(self) -> Mapping[str, Tensor]:
        """Return the live tensors that are equal on all replicas, by name."""
        return self._of_exchange.replicated()

    def say_resized(self, state: Mapping[str, Any], source: StateSource) -> None:
        """Warn of a state of a different number of virtual workers, or Caffe's."""
        if self._replica.rank:
            return
        saved, count, iteration = state["workers"], self.tree.count, state["iteration"]
        if saved:
            LOGGER.warning(
                "%s was written by %s and this job has %d: each continues at iteration %d of its "
                "own part of the data, so the records differ from an uninterrupted run",
                source.name,
                counted(saved, "virtual worker"),
                count,
                iteration,
            )
            return
        LOGGER.warning(
            "%s is in Caffe's form, without positions in the data and random states: %s at "
            "iteration %d%s",
            source.name,
            "reading continues" if count == 1 else f"each of {count} virtual workers continues",
            iteration,
            "" if count == 1 else " of its own part of the data",
        )

    def _leaves(self) -> list[Leaf]:
        """Return what the loop continues from."""
        return [
            Leaf.shared(
                "iteration",
                lambda: self._session.iterations,
                lambda count: self._session.continue_from(steps=count, iterations=count),
            ),
            Leaf(
                name="values",
                scope=Scope.SHARED,
                stage=LeafStage.MODULE,
                read=self._replica.train.layer_blobs,
                copy=self._copy_values,
                write=self._write_values,
            ),
            self._of_exchange.held_back(),
            self._of_exchange.on_shards(),
            *self._of_exchange.histories(),
            self.frozen.leaf(),
            Leaf(
                name="worker",
                scope=Scope.VIRTUAL,
                read=lambda: [
                    state_of(nets, self.smoothed[nets.number].losses).SerializeToString()
                    for nets in self._replica.nets
                ],
                write=self._write_workers,
            ),
            Leaf.shared("tests_done", lambda: self.tests_done, self._write_tests_done),
            Leaf.shared("schemes", lambda: [scheme.value for scheme in self._schemes]),
        ]

    def _copy_values(self, before: Sequence[Tensor] | None) -> Coming[Any]:
        tensors = [trained.tensor.detach() for trained in self._replica.trained]
        copies = before or [torch.empty_like(tensor) for tensor in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        return Coming.here(copies)

    def _write_values(self, found: Found) -> None:
        """Set the trained tensors, where memory has them; a state on disk names its model."""
        for trained, value in zip(self._replica.trained, found.shared or (), strict=False):
            trained.tensor.detach().copy_(value)

    def _write_workers(self, found: Found) -> None:
        """Restore the virtual workers of this process. One without a state continues after as many
        records as were read then.
        """
        batches = self._session.iterations * self._replica.settings.iter_size
        for nets in self._replica.nets:
            if not found.each:
                for _, reader in nets.train.readers():
                    reader.skip_to(batches)
                continue
            state = PoseidonWorkerState.FromString(found.each[nets.number])
            restore(nets, state, batches=batches)
            if found.source.path is not None:
                compare_computation(nets, state, found.source.path)
            losses = SmoothedLoss(
                self._replica.settings.param.average_loss, tuple(state.smoothed_loss)
            )
            self.smoothed[nets.number] = losses

    def _write_tests_done(self, iterations: int) -> None:
        self.tests_done = iterations


def state_of(nets: WorkerNets, losses: Sequence[float]) -> PoseidonWorkerState:
    """Return the state of a virtual worker.

    Args:
        losses: in its average, oldest first.
    """
    state = PoseidonWorkerState(
        rank=nets.number,
        torch_rng=nets.train.random_state(),
        **asdict(_computation(nets)),
    )
    state.smoothed_loss.extend(losses)
    for name, reader in nets.train.readers():
        state.reader.add(layer=name, batches=reader.batches_done)
    of_tests = [
        PoseidonNetState(layer=_layers_of(net), torch_rng=net.random_state() or None)
        for net in nets.tests
    ]
    found = [PoseidonNetState(layer=_layers_of(nets.train)), *of_tests]
    if any(one.ByteSize() for one in found):
        state.net.extend(found)
    return state


def _layers_of(net: Net) -> list[PoseidonLayerState]:
    return [
        PoseidonLayerState(
            name=name, values=[from_array(value.detach().cpu().numpy()) for value in values]
        )
        for name, layer in net.layer_modules
        if (values := layer.saved_state())
    ]


def restore(nets: WorkerNets, state: PoseidonWorkerState, *, batches: int = 0) -> None:
    """Set the nets of a virtual worker to its state.

    The readers of test nets follow from the number of test passes (`Tester.skip_to`). A test net
    with other random layers than the saved one keeps its generators: it is a different net.

    Args:
        batches: that a data layer has read that the state does not have.

    Raises:
        SnapshotError: the state is of a different net.
    """
    known = {reader.layer: reader.batches for reader in state.reader}
    for name, reader in nets.train.readers():
        reader.skip_to(known.get(name, batches))
    nets.train.set_random_state(state.torch_rng)
    saved = list(state.net) or [PoseidonNetState()] * (1 + len(nets.tests))
    for net, own in zip((nets.train, *nets.tests), saved, strict=False):
        _restore_layers(net, own)
        if own.torch_rng and len(own.torch_rng) == len(net.random_state()):
            net.set_random_state(own.torch_rng)


def _computation(nets: WorkerNets) -> Computation:
    context = nets.train.context
    return Computation.here(
        context.device, autocast=context.autocast, channels_last=context.channels_last
    )


def compare_computation(nets: WorkerNets, state: PoseidonWorkerState, path: Path) -> None:
    """Warn if a run cannot have the bits of one that was never interrupted."""
    now = _computation(nets)
    then = Computation(
        threads=state.threads,
        processor=state.processor,
        torch_version=state.torch_version,
        arithmetic=state.arithmetic,
    )
    if state.threads and then != now:
        LOGGER.warning(
            "%s computed with %s when %s was written, and now with %s: the run continues "
            "correctly, but not with the bits of an uninterrupted one",
            nets.name,
            then,
            path.name,
            now,
        )


def _restore_layers(net: Net, saved: PoseidonNetState) -> None:
    known = {layer.name: layer.values for layer in saved.layer}
    for name, layer in net.layer_modules:
        device = layer.context.device
        values = known.get(name, ())
        layer.restore_state([torch.from_numpy(to_array(v).copy()).to(device) for v in values])


_LINEAR = (RuleKind.SGD, RuleKind.NESTEROV)
"""Rules whose history is a sum of changes, which a rate of 0 keeps at 0, whatever the weight decay."""


@dataclass(slots=True)
class _Entry:
    info: ParamInfo
    value: Tensor
    rule: Rule
    history: list[Tensor]


class FrozenHistories:
    """The histories of the blobs among `infos` that do not learn."""

    def __init__(self, infos: Sequence[ParamInfo], settings: SolverSettings) -> None:
        self._entries: dict[str, _Entry] = {}
        for info in infos:
            rule = settings.rule(0.0, info.decay_mult)
            if info.parameter.requires_grad or rule.kind in _LINEAR or rule.decay == 0:
                continue
            value = info.parameter.detach().view(-1)
            history = [torch.zeros_like(value) for _ in range(history_count(rule.kind))]
            self._entries[info.name] = _Entry(info, value, rule, history)

    def advance(self, iteration: int) -> None:
        """Apply the rule of one iteration, after its forward pass."""
        for entry in self._entries.values():
            change(
                entry.rule,
                torch.zeros_like(entry.value),
                entry.history,
                entry.value,
                rate=0.0,
                step=iteration,
            )

    def copies(self) -> Named:
        """Return copies of the histories by the name of the blob; blobs whose history is 0 are
        left out.
        """
        return {
            name: [on_host(tensor).reshape(entry.info.shape) for tensor in entry.history]
            for name, entry in self._entries.items()
        }

    def restore(self, histories: Mapping[str, Sequence[Tensor]]) -> None:
        """Set the histories to a snapshot's."""
        for name, entry in self._entries.items():
            for tensor, value in zip(entry.history, histories[name], strict=True):
                tensor.copy_(value.reshape(-1))

    def leaf(self) -> Leaf:
        """Return the histories as a leaf of a state. Virtual worker 0, which is rank 0's, has them."""
        return Leaf(
            name="frozen",
            scope=Scope.ROOT,
            read=self.copies,
            write=lambda found: self.restore(found.shared),
        )
