"""Recurrent layers against numpy, unrolled against the recurrent operator, and gradients by
finite differences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import (
    attention,
    core,
    gradient_checker,
    gru_cell,
    memonger,
    recurrent,
    rnn_cell,
    workspace,
)
from poseidon.caffe2.model_helper import ModelHelper
from tests.support.caffe2_testing.rnn.rnn_cell_test_util import _prepare_rnn, sigmoid

T, N, D = 3, 2, 2
NAME = "external/recurrent"


@pytest.fixture(autouse=True)
def fresh() -> None:
    np.random.seed(0)


def prepared(create: Any, **kwargs: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return outputs, net and the values of its inputs; the parameters are not zero."""
    outputs, net, inputs = _prepare_rnn(T, N, D, create, kwargs.pop("grads", (0,)), 0.5, **kwargs)
    workspace.FeedBlob(inputs[-1], np.random.randn(T, N, D).astype(np.float32))
    workspace.FeedBlob("test_name_scope/seq_lengths", np.array([3, 2], np.int32))
    for name in workspace.Blobs():
        if name.endswith(("_b", "_s")) or "/beta" in name:
            shape = workspace.FetchBlob(name).shape
            workspace.FeedBlob(name, 0.5 + 0.3 * np.random.randn(*shape).astype(np.float32))
    return outputs, net, {name: workspace.FetchBlob(name) for name in workspace.Blobs()}


def parameter(values: dict[str, Any], name: str) -> Any:
    (found,) = [value for key, value in values.items() if key.endswith(name)]
    return found


def lstm(values: dict[str, Any], drop: bool) -> tuple[Any, Any]:
    """Return the hidden states and the cells of all steps."""
    x, lengths = values["test_name_scope/input_blob"], values["test_name_scope/seq_lengths"]
    h, c = (values[f"{kind}_init_0"].reshape(N, D) for kind in ("hidden", "cell"))
    hidden, cells = [], []
    for t in range(T):
        gates = x[t] @ parameter(values, "i2h_w").T + parameter(values, "i2h_b")
        gates = gates + h @ parameter(values, "gates_t_w").T + parameter(values, "gates_t_b")
        i, f, o, g = np.split(gates, 4, axis=1)
        new_c = sigmoid(f + 0.5) * c + sigmoid(i) * np.tanh(g)
        new_h = sigmoid(o) * np.tanh(new_c)
        valid = (t < lengths)[:, np.newaxis]
        c = np.where(valid, new_c, 0 if drop else c)
        h = np.where(valid, new_h, 0 if drop else h)
        hidden.append(h)
        cells.append(c)
    return np.stack(hidden), np.stack(cells)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("unrolled", [None, T])
def test_an_lstm(drop: bool, unrolled: int | None) -> None:
    outputs, net, values = prepared(rnn_cell.LSTM, drop_states=drop, T=unrolled)
    workspace.RunNetOnce(net)
    hidden, cells = lstm(values, drop)
    for blob, wanted in zip(outputs, (hidden, hidden[-1:], cells, cells[-1:]), strict=True):
        np.testing.assert_allclose(workspace.FetchBlob(blob), wanted, rtol=1e-4, atol=1e-5)


def scalar(net: core.Net, blobs: Any) -> str:
    """Add the sum of the squares of blobs to a net."""
    parts = [net.SumElements(net.Mul([blob, blob])) for blob in blobs]
    net.Sum(parts, "total")
    return "total"


CELLS = {
    "lstm": (rnn_cell.LSTM, {}),
    "lstm_again": (rnn_cell.LSTM, {"memory_optim": True}),
    "two_layers": (rnn_cell.LSTM, {"dim_out": [2, 3]}),
    "unrolled": (rnn_cell.LSTM, {"T": T}),
    "all_outputs": (rnn_cell.LSTM, {"grads": (0, 1, 2, 3)}),
    "milstm": (rnn_cell.MILSTM, {}),
    "layer_norm": (rnn_cell.LayerNormLSTM, {}),
    "layer_norm_milstm": (rnn_cell.LayerNormMILSTM, {}),
    "gru": (gru_cell.GRU, {"num_states": 1}),
    "gru_linear": (gru_cell.GRU, {"num_states": 1, "linear_before_reset": True}),
    "basic": (rnn_cell.BasicRNN, {"num_states": 1, "activation": "tanh"}),
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lstm", "hidden_state_all"),
        ("layer_norm", "hidden_t_all"),
        ("milstm", "hidden_t_intermediate_all"),
        ("gru", "hidden_t_all"),
    ],
)
def test_names_of_states(name: str, expected: str) -> None:
    create, kwargs = CELLS[name]
    outputs, _, _ = prepared(create, **kwargs)
    assert str(outputs[0]).rpartition("/")[2] == expected


