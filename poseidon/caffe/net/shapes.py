"""The shapes of a net's blobs, and the setup of layers whose bottoms change shape.

Law: shapes are computed when a net is compiled. A layer that no change can reach is never checked
again. A layer above one whose tops may change is dynamic: before each run its bottoms are compared
with the bottoms of its last setup. After every pass each layer is set up for its current bottoms,
and `shapes` holds their shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from poseidon.caffe.layers.base import Layer, LayerError, Shape, times
from poseidon.caffe.net.net_plan import NetPlan
from poseidon.caffe.proto.definition import NetDefinition
from poseidon.errors import UsageError, unknown

Result = Tensor | tuple[Tensor, ...]


class SlotShapes:
    """The shape of each slot, and the bottom shapes for which each layer is set up.

    Args:
        definition: the net, for the location of errors.
        layers: the layers, one for each step, set up.

    Attributes:
        dynamic: the indices of the steps whose shapes may change from pass to pass.
    """

    def __init__(
        self,
        definition: NetDefinition,
        plan: NetPlan,
        layers: Sequence[Layer],
        shapes: Sequence[Shape],
    ) -> None:
        self._definition = definition
        self._plan = plan
        self._layers = tuple(layers)
        self.shapes = list(shapes)
        self._setup_shapes = [[shapes[slot] for slot in step.bottoms] for step in plan.steps]
        self.dynamic = dynamic_steps(plan, layers)

    def blob_shapes(self) -> dict[str, Shape]:
        """Return the shape of each blob by name."""
        return {name: self.shapes[slot] for name, slot in self._plan.names.items()}

    def run(self, position: int, *bottoms: Tensor) -> Result:
        """Run the layer of a dynamic step after setting it up for its bottoms.

        Raises:
            LayerError: the layer does not accept bottoms of these shapes, or a top in place has
                a different shape.
        """
        layer = self._layers[position]
        found = [tuple(bottom.shape) for bottom in bottoms]
        if found != self._setup_shapes[position]:
            self._setup_shapes[position] = []  # if setup fails, the next pass calls it again
            layer.checked_setup(found)
            self._setup_shapes[position] = found
        result: Result = layer(*bottoms)
        tops = [tuple(top.shape) for top in (result if isinstance(result, tuple) else (result,))]
        layer.check_in_place(found, tops)
        for slot, shape in zip(self._plan.steps[position].tops, tops, strict=True):
            self.shapes[slot] = shape
        return result

    def reshape(self, changed: Mapping[int, Shape]) -> None:
        """Change the shapes of input slots, and set up every layer that this affects.

        Raises:
            DefinitionError: a layer does not accept these shapes. All layers are then set up as
                before.
        """
        before = list(self.shapes)
        for slot, shape in changed.items():
            self.shapes[slot] = shape
        for position, step in enumerate(self._plan.steps):
            try:
                self._set_up(position)
            except LayerError as error:
                self._restore(before, position)
                raise self._definition.error(step.layer, str(error)) from error

    def _set_up(self, position: int) -> None:
        step = self._plan.steps[position]
        bottoms = [self.shapes[slot] for slot in step.bottoms]
        if bottoms != self._setup_shapes[position]:
            self._setup_shapes[position] = bottoms
            for slot, shape in zip(
                step.tops, self._layers[position].checked_setup(bottoms), strict=True
            ):
                self.shapes[slot] = shape

    def _restore(self, before: list[Shape], last: int) -> None:
        self.shapes[:] = before
        for position in range(last + 1):
            self._set_up(position)


def dynamic_steps(plan: NetPlan, layers: Sequence[Layer]) -> frozenset[int]:
    """Return the indices of the layers whose tops may change shape, and of all layers above
    them.
    """
    changing: set[int] = set()
    dynamic = set()
    for position, (step, layer) in enumerate(zip(plan.steps, layers, strict=True)):
        if layer.tops_may_change_shape or not changing.isdisjoint(step.bottoms):
            dynamic.add(position)
            changing.update(step.tops)
    return frozenset(dynamic)


def check_known(names: Mapping[str, Shape], known: Mapping[str, Shape]) -> None:
    """Check the names and shapes of inputs.

    Raises:
        UsageError: an input is unknown, or an extent is below 1.
    """
    for name, shape in names.items():
        if name not in known:
            raise UsageError(unknown("input", name, known))
        if min(shape, default=1) < 1:
            raise UsageError(
                f"input '{name}' has shape {times(shape)}, expected extents of at least 1"
            )
