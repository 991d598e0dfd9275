"""NetSpec: nets written as Python expressions, `n.conv1 = L.Convolution(n.data, num_output=32,
kernel_size=5)`.

Law: the result equals a hand-written definition. Layers are in the order of their first use, and
keywords are the schema's field names. A keyword is a field of the layer type's parameter message
(`num_output` of convolution_param) if that has such a field, else a field of the layer (`param`,
`include`, `loss_weight`).

    from poseidon.pycaffe import NetSpec, layers as L, params as P

    n = NetSpec()
    n.data, n.label = L.Data(batch_size=64, backend=P.Data.LMDB, source="train_lmdb", ntop=2)
    n.ip = L.InnerProduct(n.data, num_output=10, weight_filler=dict(type="xavier"))
    n.loss = L.SoftmaxWithLoss(n.ip, n.label)
    print(n.to_proto())
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from google.protobuf.message import Message

from poseidon.caffe.proto import caffe_pb2
from poseidon.caffe.proto.caffe_pb2 import LayerParameter, NetParameter
from poseidon.errors import unknown


def param_name_dict() -> dict[str, str]:
    """Return the field of `LayerParameter` with the settings of each type: Convolution ->
    convolution_param.

    If several fields have the same message type, the last one counts, as in pycaffe.
    """
    return {
        field.message_type.name.removesuffix("Parameter"): field.name
        for field in LayerParameter.DESCRIPTOR.fields
        if field.message_type is not None and field.name.endswith("_param")
    }


_FIELDS = param_name_dict()


def to_proto(*tops: Top | Function) -> NetParameter:
    """Return the net that computes these tops. Blobs and layers get names such as Convolution1."""
    writer = _Writer({})
    for top in tops:
        writer.write(_function(top))
    return writer.net()


def _function(top: Top | Function) -> Function:
    return top.fn if isinstance(top, Top) else top


def uncamel(name: str) -> str:
    """Return a name of words in capitals as one with underscores: InnerProduct as inner_product.

    A capital begins a word unless it is the first letter, the last, or another capital follows.
    """
    parts = [
        f"_{letter}" if index and letter.isupper() and not (after or "A").isupper() else letter
        for index, (letter, after) in enumerate(zip(name, [*name[1:], ""], strict=True))
    ]
    return "".join(parts).lower()


def assign_proto(proto: Message, name: str, value: Any) -> None:
    """Set a field from a Python value: a list for a repeated field, a dict for a message, a
    string for an enum.

    Args:
        value: the value. A dict for a repeated message field is a single element.

    Raises:
        AttributeError: there is no such field.
        TypeError: the value has a wrong type.
    """
    fields = proto.DESCRIPTOR.fields_by_name
    if name not in fields:
        raise AttributeError(unknown(f"field of {proto.DESCRIPTOR.name}", name, fields))
    field = fields[name]
    if field.is_repeated:
        values = value if isinstance(value, (list, tuple)) else [value]
        _extend(getattr(proto, name), values, is_message=field.message_type is not None)
    elif isinstance(value, Mapping):
        message = getattr(proto, name)
        message.SetInParent()
        for key, item in value.items():
            assign_proto(message, key, item)
    elif isinstance(value, Message):
        getattr(proto, name).CopyFrom(value)
    else:
        setattr(proto, name, value)


def _extend(target: Any, values: Iterable[Any], *, is_message: bool) -> None:
    for value in values:
        if not is_message:
            target.append(value)
        elif isinstance(value, Message):
            target.add().CopyFrom(value)
        else:
            item = target.add()
            for key, inner in value.items():
                assign_proto(item, key, inner)


class Top:
    """An output of a layer.

    Attributes:
        n: the index of the top.
    """

    def __init__(self, fn: Function, n: int) -> None:
        self.fn = fn
        self.n = n

    def to_proto(self) -> NetParameter:
        """Return the net that computes this blob."""
        return to_proto(self)


class Function:
    """A layer of a NetSpec.

    Args:
        inputs: the tops that it reads.
        params: the settings, and three keywords that are not fields: `ntop`, the number of tops
            (1); `in_place`, whether the tops are the bottoms; `name`.

    Raises:
        TypeError: an input is not a `Top`, usually because it is the tuple of a layer with several
            tops.
    """

    def __init__(self, type_name: str, inputs: tuple[Any, ...], params: Mapping[str, Any]) -> None:
        self.type_name = type_name
        for index, top in enumerate(inputs):
            if not isinstance(top, Top):
                raise TypeError(f"{type_name} input {index} is not a Top (type is {type(top)})")
        self.inputs: tuple[Top, ...] = inputs
        self.params = dict(params)
        self.ntop = int(self.params.pop("ntop", 1))
        self.in_place = bool(self.params.pop("in_place", False))
        self.tops = tuple(Top(self, n) for n in range(self.ntop))

    def to_proto(self) -> NetParameter:
        """Return the net that ends in this layer."""
        return to_proto(self)

    def param(self, bottoms: Iterable[str], tops: Iterable[str], name: str) -> LayerParameter:
        """Return the definition of the layer."""
        layer = LayerParameter(name=name, type=self.type_name, bottom=bottoms, top=tops)
        own = _FIELDS.get(self.type_name)
        known = getattr(layer, own).DESCRIPTOR.fields_by_name if own else {}
        for key, value in self.params.items():
            target: Message = getattr(layer, own) if own and key in known else layer
            # Fields such as `param` and `transform_param` always belong to the layer.
            assign_proto(layer if key.endswith("param") else target, key, value)
        return layer


class _Writer:
    """A writer of the layers that compute tops."""

    def __init__(self, names: Mapping[Top | Function, str]) -> None:
        self._names = dict(names)
        self._counts: Counter[str] = Counter()
        self._layers: dict[Function, LayerParameter] = {}

    def net(self) -> NetParameter:
        return NetParameter(layer=self._layers.values())

    def write(self, wanted: Function) -> None:
        """Append a layer after the layers that it needs. Without recursion, because
        deep nets would exceed Python's stack.
        """
        waiting = [wanted]
        while waiting:
            function = waiting[-1]
            missing = [top.fn for top in function.inputs if top.fn not in self._layers]
            if function in self._layers:
                waiting.pop()
            elif missing:
                waiting.extend(reversed(missing))
            else:
                self._append(waiting.pop())

    def _append(self, function: Function) -> None:
        bottoms = [self._layers[top.fn].top[top.n] for top in function.inputs]
        tops = (
            bottoms if function.in_place else [self._name(top, function) for top in function.tops]
        )
        first: Top | Function = function.tops[0] if function.tops else function
        self._layers[function] = function.param(bottoms, tops, self._name(first, function))

    def _name(self, thing: Top | Function, function: Function) -> str:
        """Return the name set by the user, or the type and a number: Convolution1."""
        if thing not in self._names:
            self._counts[function.type_name] += 1
            self._names[thing] = f"{function.type_name}{self._counts[function.type_name]}"
        return self._names[thing]


class NetSpec:
    """A net that is built by setting attributes. The attribute's name becomes the name of the blob
    and, for a first top, of the layer.

    Attributes:
        tops: all attributes in order.
    """

    tops: OrderedDict[str, Any]

    def __init__(self) -> None:
        super().__setattr__("tops", OrderedDict())

    def __setattr__(self, name: str, value: Any) -> None:
        self.tops[name] = value

    def __getattr__(self, name: str) -> Any:
        if name not in self.tops:
            raise AttributeError(unknown("blob of this NetSpec", name, self.tops))
        return self.tops[name]

    def __setitem__(self, key: str, value: Any) -> None:
        self.tops[key] = value

    def __getitem__(self, key: str) -> Any:
        return self.tops[key]

    def __delitem__(self, key: str) -> None:
        del self.tops[key]

    def __contains__(self, key: str) -> bool:
        return key in self.tops

    def to_proto(self) -> NetParameter:
        """Return the definition."""
        writer = _Writer({top: name for name, top in self.tops.items()})
        for top in self.tops.values():
            writer.write(_function(top))
        return writer.net()


class Layers:
    """The namespace of `L.<type>(*bottoms, **settings)`, which returns the top, a
    tuple of tops, or the layer if it has none.
    """

    def __getattr__(self, type_name: str) -> Callable[..., Any]:
        if type_name.startswith("__"):
            raise AttributeError(type_name)

        def layer(*bottoms: Any, **settings: Any) -> Any:
            function = Function(type_name, bottoms, settings)
            if function.ntop == 0:
                return function
            return function.tops[0] if function.ntop == 1 else function.tops

        layer.__name__ = type_name
        return layer


class _Choices:
    """The enum values and nested names of a parameter message."""

    def __init__(self, name: str) -> None:
        self._message = getattr(caffe_pb2, f"{name}Parameter")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)


class Parameters:
    """The namespace of `P.<type>.<NAME>`, the enum values of parameter messages, such as
    `P.Pooling.MAX`.
    """

    def __getattr__(self, name: str) -> _Choices:
        if not hasattr(caffe_pb2, f"{name}Parameter"):
            raise AttributeError(f"the schema has no {name}Parameter")
        return _Choices(name)


layers = Layers()
params = Parameters()
