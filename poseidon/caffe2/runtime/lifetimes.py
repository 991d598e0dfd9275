"""When the values of a net's blobs are dead: an operator of the net makes them, and a later one
overwrites them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from google.protobuf import text_format

from poseidon.caffe2.operators import registry
from poseidon.caffe2.proto.caffe2_pb2 import NetDef, OperatorDef

STEP_NETS = ("step_net", "backward_step_net")
"""The arguments of recurrent operators that hold a NetDef, or its text."""


def overwritten(operators: Sequence[OperatorDef]) -> Iterator[tuple[str, int, int]]:
    """Yield name, last user and overwriting operator of each value that is dead in between.

    Left out are values that come from outside the net, and blobs that operators may use unseen:
    blobs of operators on blobs, which may read their outputs, and of nets in arguments.
    """
    hidden = _hidden(operators)
    made: set[str] = set()
    user: dict[str, int] = {}
    for index, operator in enumerate(operators):
        for name in dict.fromkeys(operator.output):
            if name in made and name not in operator.input and name not in hidden:
                yield name, user[name], index
        made.update(operator.output)
        user.update(dict.fromkeys((*operator.input, *operator.output), index))


def _hidden(operators: Sequence[OperatorDef]) -> set[str]:
    names = nested_blobs(operators)
    for operator in operators:
        if registry.is_registered(operator.type) and registry.find(operator.type).blobs:
            names.update((*operator.input, *operator.output))
    return names


def nested_blobs(operators: Iterable[OperatorDef]) -> set[str]:
    """Return the blobs that nets in arguments name: their operators read some that no operator
    outside shows.
    """
    names: set[str] = set()
    for operator in operators:
        for argument in operator.arg:
            nets = [*argument.nets, *([argument.n] if argument.HasField("n") else [])]
            if argument.name in STEP_NETS and argument.s:
                nets.append(text_format.Parse(argument.s.decode(), NetDef()))
            for net in nets:
                names.update((*net.external_input, *net.external_output), nested_blobs(net.op))
                names.update(name for inner in net.op for name in (*inner.input, *inner.output))
    return names
