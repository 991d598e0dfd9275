"""The model replica of one worker: the train net, the test nets that share its weights, and the
tensors to exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import Tensor, nn

from poseidon.engine.tools.preflight import require_loss
from poseidon.engine.tools.solo import load_models
from poseidon.exchange.base import Trained
from poseidon.layers.base import LayerContext
from poseidon.net.compile import compile_net
from poseidon.net.net import Net
from poseidon.net.params import ParamInfo
from poseidon.proto.definition import SolverDefinition, TestNet
from poseidon.solvers.settings import SolverSettings

Values = Mapping[nn.Parameter, Tensor]


class Replica:
    """The nets of one worker, built from a solver and filled.

    Args:
        solver: the solver definition.
        settings: its checked settings.
        context: rank, device, seed and so on of this worker; the nets set the phase.

    Attributes:
        train: the train net.
        tests: each test net, with its definition.
        exchanged: the blobs that are trained, or averaged as statistics.
        trained: the same, as tensors of an exchange.
    """

    def __init__(
        self, solver: SolverDefinition, settings: SolverSettings, context: LayerContext
    ) -> None:
        self.solver = solver
        self.settings = settings
        self.context = context
        definition = solver.net_definition()
        self.train = compile_net(definition, context, state=solver.train_state(definition))
        self.tests: list[tuple[TestNet, Net]] = []
        try:
            for test in solver.test_nets():
                net = compile_net(test.definition, context, state=test.state, share_with=self.train)
                self.tests.append((test, net))
            self.exchanged = [
                info
                for info in self.train.parameters_info
                if info.parameter.requires_grad or info.statistics
            ]
            require_loss(definition, self.train.plan, settings)
            rows = self.batch_records * settings.iter_size
            self.trained = [_trained(info, settings, rows) for info in self.exchanged]
        except BaseException:
            self.close()
            raise

    def load(self, models: Sequence[Path]) -> list[str]:
        """Copy the weights of models by layer name, later ones over earlier ones.

        Returns:
            What was and was not copied, as sentences.

        Raises:
            SnapshotError: a model cannot be read, or a layer's blobs have other shapes.
        """
        return [f"{path}: {report.summary()}" for path, report in load_models(self.train, models)]

    def forward_backward(
        self, after_pass: Callable[[], None], on_loss: Callable[[Tensor], None]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run `iter_size` forward and backward passes, whose gradients add up.

        Args:
            after_pass: called after each pass.
            on_loss: called with the loss of each pass, before its backward pass.

        Returns:
            The mean loss, detached, and the last pass's outputs.
        """
        passes = self.settings.iter_size
        total: Tensor | None = None
        outputs: dict[str, Tensor] = {}
        for _ in range(passes):
            outputs = self.train()
            loss = self.train.loss
            on_loss(loss.detach())
            if loss.requires_grad:  # not if nothing below the loss is trained
                loss.backward()
            self.train.log_backward()
            total = loss.detach() if total is None else total + loss.detach()
            after_pass()
        assert total is not None
        return total / passes, outputs

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
        """Records that one pass of this worker reads; 0 if the net has no data layer."""
        shapes = [reader.shape for _, reader in self.train.readers()]
        return shapes[0][0] if shapes else 0

    def close(self) -> None:
        """Stop reading data."""
        for net in (self.train, *(net for _, net in self.tests)):
            net.close()


def _trained(info: ParamInfo, settings: SolverSettings, rows: int) -> Trained:
    return Trained(
        name=info.name,
        tensor=info.parameter,
        rule=settings.rule(info.lr_mult, info.decay_mult),
        factor_rows=rows if info.factors else 0,
        statistics=info.statistics,
    )
