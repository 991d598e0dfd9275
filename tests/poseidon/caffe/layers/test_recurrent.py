"""RNN, LSTM, LSTMUnit: against torch's own, and what passes from call to call."""

from __future__ import annotations

import pytest
import torch

from poseidon.caffe.net.net import Net
from tests.support.nets import build, inputs, layer, noise

T, N, D, S, H = 4, 3, 5, 2, 6
FILLERS = "weight_filler { type: 'uniform' min: -0.5 max: 0.5 } bias_filler { type: 'uniform' }"


def recurrent(kind: str, bottoms: str = "x k", tops: str = "y", fields: str = "") -> Net:
    """One recurrent layer; bottoms: x, k (cont), s (static), h and c (states)."""
    shapes = {"x": (T, N, D), "k": (T, N), "s": (N, S), "h": (1, N, H), "c": (1, N, H)}
    body = f"recurrent_param {{ num_output: {H} {FILLERS} {fields} }}"
    given = {name: shapes[name] for name in bottoms.split()}
    return build(inputs(**given) + layer(kind, bottoms, tops, body))


def going_on() -> torch.Tensor:
    """cont of streams that begin with the first step."""
    cont = torch.ones(T, N)
    cont[0] = 0
    return cont


@pytest.mark.parametrize(
    ("kind", "bottoms", "shapes"),
    [
        ("RNN", "x k", [(H, D), (H,), (H, H), (H, H), (H,)]),
        ("RNN", "x k s", [(H, D), (H,), (H, S), (H, H), (H, H), (H,)]),
        ("LSTM", "x k", [(4 * H, D), (4 * H,), (4 * H, H)]),
        ("LSTM", "x k s", [(4 * H, D), (4 * H,), (4 * H, S), (4 * H, H)]),
    ],
)
def test_blobs_in_caffes_order(kind: str, bottoms: str, shapes: list[tuple[int, ...]]) -> None:
    net = recurrent(kind, bottoms)
    assert [tuple(blob.shape) for blob in net.parameters()] == shapes
    assert net.blob_shapes["y"] == (T, N, H)


@pytest.mark.parametrize("kind", ["RNN", "LSTM"])
def test_the_state_goes_on_in_the_next_pass(kind: str) -> None:
    """Two passes of half the steps are one of all; no gradient crosses."""
    whole, halves = recurrent(kind), recurrent(kind)
    x, cont = noise(T, N, D), going_on()
    expected = whole({"x": x, "k": cont})["y"]
    first = halves({"x": x[:2], "k": cont[:2]})["y"]
    second = halves({"x": x[2:], "k": cont[2:]})["y"]
    torch.testing.assert_close(torch.cat([first, second]), expected)
    first.sum().backward()
    second.sum().backward()


@pytest.mark.parametrize("kind", ["RNN", "LSTM"])
def test_a_stream_that_begins_anew_forgets(kind: str) -> None:
    net = recurrent(kind)
    x, cont = noise(T, N, D), going_on()
    first = net({"x": x, "k": cont})["y"]
    assert torch.equal(net({"x": x, "k": cont})["y"], first)
    cont[0, 1] = 1
    again = net({"x": x, "k": cont})["y"]
    assert torch.equal(again[:, [0, 2]], first[:, [0, 2]]) and not torch.equal(
        again[:, 1], first[:, 1]
    )


@pytest.mark.parametrize("kind", ["RNN", "LSTM"])
def test_a_static_input_is_one_of_every_step(kind: str) -> None:
    """W_x x + W_s s is the input of a layer whose x has s behind it."""
    net = recurrent(kind, "x k s")
    joint = build(
        inputs(x=(T, N, D + S), k=(T, N))
        + layer(kind, "x k", "y", f"recurrent_param {{ num_output: {H} {FILLERS} }}")
    )
    weight_x, bias, weight_s, *rest = (blob.detach() for blob in net.parameters())
    with torch.no_grad():
        for mine, other in zip(
            joint.parameters(), (torch.cat([weight_x, weight_s], 1), bias, *rest), strict=True
        ):
            mine.copy_(other)
    x, s = noise(T, N, D), noise(N, S, seed=1)
    found = net({"x": x, "k": going_on(), "s": s})["y"]
    both = torch.cat([x, s.expand(T, N, S)], 2)
    torch.testing.assert_close(found, joint({"x": both, "k": going_on()})["y"])


@pytest.mark.parametrize(("kind", "states"), [("RNN", "h"), ("LSTM", "h c")])
@pytest.mark.parametrize("static", ["", "s "])
def test_exposed_states(kind: str, states: str, static: str) -> None:
    """The states come in and go out as blobs, nothing is kept, and no gradient passes them."""
    given = {"x": noise(T, N, D), "k": torch.ones(T, N), "s": noise(N, S, seed=1)}
    bottoms = f"x k {static}{states}"
    tops = " ".join(["y", *(f"{state}_T" for state in states.split())])
    net, plain = (
        recurrent(kind, bottoms, tops, "expose_hidden: true"),
        recurrent(kind, f"x k {static}"),
    )
    zeros = {state: torch.zeros(1, N, H).requires_grad_() for state in states.split()}
    chosen = {name: value for name, value in given.items() if name in bottoms.split()}
    expected = [plain(chosen)["y"] for _ in range(2)]
    first = net(chosen | zeros)
    second = net(chosen | {state: first[f"{state}_T"] for state in zeros})
    torch.testing.assert_close([first["y"], second["y"]], expected)
    torch.testing.assert_close(net(chosen | zeros)["y"], expected[0])
    first["y"].sum().backward()
    assert all(state.grad is None for state in zeros.values())
    if kind == "LSTM":
        assert torch.equal(first["h_T"][0], first["y"][-1])


def test_lstm_unit() -> None:
    net = build(inputs(c=(1, N, H), g=(1, N, 4 * H), k=(1, N)) + layer("LSTMUnit", "c g k", "d h"))
    c, g = noise(1, N, H), noise(1, N, 4 * H, seed=1)
    i, f, o, a = g.chunk(4, 2)
    for cont in (0.0, 1.0):
        found = net({"c": c, "g": g, "k": torch.full((1, N), cont)})
        expected = cont * f.sigmoid() * c + i.sigmoid() * a.tanh()
        torch.testing.assert_close(found["d"], expected)
        torch.testing.assert_close(found["h"], o.sigmoid() * expected.tanh())
