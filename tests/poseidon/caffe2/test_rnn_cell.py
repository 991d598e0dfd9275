"""Recurrent networks against torch's own, their gradients, and the same steps as operators of
the net.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from poseidon.caffe2 import memonger, model_helper, rnn_cell, workspace

T, N, D, H = 5, 3, 4, 6


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.RandomState(seed).randn(*shape).astype(np.float32)


def feed(lengths: list[int] | None, layers: int = 1) -> tuple[Any, list[str]]:
    """Feed a sequence and initial states; return the lengths' blob and the states' names."""
    workspace.FeedBlob("x", draw(1, T, N, D))
    states = []
    for layer in range(layers):
        for kind in ("hidden", "cell"):
            states.append(f"{kind}_init_{layer}")
            workspace.FeedBlob(states[-1], draw(10 * layer + len(kind), 1, N, H))
    if lengths is None:
        return None, states
    workspace.FeedBlob("lengths", np.array(lengths, np.int32))
    return "lengths", states


def run(
    lengths: list[int] | None, dim_out: Any = H, **arguments: Any
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Build and run an LSTM with a loss over all its outputs; return blobs and gradients by
    name.
    """
    workspace.ResetWorkspace()
    layers = len(dim_out) if isinstance(dim_out, list) else 1
    seq_lengths, states = feed(lengths, layers)
    model = model_helper.ModelHelper(name="recurrent")
    results = rnn_cell.LSTM(
        model, "x", seq_lengths, states, D, dim_out, "lstm", outputs_with_grads=(0, 3), **arguments
    )
    weights = model.param_init_net.GivenTensorFill(
        [], "weights", shape=[T, N, H], values=draw(7, T * N * H).tolist()
    )
    partial = model.net.SumElements(model.net.Mul([results[0], weights], "weighted"), "partial")
    loss = model.net.Add([partial, model.net.SumElements(results[3], "cells")], "loss")
    model.AddGradientOperators([loss])
    workspace.RunNetOnce(model.param_init_net)
    for number, param in enumerate(model.params):
        if str(param) != "weights":
            workspace.FeedBlob(
                str(param), draw(20 + number, *workspace.FetchBlob(str(param)).shape) / 2
            )
    workspace.RunNetOnce(model.net)
    names = [
        *map(str, results),
        *(str(model.param_to_grad[p]) for p in model.params if str(p) != "weights"),
    ]
    names += ["x_grad", *(f"{state}_grad" for state in states)]
    return {name: workspace.FetchBlob(name) for name in names}, [str(result) for result in results]


def by_torch(bias: float = 0.0) -> tuple[torch.Tensor, ...]:
    """Return what torch's LSTM gives for the parameters in the workspace, and the gradients that
    it has.
    """
    lstm = torch.nn.LSTM(D, H)
    order = [0, 1, 3, 2]  # Caffe2 has the new state behind the output gate

    def moved(name: str) -> torch.Tensor:
        value = torch.from_numpy(workspace.FetchBlob(name))
        parts = value.chunk(4)
        return torch.cat([parts[index] for index in order])

    with torch.no_grad():
        for ours, theirs in (("i2h", "ih"), ("gates_t", "hh")):
            getattr(lstm, f"weight_{theirs}_l0").copy_(moved(f"lstm/{ours}_w"))
            getattr(lstm, f"bias_{theirs}_l0").copy_(moved(f"lstm/{ours}_b"))
        lstm.bias_ih_l0[H : 2 * H] += bias
    x = torch.from_numpy(workspace.FetchBlob("x")).requires_grad_()
    states = [
        torch.from_numpy(workspace.FetchBlob(f"{k}_init_0")).requires_grad_()
        for k in ("hidden", "cell")
    ]
    output, (hidden, cell) = lstm(x, tuple(states))
    weights = torch.from_numpy(workspace.FetchBlob("weights"))
    ((output * weights).sum() + cell.sum()).backward()
    back = [torch.cat([lstm.weight_ih_l0.grad.chunk(4)[i] for i in order])]
    return output, hidden, cell, x.grad, *(state.grad for state in states), *back


@pytest.mark.parametrize("lengths", [None, [T, T, T]])
@pytest.mark.parametrize("forget_bias", [0.0, 0.5])
def test_an_lstm_and_its_gradients_are_those_of_torch(
    lengths: list[int] | None, forget_bias: float
) -> None:
    found, results = run(lengths, forget_bias=forget_bias)
    output, hidden, cell, dx, dhidden, dcell, dweight = by_torch(forget_bias)
    for name, expected in (
        (results[0], output),
        (results[1], hidden),
        (results[3], cell),
        ("x_grad", dx),
        ("hidden_init_0_grad", dhidden),
        ("cell_init_0_grad", dcell),
        ("lstm/i2h_w_grad", dweight),
    ):
        np.testing.assert_allclose(found[name], expected.detach().numpy(), atol=2e-5, err_msg=name)


