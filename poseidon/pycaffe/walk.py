"""The inside of a net that keeps its blobs: what it consists of, by name and by index, and the walk over its layers.

Law: pycaffe's. Layers are walked one by one, each on what its blobs hold then; callbacks are called around each. An error
of a layer gets its file, line and name, and what the code of a user's layer raised comes out as it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from poseidon.errors import PoseidonError
from poseidon.layers.base import LayerError
from poseidon.layers.blob import Blob, Blobs
from poseidon.layers.inputs.sources import Input
from poseidon.layers.python_layer import CaffeLayer, Python, PythonLayerError
from poseidon.proto.caffe_pb2 import NetState
from poseidon.proto.definition import NetDefinition
from poseidon.pycaffe.batches import Array, batches
from poseidon.pycaffe.build import Built, build
from poseidon.pycaffe.mode import next_context
from poseidon.pycaffe.nodes import Node
from ps_server.numerics import prepare_thread

Callback = Callable[[int], Any]


class NetLayer:
    """A layer of a net: its type and its learnable blobs."""

    def __init__(self, kind: str, blobs: Blobs) -> None:
        self.type = kind
        self.blobs = blobs


class Walk:
    """A net's parts and the walk over them; see `Net` for the attributes."""

    def _take(self, definition: NetDefinition, state: NetState, seed: int | None = None) -> None:
        try:
            self._built = build(definition, next_context(state.phase, seed), state)
        except PoseidonError as error:
            raise users_own(error) from None
        built = self._built
        params = built.compiled.definition.param.layer
        self.name = definition.param.name
        self.phase = int(state.phase)
        self.blobs: OrderedDict[str, Blob] = built.blobs
        self.bottom_names: OrderedDict[str, list[str]] = built.bottoms
        self.top_names: OrderedDict[str, list[str]] = built.tops
        self.blob_loss_weights: OrderedDict[str, float] = built.loss_weights
        self.layers: list[NetLayer | CaffeLayer] = [
            _shown(node, param.type) for node, param in zip(built.nodes, params, strict=True)
        ]
        self._layer_names = [param.name for param in params]
        self._blob_names = list(self.blobs)
        self.layer_dict: OrderedDict[str, NetLayer | CaffeLayer] = OrderedDict(
            zip(self._layer_names, self.layers, strict=True)
        )
        self.params: OrderedDict[str, Blobs] = OrderedDict(
            (name, layer.blobs) for name, layer in self.layer_dict.items() if layer.blobs
        )
        self.inputs = [
            name
            for node, param in zip(built.nodes, params, strict=True)
            if isinstance(node.layer, Input)
            for name in param.top
        ]
        self.outputs = [name for name, _ in built.compiled.plan.outputs]
        self._callbacks: dict[str, list[Callback]] = {}

    def reshape(self) -> None:
        """Give every blob the shape that follows from the inputs' shapes."""
        for index, node in enumerate(self._built.nodes):
            self._guarded(index, node.fit)

    def before_forward(self, callback: Callback) -> None:
        """Have `callback(index of the layer)` called before each layer's forward."""
        self._callbacks.setdefault("before_forward", []).append(callback)

    def after_forward(self, callback: Callback) -> None:
        """Have `callback(index of the layer)` called after each layer's forward."""
        self._callbacks.setdefault("after_forward", []).append(callback)

    def before_backward(self, callback: Callback) -> None:
        """Have `callback(index of the layer)` called before each layer's backward."""
        self._callbacks.setdefault("before_backward", []).append(callback)

    def after_backward(self, callback: Callback) -> None:
        """Have `callback(index of the layer)` called after each layer's backward."""
        self._callbacks.setdefault("after_backward", []).append(callback)

    def _forward(self, start: int, end: int) -> float:
        """Run layers by index, both included; gives what they add to the loss."""
        prepare_thread()
        loss = 0.0
        for index in range(start, end + 1):
            self._call("before_forward", index)
            loss += self._guarded(index, self._built.nodes[index].forward)
            self._call("after_forward", index)
        return loss

    def _backward(self, start: int, end: int) -> None:
        """Propagate back by index, from `start` down to `end`."""
        prepare_thread()
        for index in range(start, end - 1, -1):
            self._call("before_backward", index)
            node = self._built.nodes[index]
            if node.need.backward:
                self._guarded(index, node.backward)
            self._call("after_backward", index)

    def _batch(self, arrays: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
        """Cut arrays into batches of the net's size."""
        if not arrays:
            return iter(())
        return batches(arrays, next(iter(self.blobs.values())).shape[0])

    @property
    def _blobs(self) -> list[Blob]:
        return list(self.blobs.values())

    @property
    def _blob_loss_weights(self) -> list[float]:
        return list(self.blob_loss_weights.values())

    @property
    def _inputs(self) -> list[int]:
        return [self._blob_names.index(name) for name in self.inputs]

    @property
    def _outputs(self) -> list[int]:
        return [self._blob_names.index(name) for name in self.outputs]

    def _bottom_ids(self, layer: int) -> list[int]:
        return [self._blob_names.index(name) for name in self.bottom_names[self._layer_names[layer]]]

    def _top_ids(self, layer: int) -> list[int]:
        return [self._blob_names.index(name) for name in self.top_names[self._layer_names[layer]]]

    def _guarded(self, index: int, run: Callable[[], Any]) -> Any:
        """Run a part of a layer; its error gets file, line and name, and a user's own comes out as it is."""
        try:
            return run()
        except PythonLayerError as error:
            raise users_own(error) from None
        except LayerError as error:
            raise self._built.compiled.definition.error(index, str(error)) from error

    def _call(self, when: str, index: int) -> None:
        for callback in self._callbacks.get(when, ()):
            callback(index)

    def __del__(self) -> None:
        built: Built | None = getattr(self, "_built", None)
        if built is not None:
            built.compiled.close()


def _shown(node: Node, kind: str) -> NetLayer | CaffeLayer:
    if isinstance(node.layer, Python):
        assert node.layer.instance is not None
        return node.layer.instance
    return NetLayer(kind, node.blobs)


def users_own(error: BaseException) -> BaseException:
    """What the code of a user's layer raised, if that is behind an error; else the error."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, PythonLayerError) and found.__cause__ is not None:
            return found.__cause__
        found = found.__cause__
    return error
