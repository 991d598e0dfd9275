"""The base class of pycaffe's Net: its parts by name and by index, and the loops over its layers.

Law: the semantics are pycaffe's. Layers run one by one on the current values of their blobs, with
callbacks before and after. File, line and layer name are added to errors of a layer. Exceptions of
users' layers are raised unchanged.

The types of pycaffe's lists. Scripts compare them: `type(net.params[k]) is
caffe._caffe.BlobVec`.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from poseidon.caffe.layers.base import LayerContext, LayerError
from poseidon.caffe.layers.blob import Blob, BlobVec
from poseidon.caffe.layers.python_layer import CaffeLayer, Python, PythonLayerError
from poseidon.caffe.layers.sources import Input
from poseidon.caffe.proto.caffe_pb2 import NetState
from poseidon.caffe.proto.definition import NetDefinition
from poseidon.errors import DataError, PoseidonError
from poseidon.pycaffe.debug import DebugLog
from poseidon.pycaffe.graph import build
from poseidon.pycaffe.mode import next_context
from poseidon.pycaffe.nodes import LayerNode
from ps_server.numerics import prepare_thread


class LayerVec(list[Any]):
    """The layers of a net: `net.layers`."""


class NetVec(list[Any]):
    """The test nets of a solver: `solver.test_nets`."""


class StringVec(list[str]):
    """Names: `net._layer_names`, `net._blob_names`."""


class IntVec(list[int]):
    """Indices: `net._inputs`, `net._outputs`, `net._bottom_ids(layer)`."""


class DtypeVec(list[float]):
    """Numbers: `net._blob_loss_weights`."""


Callback = Callable[[int], Any]


class NetLayer:
    """A layer as users see it.

    Attributes:
        type: as in the definition.
        blobs: its learnable blobs.
    """

    def __init__(self, definition: NetDefinition, index: int, node: LayerNode) -> None:
        self.type = definition.param.layer[index].type
        self.blobs = node.blobs
        self._definition, self._index, self._node = definition, index, node

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """Set the layer up for these bottoms and reshape the tops; learnable blobs keep their
        values.

        Raises:
            DefinitionError: the layer does not accept the shapes.
        """
        _located(self._definition, self._index, lambda: self._node.set_up(bottom, top))

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """Reshape the tops for the shapes of the bottoms, as `setup` does."""
        self.setup(bottom, top)


class NetBase:
    """The parts of a net and the loops over its layers; see `Net` for the attributes."""

    def _build(
        self, definition: NetDefinition, state: NetState, context: LayerContext | None = None
    ) -> None:
        try:
            self._built = build(definition, context or next_context(state.phase), state)
        except PoseidonError as error:
            raise original_error(error) from None
        built = self._built
        # At the end of the process this runs before Python takes modules apart, unlike __del__.
        weakref.finalize(self, built.compiled.close)
        params = built.compiled.definition.param.layer
        self.name = definition.param.name
        self._layer_names = StringVec(param.name for param in params)
        self.phase = int(state.phase)
        self.blobs: OrderedDict[str, Blob] = built.blobs
        self.blob_loss_weights: OrderedDict[str, float] = built.loss_weights
        self.layers: list[NetLayer | CaffeLayer] = LayerVec(
            _layer_of(built.compiled.definition, index, node)
            for index, node in enumerate(built.nodes)
        )
        self._blob_names = StringVec(self.blobs)
        self.params: OrderedDict[str, BlobVec] = OrderedDict(
            (name, layer.blobs)
            for name, layer in zip(self._layer_names, self.layers, strict=True)
            if layer.blobs
        )
        self.inputs = [
            name
            for node, param in zip(built.nodes, params, strict=True)
            if isinstance(node.layer, Input)
            for name in param.top
        ]
        self.outputs = [name for name, _ in built.compiled.plan.outputs]
        self._callbacks: dict[str, list[Callback]] = {}
        self._set_debug_info(built.compiled.definition.param.debug_info)

    @cached_property
    def bottom_names(self) -> OrderedDict[str, list[str]]:
        return OrderedDict(zip(self._layer_names, self._built.bottoms, strict=True))

    @cached_property
    def top_names(self) -> OrderedDict[str, list[str]]:
        return OrderedDict(zip(self._layer_names, self._built.tops, strict=True))

    @cached_property
    def layer_dict(self) -> OrderedDict[str, NetLayer | CaffeLayer]:
        return OrderedDict(zip(self._layer_names, self.layers, strict=True))

    def reshape(self) -> None:
        """Reshape all blobs for the shapes of the inputs."""
        for index, node in enumerate(self._built.nodes):
            self._guarded(index, node.reshape)

    def before_forward(self, callback: Callback) -> None:
        """Register `callback(layer_index)` to be called before the forward pass of each layer."""
        self._callbacks.setdefault("before_forward", []).append(callback)

    def after_forward(self, callback: Callback) -> None:
        """Register `callback(layer_index)` to be called after the forward pass of each layer."""
        self._callbacks.setdefault("after_forward", []).append(callback)

    def before_backward(self, callback: Callback) -> None:
        """Register `callback(layer_index)` to be called before the backward pass of each layer."""
        self._callbacks.setdefault("before_backward", []).append(callback)

    def after_backward(self, callback: Callback) -> None:
        """Register `callback(layer_index)` to be called after the backward pass of each layer."""
        self._callbacks.setdefault("after_backward", []).append(callback)

    def _set_debug_info(self, on: bool) -> None:
        """Log the mean absolute values of all blobs in every pass, or do not."""
        self._debug = (
            DebugLog(self._built) if on and self._built.compiled.context.rank == 0 else None
        )

    def _forward(self, start: int, end: int) -> float:
        """Run layers by index, inclusive. Return their contribution to the loss."""
        prepare_thread()
        loss = 0.0
        for index in range(start, end + 1):
            self._call("before_forward", index)
            loss += self._guarded(index, self._built.nodes[index].forward)
            if self._debug is not None:
                self._debug.forward(index)
            self._call("after_forward", index)
        return loss

    def _backward(self, start: int, end: int) -> None:
        """Run layers backward by index, from `start` down to `end`, inclusive."""
        prepare_thread()
        for index in range(start, end - 1, -1):
            self._call("before_backward", index)
            node = self._built.nodes[index]
            if node.flags.backward:
                self._guarded(index, node.backward)
            if self._debug is not None:
                self._debug.backward(index)
            self._call("after_backward", index)

    @property
    def _blobs(self) -> list[Blob]:
        return BlobVec(self.blobs.values())

    @property
    def _blob_loss_weights(self) -> list[float]:
        return DtypeVec(self.blob_loss_weights.values())

    @property
    def _inputs(self) -> list[int]:
        return self._ids(self.inputs)

    @property
    def _outputs(self) -> list[int]:
        return self._ids(self.outputs)

    def _bottom_ids(self, layer: int) -> list[int]:
        return self._ids(self._built.bottoms[layer])

    def _top_ids(self, layer: int) -> list[int]:
        return self._ids(self._built.tops[layer])

    def _ids(self, names: Sequence[str]) -> list[int]:
        return IntVec(self._blob_names.index(name) for name in names)

    def _guarded(self, index: int, run: Callable[[], Any]) -> Any:
        return _located(self._built.compiled.definition, index, run)

    def _call(self, when: str, index: int) -> None:
        for callback in self._callbacks.get(when, ()):
            callback(index)


def _layer_of(definition: NetDefinition, index: int, node: LayerNode) -> NetLayer | CaffeLayer:
    if isinstance(node.layer, Python):
        assert node.layer.instance is not None
        return node.layer.instance
    return NetLayer(definition, index, node)


def _located(definition: NetDefinition, index: int, run: Callable[[], Any]) -> Any:
    """Call a function of a layer and translate its errors: add the location, or raise a user's
    exception.
    """
    try:
        return run()
    except PythonLayerError as error:
        raise original_error(error) from None
    except LayerError as error:
        raise definition.error(index, str(error)) from error
    except DataError as error:
        raise DataError(str(definition.error(index, str(error)))) from error


def original_error(error: BaseException) -> BaseException:
    """Return the exception of a user's layer that caused an error, or the error itself."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, PythonLayerError) and found.__cause__ is not None:
            return found.__cause__
        found = found.__cause__
    return error
