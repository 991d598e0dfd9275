"""The shapes of a net's blobs, and its layers set up again when shapes change.

Law: shapes are settled when a net is compiled, and a layer that no changing shape can reach is never looked at again. A
layer above one whose tops may change is watched: before it runs, its bottoms are compared with those it was set up
for. What is true after every pass: each layer is set up for the bottoms it ran on, and `shapes` says what they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from poseidon.errors import UsageError, unknown
from poseidon.layers.base import Layer, LayerError, Shape, times
from poseidon.net.plan import NetPlan
from poseidon.proto.definition import NetDefinition

Result = Tensor | tuple[Tensor, ...]


class Fit:
    """What each layer of a net is set up for.

    Args:
        definition: the net, for the places of mistakes.
        plan: how its layers are joined.
        layers: one a step, set up.
        shapes: of each slot.

    Attributes:
        shapes: of each slot, as of the last pass.
        watched: places of the steps whose shapes may change from pass to pass.
    """

    def __init__(
        self, definition: NetDefinition, plan: NetPlan, layers: Sequence[Layer], shapes: Sequence[Shape]
    ) -> None:
        self._definition = definition
        self._plan = plan
        self._layers = tuple(layers)
        self.shapes = list(shapes)
        self._fitted = [[shapes[slot] for slot in step.bottoms] for step in plan.steps]
        self.watched = watched_steps(plan, layers)

    def blob_shapes(self) -> dict[str, Shape]:
        """Return each blob's shape."""
        return {name: self.shapes[slot] for name, slot in self._plan.names.items()}

    def run(self, place: int, *bottoms: Tensor) -> Result:
        """Run the layer of a watched step, set up for its bottoms.

        Raises:
            LayerError: the layer cannot take bottoms of these shapes.
        """
        found = [tuple(bottom.shape) for bottom in bottoms]
        if found != self._fitted[place]:
            self._fitted[place] = []  # one that refuses is set up for nothing: the next pass asks again
            self._layers[place].setup(found)
            self._fitted[place] = found
        result: Result = self._layers[place](*bottoms)
        tops = result if isinstance(result, tuple) else (result,)
        for slot, top in zip(self._plan.steps[place].tops, tops, strict=True):
            self.shapes[slot] = tuple(top.shape)
        return result

    def reshape(self, changed: Mapping[int, Shape]) -> None:
        """Give slots that no layer computes other shapes, and set up every layer that this reaches.

        Args:
            changed: the new shape of such slots.

        Raises:
            DefinitionError: a layer cannot take these shapes; every layer is then set up as before.
        """
        before = list(self.shapes)
        for slot, shape in changed.items():
            self.shapes[slot] = shape
        for place, step in enumerate(self._plan.steps):
            try:
                self._set_up(place)
            except LayerError as error:
                self._go_back(before, place)
                raise self._definition.error(step.layer, str(error)) from error

    def _set_up(self, place: int) -> None:
        step = self._plan.steps[place]
        bottoms = [self.shapes[slot] for slot in step.bottoms]
        if bottoms != self._fitted[place]:
            self._fitted[place] = bottoms
            for slot, shape in zip(step.tops, self._layers[place].setup(bottoms), strict=True):
                self.shapes[slot] = shape

    def _go_back(self, before: list[Shape], last: int) -> None:
        self.shapes[:] = before
        for place in range(last + 1):
            self._set_up(place)


def watched_steps(plan: NetPlan, layers: Sequence[Layer]) -> frozenset[int]:
    """Places of the layers whose tops may change shape, and of all layers above them."""
    changing: set[int] = set()
    watched = set()
    for place, (step, layer) in enumerate(zip(plan.steps, layers, strict=True)):
        if layer.tops_may_change_shape or not changing.isdisjoint(step.bottoms):
            watched.add(place)
            changing.update(step.tops)
    return frozenset(watched)


def check_known(names: Mapping[str, Shape], known: Mapping[str, Shape]) -> None:
    """Check shapes for the inputs of a net.

    Raises:
        UsageError: no such input, or an extent below 1.
    """
    for name, shape in names.items():
        if name not in known:
            raise UsageError(unknown("input", name, known))
        if min(shape, default=1) < 1:
            raise UsageError(f"input '{name}' is given shape {times(shape)}, expected extents of at least 1")
