"""LSTM, GRU and RNN as Caffe2's recurrent networks, in one direction or both.

Law: sequences have one length. The gates of ONNX's weights are put into Caffe2's order: input,
forget, output and cell of an LSTM; reset, update and output of a GRU.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from poseidon.caffe2 import core, gru_cell, rnn_cell
from poseidon.caffe2.model_helper import ModelHelper
from poseidon.caffe2.onnx.nodes import Array, Node, NoForm, converts

_ORDERS = {"LSTM": (0, 2, 1, 3), "GRU": (1, 0, 2), "RNN": (0,)}
"""The gates of ONNX's weights in Caffe2's order."""
_GRU_GATES = ("reset_gate_t", "update_gate_t", "output_gate_t")


@converts("LSTM", "GRU", "RNN")
def _recurrent(node: Node) -> None:
    node.allow(layout=0, clip=None, input_forget=0)
    direction = node.get("direction", "forward")
    if 4 in node:
        raise NoForm("Caffe2 has no padding of shorter sequences")
    if 7 in node:
        raise NoForm("Caffe2 has no peepholes")
    backward = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    made = [_direction(node, place, last) for place, last in enumerate(backward)]
    every = [
        node.step("ExpandDims", [hidden], dims=[1]) for hidden, *_ in made
    ]  # T x N x H as T x 1 x N x H
    finals = list(zip(*(rest for _, *rest in made), strict=True))
    for name, parts, axis in zip(node.outputs, [every, *finals], (1, 0, 0), strict=False):
        if name and len(parts) == 1:
            node.emit("Copy", parts, [name])
        elif name:
            node.emit("Concat", parts, [name, node.rest()], axis=axis)


def _direction(node: Node, place: int, backward: bool) -> list[str]:
    """Add one direction; return all hidden states and the last ones (hidden, and cell)."""
    scope = node.facts.fresh(f"{node.outputs[0] or node.outputs[1]}/{node.kind}")
    weights, recurrence, bias = (
        node.facts.constants.get(node.inputs[index]) if index in node else None
        for index in (1, 2, 3)
    )
    if weights is None or recurrence is None or (3 in node and bias is None):
        raise NoForm("its weights are computed, not constant")
    gates, inputs = weights.shape[1:]
    size = recurrence.shape[2]
    biases = np.zeros(2 * gates, np.float32) if bias is None else bias[place]
    count = 2 if node.kind == "LSTM" else 1
    x = node.inputs[0]
    lengths = _lengths(node) if backward else ""
    if backward:
        x = node.step("ReversePackedSegs", [x, lengths])
    firsts = [_first(node, 5 + index, place, size, len(weights)) for index in range(count)]
    model = ModelHelper(name=scope)
    with core.NameScope("", reset=True):
        found = _cell(node)(
            model,
            core.BlobReference(x),
            None,
            [core.BlobReference(first) for first in firsts],
            inputs,
            size,
            scope=scope,
            forward_only=True,
        )
    for name, value in _parameters(node.kind, weights[place], recurrence[place], biases).items():
        node.facts.constants[f"{scope}/{name}"] = value
    node.operators += list(model.net.Proto().op)
    hidden, *rest = map(str, found)
    if backward:
        hidden = node.step("ReversePackedSegs", [hidden, lengths])
    return [hidden, *rest[::2]]


def _cell(node: Node) -> Any:
    """Return the function that adds the network."""
    given = [each.decode().lower() for each in node.get("activations", [])]
    usual = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"], "RNN": ["tanh"]}
    wanted = usual[node.kind]
    ones = [given[at : at + len(wanted)] for at in range(0, len(given), len(wanted))] or [wanted]
    if (
        node.kind == "RNN"
        and all(one == ones[0] for one in ones)
        and ones[0][0] in ("tanh", "relu")
    ):
        return lambda *args, **kwargs: rnn_cell.BasicRNN(*args, activation=ones[0][0], **kwargs)
    if any(one != wanted for one in ones):
        raise NoForm(f"Caffe2 has no {node.kind} with the activations {', '.join(given)}")
    if node.kind == "LSTM":
        return rnn_cell.LSTM
    before = bool(node.get("linear_before_reset", 0))
    return lambda *args, **kwargs: gru_cell.GRU(*args, linear_before_reset=before, **kwargs)


def _parameters(kind: str, weights: Array, recurrence: Array, bias: Array) -> dict[str, Array]:
    """Return the parameters of a cell by their names in its scope."""
    order = _ORDERS[kind]

    def parts(value: Array) -> list[Array]:
        gates = np.split(value, len(order))
        return [gates[index] for index in order]

    of_input, of_state = np.split(bias, 2)
    made = {"i2h_w": np.concatenate(parts(weights)), "i2h_b": np.concatenate(parts(of_input))}
    if kind == "GRU":
        for name, w, b in zip(_GRU_GATES, parts(recurrence), parts(of_state), strict=True):
            made |= {f"{name}_w": w, f"{name}_b": b}
        return made
    return made | {
        "gates_t_w": np.concatenate(parts(recurrence)),
        "gates_t_b": np.concatenate(parts(of_state)),
    }


def _extent(node: Node, axis: int) -> str:
    """Return the extent of the sequence along an axis, as a vector of one number."""
    shape = node.step("Shape", node.inputs[:1])
    return node.step("Slice", [shape], starts=[axis], ends=[axis + 1])


def _lengths(node: Node) -> str:
    """Return the lengths of all sequences, which are equal: int32."""
    tiled = node.step("Tile", [_extent(node, 0), _extent(node, 1)], axis=0)
    return node.step("Cast", [tiled], to=core.DataType.INT32)


def _first(node: Node, index: int, place: int, size: int, directions: int) -> str:
    """Return the first state of a direction, 1 x N x H: an input, or zeros."""
    if index in node:
        if directions == 1:
            return node.inputs[index]
        return node.step("Slice", [node.inputs[index]], starts=[place], ends=[place + 1])
    ends = [node.constant(np.array([value], np.int64), "extent") for value in (1, size)]
    shape = node.facts.fresh(f"{node.outputs[0]}/shape")
    node.emit("Concat", [ends[0], _extent(node, 1), ends[1]], [shape, node.rest()], axis=0)
    return node.step("ConstantFill", [shape], input_as_shape=1, value=0.0)