@pytest.mark.parametrize("dim_out", [H, [H], [H, H]])
@pytest.mark.parametrize("lengths", [None, [1, T, 3]])
@pytest.mark.parametrize("drop", [False, True])
def test_steps_of_an_inner_net_equal_operators_of_the_net(
    dim_out: Any, lengths: list[int] | None, drop: bool
) -> None:
    inner, _ = run(lengths, dim_out, drop_states=drop)
    unrolled, _ = run(lengths, dim_out, drop_states=drop, static_rnn_unroll_size=T)
    grads = [name for name in inner if name.endswith("_grad")]
    assert len(grads) >= 7
    for name in grads:
        np.testing.assert_allclose(inner[name], unrolled[name], atol=2e-5, err_msg=name)
    for one, other in zip(list(inner)[:4], list(unrolled)[:4], strict=True):
        np.testing.assert_allclose(inner[one], unrolled[other], atol=1e-5, err_msg=one)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_a_plain_cell_is_that_of_torch(activation: str) -> None:
    feed(None)
    model = model_helper.ModelHelper(name="plain")
    results = rnn_cell.BasicRNN(
        model, "x", None, ["hidden_init_0"], D, H, "rnn", activation=activation
    )
    workspace.RunNetOnce(model.param_init_net)
    workspace.RunNetOnce(model.net)
    plain = torch.nn.RNN(D, H, nonlinearity=activation)
    with torch.no_grad():
        for ours, theirs in (("i2h", "ih"), ("gates_t", "hh")):
            getattr(plain, f"weight_{theirs}_l0").copy_(
                torch.from_numpy(workspace.FetchBlob(f"rnn/{ours}_w"))
            )
            getattr(plain, f"bias_{theirs}_l0").copy_(
                torch.from_numpy(workspace.FetchBlob(f"rnn/{ours}_b"))
            )
        output, _ = plain(
            torch.from_numpy(draw(1, T, N, D)),
            torch.from_numpy(workspace.FetchBlob("hidden_init_0")),
        )
    np.testing.assert_allclose(workspace.FetchBlob(str(results[0])), output.numpy(), atol=1e-5)


def test_states_are_parameters_where_none_are_given() -> None:
    feed(None)
    model = model_helper.ModelHelper(name="learned")
    results = rnn_cell.LSTM(model, "x", None, None, D, H, "lstm")
    model.AddGradientOperators([model.net.SumElements(results[0], "loss")])
    workspace.RunNetOnce(model.param_init_net)
    workspace.RunNetOnce(model.net)
    assert workspace.FetchBlob("lstm/initial_hidden_state_grad").shape == (H,)


def test_memonger_shares_blobs_around_it() -> None:
    plain, _ = run([T, 2, 3])
    workspace.ResetWorkspace()
    seq_lengths, states = feed([T, 2, 3])
    model = model_helper.ModelHelper(name="shared")
    results = rnn_cell.LSTM(model, "x", seq_lengths, states, D, H, "lstm")
    loss = model.net.SumElements(model.net.Tanh(model.net.Sigmoid(results[0], "s"), "t"), "loss")
    model.AddGradientOperators([loss])
    workspace.RunNetOnce(model.param_init_net)
    workspace.RunNetOnce(model.net)
    before = workspace.FetchBlob("lstm/i2h_w_grad")
    grads = set(model.param_to_grad.values())
    shared = memonger.share_grad_blobs(
        model.net, ["loss"], grads, "", share_activations=True, dont_share_blobs=set()
    )
    workspace.RunNetOnce(shared)
    np.testing.assert_array_equal(workspace.FetchBlob("lstm/i2h_w_grad"), before)
    assert plain


def test_parameters_by_gate() -> None:
    feed(None)
    model = model_helper.ModelHelper(name="gates")
    *_, names = rnn_cell.LSTM(
        model, "x", None, ["hidden_init_0", "cell_init_0"], D, H, "lstm", return_params=True
    )
    workspace.RunNetOnce(model.param_init_net)
    given = rnn_cell.GetLSTMParamNames()
    values = {name: np.full((H, D), i, np.float32) for i, name in enumerate(given["weights"])}
    values |= {name: np.full(H, i, np.float32) for i, name in enumerate(given["biases"])}
    rnn_cell.InitFromLSTMParams(names, {"input": values})
    assert workspace.FetchBlob("lstm/i2h_w")[::H, 0].tolist() == [0, 1, 2, 3]
    assert workspace.FetchBlob("lstm/i2h_b")[::H].tolist() == [0, 1, 2, 3]
