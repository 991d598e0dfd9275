"""The state of a virtual worker: other nets continue from it."""

from __future__ import annotations

import torch

from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import PoseidonWorkerState
from poseidon.caffe.solver.replica import WorkerNets
from poseidon.caffe.solver.state import restore, state_of
from tests.support.nets import build, inputs, layer, noise

T, N, D, H = 3, 2, 4, 5


def nets(*, seed: int) -> WorkerNets:
    """Return a recurrent train net and a test net that is random, too."""

    def net(more: str) -> Net:
        filler = "weight_filler { type: 'constant' value: 0.3 }"
        body = f"recurrent_param {{ num_output: {H} {filler} }}"
        return build(
            inputs(x=(T, N, D), k=(T, N)) + layer("LSTM", "x k", "y", body) + more, seed=seed
        )

    dummy = "dummy_data_param { data_filler { type: 'gaussian' } shape { dim: 3 } }"
    return WorkerNets(
        number=0, name="worker 0", train=net(""), tests=(net(layer("DummyData", "", "z", dummy)),)
    )


def outputs(of: WorkerNets) -> list[torch.Tensor]:
    given = {"x": noise(T, N, D), "k": torch.ones(T, N)}
    return [value.detach() for net in of.all() for value in net(given).values()]


def test_other_nets_go_on_from_a_state_and_begin_anew_without_one() -> None:
    first, second = nets(seed=1), nets(seed=2)
    begin = outputs(first)
    packed = state_of(first, [0.5], torch.device("cpu")).SerializeToString()
    expected = outputs(first)
    assert not torch.equal(begin[0], expected[0])
    restore(second, PoseidonWorkerState.FromString(packed))
    assert all(map(torch.equal, outputs(second), expected))
    restore(second, PoseidonWorkerState(torch_rng=second.train.random_state()))
    assert torch.equal(outputs(second)[0], begin[0])
