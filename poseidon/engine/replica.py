"""One worker's nets: the train net, the test nets that share its weights, and the tensors to keep together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from poseidon.engine.preflight import require_loss
from poseidon.engine.solo import load_models
from poseidon.exchange.base import Trained
from poseidon.layers.base import LayerContext
from poseidon.net.compile import compile_net
from poseidon.net.net import Net
from poseidon.net.params import ParamInfo
from poseidon.proto.definition import SolverDefinition, TestNet
from poseidon.solvers.settings import SolverSettings


class Replica:
    """The nets of one worker, built and filled.

    Args:
        solver: the solver definition.
        settings: the same, checked.
        context: rank, device, seed and the rest; the phase is set by the nets.
    """

    def __init__(self, solver: SolverDefinition, settings: SolverSettings, context: LayerContext) -> None:
        self.context = context
        definition = solver.net_definition()
        self.train = compile_net(definition, context, state=solver.train_state(definition))
        self.tests: list[tuple[TestNet, Net]] = []
        try:
            for test in solver.test_nets():
                net = compile_net(test.definition, context, state=test.state, share_with=self.train)
                self.tests.append((test, net))
            self.moving = [
                info for info in self.train.parameters_info if info.parameter.requires_grad or info.statistics
            ]
            require_loss(definition, self.train.plan, settings)
            self.trained = [_trained(info, settings) for info in self.moving]
        except BaseException:
            self.close()
            raise

    def load(self, models: Sequence[Path]) -> list[str]:
        """Take over the weights of models by layer name, later ones over earlier ones.

        Returns:
            What was and was not taken over, as sentences.

        Raises:
            SnapshotError: a model cannot be read, or a layer's blobs have other shapes.
        """
        return [f"{path}: {report}" for path, report in load_models(self.train, models)]

    def forward_backward(
        self, passes: int, after_pass: Callable[[], None]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Forward and backward, `passes` times; gradients add up.

        Returns:
            The mean loss, detached, and the last pass's outputs.
        """
        total: Tensor | None = None
        outputs: dict[str, Tensor] = {}
        for _ in range(passes):
            outputs = self.train()
            loss = self.train.loss
            loss.backward()
            self.train.tell_backward()
            total = loss.detach() if total is None else total + loss.detach()
            after_pass()
        assert total is not None
        return total / passes, outputs

    @property
    def batch_records(self) -> int:
        """Records that one pass of this worker reads; 0 when the net has no data layer."""
        shapes = [reader.shape for _, reader in self.train.readers()]
        return shapes[0][0] if shapes else 0

    def close(self) -> None:
        """Stop reading data."""
        for net in (self.train, *(net for _, net in self.tests)):
            net.close()


def _trained(info: ParamInfo, settings: SolverSettings) -> Trained:
    return Trained(
        name=info.name,
        tensor=info.parameter,
        rule=settings.rule(info.lr_mult, info.decay_mult),
        factors=info.factors,
        statistics=info.statistics,
    )