@pytest.mark.parametrize("name", CELLS)
def test_gradients(name: str) -> None:
    create, kwargs = CELLS[name]
    grads = kwargs.get("grads", (0,))
    outputs, net, values = prepared(create, **kwargs)
    loss = scalar(net, [outputs[index] for index in grads])
    floats = {key: value for key, value in values.items() if value.dtype == np.float32}
    for key in (
        "test_name_scope/input_blob",
        "hidden_init_0",
        *(k for k in floats if k.endswith("_w")),
    ):
        gradient_checker.NetGradientChecker.Check(net, [loss], values, key, 0.01, 0.02)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_a_plain_cell(activation: str) -> None:
    outputs, net, values = prepared(rnn_cell.BasicRNN, num_states=1, activation=activation)
    workspace.RunNetOnce(net)
    h = values["hidden_init_0"].reshape(N, D)
    first = values["test_name_scope/input_blob"][0] @ parameter(values, "i2h_w").T
    first = first + parameter(values, "i2h_b") + h @ parameter(values, "gates_t_w").T
    first = first + parameter(values, "gates_t_b")
    wanted = np.tanh(first) if activation == "tanh" else np.maximum(first, 0)
    np.testing.assert_allclose(workspace.FetchBlob(outputs[0])[0], wanted, rtol=1e-4, atol=1e-5)


def test_memonger_shares_blobs_around_it() -> None:
    outputs, net, _ = prepared(rnn_cell.LSTM)
    loss = net.SumElements(net.Tanh(net.Sigmoid(outputs[0], "s"), "t"), "loss")
    gradients = [str(value) for value in net.AddGradientOperators([loss]).values()]
    weights = next(name for name in gradients if name.endswith("i2h_w_grad"))
    workspace.RunNetOnce(net)
    before = workspace.FetchBlob(weights)
    shared = memonger.share_grad_blobs(net, ["loss"], {weights}, "", set(), True)
    assert len({name for op in shared.op for name in op.output}) < len(
        {name for op in net.Proto().op for name in op.output}
    )
    workspace.RunNetOnce(shared)
    np.testing.assert_array_equal(workspace.FetchBlob(weights), before)


def test_the_first_states_are_parameters() -> None:
    model = ModelHelper(name="m")
    outputs = rnn_cell.LSTM(model, "x", "lengths", None, D, 4, scope="s", return_params=True)
    workspace.FeedBlob("x", np.random.randn(T, N, D).astype(np.float32))
    workspace.FeedBlob("lengths", np.array([3, 1], np.int32))
    workspace.RunNetOnce(model.param_init_net)
    model.AddGradientOperators([scalar(model.net, outputs[:1])])
    workspace.RunNetOnce(model.net)
    gradient = model.param_to_grad[next(p for p in model.params if "initial_hidden" in str(p))]
    assert workspace.FetchBlob(gradient).shape == (4,)
    assert outputs[-1]["recurrent"]["weights"] == "s/gates_t_w"


def test_the_parts_of_the_parameters_are_set() -> None:
    outputs, _, _ = _prepare_rnn(T, N, D, rnn_cell.LSTM, (0,), 0.0, return_params=True)
    names = rnn_cell.GetLSTMParamNames()
    parts = {
        kind: {
            name: np.full((D, D) if name.endswith("w") else D, index)
            for index, name in enumerate(group)
        }
        for kind in ("input", "recurrent")
        for group in [[*names["weights"], *names["biases"]]]
    }
    scoped = {
        kind: {field: f"test_name_scope/{blob}" for field, blob in blobs.items()}
        for kind, blobs in outputs[-1].items()
    }
    rnn_cell.InitFromLSTMParams(scoped, parts)
    weights = workspace.FetchBlob(f"test_name_scope/{NAME}/i2h_w")
    np.testing.assert_array_equal(weights[:, 0], np.repeat([0, 1, 2, 3], D))


