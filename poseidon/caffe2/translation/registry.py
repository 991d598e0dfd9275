"""The registry of translators, and the translation of a net layer by layer.

A translator is a function `(layer, blobs, is_test, **more) -> (operators, parameters)`:

- `layer`: its LayerParameter, in the current format of Caffe.
- `blobs`: its arrays in the trained model.
- `is_test`: whether the net is for inference.
- `more`: `shape`, the `Shapes` of the net so far; `net` and `net_params`, the messages that grow;
  `input_dims`, the shape of the first input, empty where it is unknown.

It returns an OperatorDef, or a list of them, and the TensorProtos of its parameters. It raises
`LayerError`, a clause, for a layer that it cannot translate; the net's file, line and layer come
before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from poseidon.caffe.layers.base import LayerError
from poseidon.caffe.proto.caffe_pb2 import NetParameter, NetState
from poseidon.caffe.proto.definition import NetDefinition, filter_net, parse_net
from poseidon.caffe.snapshot.caffemodel import LayerBlobs, blobs_of
from poseidon.caffe2 import utils
from poseidon.caffe2.operators.layers.windows import Windows
from poseidon.caffe2.proto.caffe2_pb2 import NetDef, OperatorDef, TensorProtos
from poseidon.caffe2.runtime import bind
from poseidon.errors import UsageError

Translator = Callable[..., tuple[Any, Sequence[Any]]]
Shape = tuple[int, ...]


class Shapes:
    """The shapes of blobs, as far as they follow from the shapes of the inputs."""

    def __init__(self, net: NetDef, params: TensorProtos, inputs: Mapping[str, Shape]) -> None:
        self._net, self._params, self._inputs = net, params, inputs

    def __bool__(self) -> bool:
        """Whether the shape of any input is known."""
        return bool(self._inputs)

    def __call__(self, blob: str, operators: Sequence[OperatorDef] = ()) -> Shape:
        """Return the shape of a blob behind all operators so far, and these.

        Raises:
            LayerError: it is not known.
        """
        known = dict(self._inputs)
        known.update((tensor.name, tuple(tensor.dims)) for tensor in self._params.protos)
        given = {name: torch.empty(shape, device="meta") for name, shape in known.items()}
        found = bind.infer([self._net, NetDef(op=operators)], given).get(blob)
        if found is None:
            raise LayerError(
                f"needs the shape of '{blob}', which does not follow from the shapes of the "
                "inputs; give the first of them as input_dims"
            )
        return tuple(found.shape)


class TranslatorRegistry:
    """The translators by the type of layer; scripts add their own with `Register`."""

    registry_: ClassVar[dict[str, Translator]] = {}

    @classmethod
    def Register(cls, *kinds: str) -> Callable[[Translator], Translator]:
        """Return a decorator that makes a function the translator of layers of these types."""

        def register(translator: Translator) -> Translator:
            cls.registry_.update(dict.fromkeys(kinds, translator))
            return translator

        return register

    @classmethod
    def TranslateLayer(
        cls, layer: Any, pretrained_blobs: Sequence[Any], is_test: bool, **kwargs: Any
    ) -> tuple[list[OperatorDef], list[Any]]:
        """Return the operators and the parameters of a layer.

        Raises:
            LayerError: there is no translator for it, or it refuses a setting.
        """
        translator = cls.registry_.get(layer.type)
        if translator is None:
            raise LayerError("has no translation; TranslatorRegistry.Register adds one")
        operators, params = translator(layer, pretrained_blobs, is_test, **kwargs)
        return operators if isinstance(operators, list) else [operators], list(params)

    @classmethod
    def TranslateModel(
        cls,
        caffe_net: NetParameter,
        pretrained_net: NetParameter,
        is_test: bool = False,
        net_state: NetState | None = None,
        remove_legacy_pad: bool = False,
        input_dims: Sequence[int] | None = None,
    ) -> tuple[NetDef, TensorProtos]:
        """Return the net of a definition of Caffe, and its parameters.

        Args:
            caffe_net: the definition, in any format that Caffe has had.
            pretrained_net: the trained model; its layers are found by name.
            is_test: whether the net is for inference: no dropout, batch normalization's estimates.
            net_state: phase, level and stages that select layers; by default the phase TEST.
            remove_legacy_pad: give poolings the padding that Caffe's rounding means for inputs of
                this shape, in place of the argument `legacy_pad`.
            input_dims: the shape of the first input; by default from the definition.

        Raises:
            DefinitionError: a layer cannot be translated; one sentence names it.
            SnapshotError: a blob of the model has not as many values as its shape says.
            UsageError: `input_dims` is not a shape.
        """
        name = caffe_net.name or "the net"
        definition = parse_net(caffe_net.SerializeToString(), source=name, folder=Path())
        blobs = blobs_of(pretrained_net, "the trained model")
        return translate(definition, blobs, is_test, net_state, remove_legacy_pad, input_dims)


def translate(
    definition: NetDefinition,
    blobs: Sequence[LayerBlobs],
    is_test: bool,
    net_state: NetState | None,
    remove_legacy_pad: bool,
    input_dims: Sequence[int] | None,
) -> tuple[NetDef, TensorProtos]:
    """Return the net of a definition, and its parameters; see `TranslatorRegistry.TranslateModel`.

    Args:
        definition: the net of Caffe.
        blobs: the arrays of each layer of the trained model.
    """
    definition = filter_net(definition, net_state or NetState())
    net, params = NetDef(name=definition.param.name), TensorProtos()
    inputs = _inputs(definition.param, input_dims)
    shape = Shapes(net, params, inputs)
    first = next(iter(inputs.values()), ())
    more = {"shape": shape, "net": net, "net_params": params, "input_dims": first}
    arrays, names = dict(blobs), set[str]()
    for index, layer in enumerate(definition.param.layer):
        try:
            operators, made = TranslatorRegistry.TranslateLayer(
                layer, arrays.get(layer.name, []), is_test, **more
            )
            for tensor in made:
                if tensor.name in names:
                    raise LayerError(
                        f"a second parameter would have the name '{tensor.name}'; give the layer a "
                        "top of its own"
                    )
                names.add(tensor.name)
            if remove_legacy_pad:
                _pad_by_shape(operators, shape)
        except LayerError as error:
            raise definition.error(index, str(error)) from error
        net.op.extend(operators)
        params.protos.extend(made)
    return net, params


def _inputs(net: NetParameter, input_dims: Sequence[int] | None) -> dict[str, Shape]:
    """Return the shapes of the net's inputs that are known, the first input first.

    Raises:
        UsageError: `input_dims` is not a shape.
    """
    if input_dims and min(input_dims) < 1:
        raise UsageError(f"input_dims is {list(input_dims)}, expected numbers from 1 on")
    found: dict[str, Shape] = {}
    sources = [layer for layer in net.layer if not layer.bottom]
    if input_dims and sources:
        found[sources[0].top[0]] = tuple(input_dims)
    for layer in sources:
        given = [tuple(shape.dim) for shape in layer.input_param.shape]
        shapes_of_tops = given * len(layer.top) if len(given) == 1 else given
        for top, shape in zip(layer.top, shapes_of_tops, strict=False):
            found.setdefault(top, shape)
    return found


def _pad_by_shape(operators: Sequence[OperatorDef], shape: Shapes) -> None:
    """Replace `legacy_pad` of the operators of a layer by paddings."""
    for op in operators:
        if any(argument.name == "legacy_pad" for argument in op.arg):
            try:
                fit = Windows(op).fit(shape(op.input[0], operators)[2:])
            except ValueError as error:
                raise LayerError(str(error)) from error
            kept = [arg for arg in op.arg if arg.name not in ("legacy_pad", "pad", "pads")]
            del op.arg[:]
            op.arg.extend(kept)
            AddArgument(op, "pads", [*fit.before, *(max(after, 0) for after in fit.after)])


def BaseTranslate(layer: Any, caffe2_type: str) -> OperatorDef:
    """Return an operator with the bottoms of a layer as inputs and its tops as outputs."""
    return OperatorDef(type=caffe2_type, input=layer.bottom, output=layer.top)


def AddArgument(op: OperatorDef, key: str, value: Any) -> None:
    op.arg.extend([utils.MakeArgument(key, value)])
