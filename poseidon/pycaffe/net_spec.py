"""NetSpec: nets written as Python expressions, `n.conv1 = L.Convolution(n.data, num_output=32, kernel_size=5)`.

Law: what is written comes out as the definition that one would have typed: layers in the order in which they are first
needed, field names spelled as in the schema. A keyword belongs to the layer's own parameter (`num_output` to
convolution_param) where that has such a field, else to the layer (`param`, `include`, `loss_weight`).

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

from poseidon.errors import unknown
from poseidon.proto import caffe_pb2
from poseidon.proto.caffe_pb2 import LayerParameter, NetParameter


def param_name_dict() -> dict[str, str]:
    """Field of `LayerParameter` that holds the settings of each type: Convolution -> convolution_param.

    Where several fields hold messages of one type the last counts, as in pycaffe.
    """
    return {
        field.message_type.name.removesuffix("Parameter"): field.name
        for field in LayerParameter.DESCRIPTOR.fields
        if field.message_type is not None and field.name.endswith("_param")
    }


_FIELDS = param_name_dict()


def to_proto(*tops: Top | Function) -> NetParameter:
    """Return the net that computes these tops, whose blobs and layers are named after their types: Convolution1."""
    writer = _Writer({})
    for top in tops:
        writer.write(_function(top))
    return writer.net()


def _function(top: Top | Function) -> Function:
    return top.fn if isinstance(top, Top) else top


def assign_proto(proto: Message, name: str, value: Any) -> None:
    """Set a field as Python writes it: lists for repeated fields, dicts for messages, strings for the names of enums.

    Args:
        proto: the message.
        name: its field.
        value: its new value; a dict for a repeated message field is one element.

    Raises:
        AttributeError: no such field.
        TypeError: a value of another kind.
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
    """One output of a layer.

    Attributes:
        fn: the layer.
        n: which of its tops.
    """

    def __init__(self, fn: Function, n: int) -> None:
        self.fn = fn
        self.n = n

    def to_proto(self) -> NetParameter:
        """Return the net that computes this blob."""
        return to_proto(self)


class Function:
    """A layer of a net that is being written.

    Args:
        type_name: its type.
        inputs: the tops it reads.
        params: its settings, and three words that are no fields: `ntop`, how many tops it has (1); `in_place`, its tops
            are its bottoms; `name`.

    Raises:
        TypeError: an input is no `Top`; the tuple of a layer with several tops, given whole, is the usual cause.
    """

    def __init__(self, type_name: str, inputs: tuple[Any, ...], params: Mapping[str, Any]) -> None:
        self.type_name = type_name
        for place, top in enumerate(inputs):
            if not isinstance(top, Top):
                raise TypeError(f"{type_name} input {place} is not a Top (type is {type(top)})")
        self.inputs: tuple[Top, ...] = inputs
        self.params = dict(params)
        self.ntop = int(self.params.pop("ntop", 1))
        self.in_place = bool(self.params.pop("in_place", False))
        self.tops = tuple(Top(self, n) for n in range(self.ntop))

    def to_proto(self) -> NetParameter:
        """Return the net that ends in this layer."""
        return to_proto(self)

    def param(self, bottoms: Iterable[str], tops: Iterable[str], name: str) -> LayerParameter:
        """Return the layer's definition."""
        layer = LayerParameter(name=name, type=self.type_name, bottom=bottoms, top=tops)
        own = _FIELDS.get(self.type_name)
        known = getattr(layer, own).DESCRIPTOR.fields_by_name if own else {}
        for key, value in self.params.items():
            target: Message = getattr(layer, own) if own and key in known else layer
            # Settings that layers share (`param`, `transform_param`) are never the layer's own.
            assign_proto(layer if key.endswith("param") else target, key, value)
        return layer


class _Writer:
    """Turns tops into the layers that compute them.

    Args:
        names: the names that the user gave.
    """

    def __init__(self, names: Mapping[Top | Function, str]) -> None:
        self._names = dict(names)
        self._counts: Counter[str] = Counter()
        self._layers: dict[Function, LayerParameter] = {}

    def net(self) -> NetParameter:
        return NetParameter(layer=self._layers.values())

    def write(self, wanted: Function) -> None:
        """Append a layer, and before it what it needs. No recursion: nets are deeper than Python's stack."""
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
        tops = bottoms if function.in_place else [self._name(top, function) for top in function.tops]
        first: Top | Function = function.tops[0] if function.tops else function
        self._layers[function] = function.param(bottoms, tops, self._name(first, function))

    def _name(self, thing: Top | Function, function: Function) -> str:
        """Return the name that the user gave, else the type and a number: Convolution1."""
        if thing not in self._names:
            self._counts[function.type_name] += 1
            self._names[thing] = f"{function.type_name}{self._counts[function.type_name]}"
        return self._names[thing]


class NetSpec:
    """A net, built by setting attributes: the attribute's name is the blob's, and that of the layer of its first top.

    Attributes:
        tops: everything that was set, in order.
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
    """`L.<type>(*bottoms, **settings)`: a layer. Gives its top; a tuple of several; the layer itself if it has none."""

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
    """The enum values and nested names of one parameter message."""

    def __init__(self, name: str) -> None:
        self._message = getattr(caffe_pb2, f"{name}Parameter")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)


class Parameters:
    """`P.<type>.<NAME>`: the value of an enum of a layer's parameter, as in `P.Pooling.MAX`."""

    def __getattr__(self, name: str) -> _Choices:
        if not hasattr(caffe_pb2, f"{name}Parameter"):
            raise AttributeError(f"the schema has no {name}Parameter")
        return _Choices(name)


layers = Layers()
params = Parameters()