def test_a_step_that_is_not_kept_has_one_workspace() -> None:
    outputs, net, values = prepared(rnn_cell.LSTM, forward_only=True)
    workspace.RunNetOnce(net)
    np.testing.assert_allclose(
        workspace.FetchBlob(outputs[0]), lstm(values, False)[0], rtol=1e-4, atol=1e-5
    )
    with pytest.raises(Exception, match=r"backward_step_net|backward_link"):
        net.AddGradientOperators([outputs[0]])
        workspace.RunNetOnce(net)


def test_a_net_runs_again_with_other_lengths() -> None:
    outputs, net, values = prepared(rnn_cell.LSTM)
    loss = scalar(net, outputs[:1])
    gradients = net.AddGradientOperators([loss])
    workspace.CreateNet(net)
    x = values["test_name_scope/input_blob"]
    for steps in (T, 1, 2):
        workspace.FeedBlob("test_name_scope/input_blob", x[:steps])
        workspace.RunNet(net)
        hidden = lstm(values, False)[0][:steps]
        np.testing.assert_allclose(workspace.FetchBlob(outputs[0]), hidden, rtol=1e-4, atol=1e-5)
        assert workspace.FetchBlob(gradients["test_name_scope/input_blob"]).shape == (steps, N, D)


def test_dropout_of_the_output_of_a_cell() -> None:
    model = ModelHelper(name="m")
    inner = rnn_cell.LSTMCell(D, D, 0.0, False, name="lstm")
    cell = rnn_cell.DropoutCell(inner, 0.5, name="dropped", is_test=False)
    output, states = cell.apply_over_sequence(model, "x", "lengths")
    workspace.FeedBlob("x", np.random.randn(8, 8, D).astype(np.float32))
    workspace.FeedBlob("lengths", np.full(8, 8, np.int32))
    workspace.RunNetOnce(model.param_init_net)
    workspace.RunNetOnce(model.net)
    dropped, whole = workspace.FetchBlobs([output, states[0]])
    assert 0.3 < (dropped == 0).mean() < 0.7
    np.testing.assert_allclose(dropped[dropped != 0], 2 * whole[dropped != 0], rtol=1e-5)


@pytest.mark.parametrize("kind", ["Regular", "Recurrent", "Dot", "SoftCoverage"])
@pytest.mark.parametrize("create", [rnn_cell.LSTMWithAttention, rnn_cell.MILSTMWithAttention])
def test_attention(kind: str, create: Any) -> None:
    """The context is a weighted mean of the encoder's outputs, and gradients match finite
    differences.
    """
    model = ModelHelper(name="m")
    inputs = {
        "x": np.random.randn(2, N, D).astype(np.float32),
        "lengths": np.array([2, 2], np.int32),
        "encoded": np.random.randn(3, N, 4).astype(np.float32),
        "h0": np.random.randn(1, N, D).astype(np.float32),
        "c0": np.random.randn(1, N, D).astype(np.float32),
        "context0": np.random.randn(1, N, 4).astype(np.float32),
    }
    for name, value in inputs.items():
        workspace.FeedBlob(name, value)
    outputs = create(
        model,
        "x",
        "lengths",
        "h0",
        "c0",
        "context0",
        encoder_output_dim=4,
        encoder_outputs="encoded",
        encoder_lengths=None,
        decoder_input_dim=D,
        decoder_state_dim=D,
        scope="decoder",
        attention_type=getattr(attention.AttentionType, kind),
    )
    workspace.RunNetOnce(model.param_init_net)
    loss = scalar(model.net, [outputs[0], outputs[4]])
    workspace.RunNetOnce(model.net)
    context = workspace.FetchBlob(outputs[4])
    encoded = inputs["encoded"]
    assert (context <= encoded.max(0) + 1e-5).all() and (context >= encoded.min(0) - 1e-5).all()
    values = {name: workspace.FetchBlob(name) for name in [*inputs, *map(str, model.params)]}
    for name in ("x", "encoded", "h0"):
        if name != "encoded" or kind != "Recurrent":
            gradient_checker.NetGradientChecker.Check(model.net, [loss], values, name, 0.01, 0.02)


def test_wrong_uses() -> None:
    with pytest.raises(AssertionError, match="Only one input"):
        recurrent.recurrent_net(core.Net("a"), core.Net("b"), [("a", "b")] * 2, [], {})
    with pytest.raises(RuntimeError, match="unknown activation function"):
        rnn_cell.BasicRNNCell(1, 1, 0, False, activation="sin")
    with pytest.raises(Exception, match="initial states or initializer"):
        rnn_cell.RNNCell("r").apply_over_sequence(ModelHelper(name="m"), "x")
