"""The nets of the virtual workers of one process."""

from __future__ import annotations

import importlib
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.layers.pooling import Pooling
from poseidon.caffe.proto.blob import from_array
from poseidon.caffe.proto.caffe_pb2 import TRAIN, NetParameter
from poseidon.caffe.proto.definition import read_solver
from poseidon.caffe.solver.replica import Replica
from poseidon.caffe.solver.settings import solver_settings
from poseidon.errors import DataError
from poseidon.exchange.membership import Membership
from poseidon.pycaffe import mode
from ps_server.network import Network
from ps_server.protocol.virtual_workers import VirtualWorkers
from tests.support.training import write_definitions
from tests.support.training_processes import make_data


@pytest.fixture
def solver(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    make_data(tmp_path)
    return write_definitions(
        tmp_path, batch=5, extra="max_iter: 1\niter_size: 2", dropout=True, norm=True
    )


def replica_of(path: Path, bounds: tuple[int, ...], rank: int) -> Replica:
    solver = read_solver(path)
    context = LayerContext(phase=TRAIN, seed=3)
    return Replica(solver, solver_settings(solver), context, member_of(bounds, rank))


def member_of(bounds: tuple[int, ...], rank: int) -> Membership:
    network = Network(rank=rank, size=len(bounds) - 1)
    return Membership(network=network, virtual_workers=VirtualWorkers(bounds))


def passes(path: Path, bounds: tuple[int, ...], rank: int) -> dict[int, list[torch.Tensor]]:
    """Return the loss and all gradients of each virtual worker of one process."""
    with closing(replica_of(path, bounds, rank)) as replica:
        found = {}
        before = replica.values()
        for nets in replica.nets:
            replica.train.zero_grad()
            for parameter, value in before.items():
                parameter.detach().copy_(value)
            loss, _ = replica.forward_backward(nets, 0, lambda: None, lambda _: None)
            gradients = [t.tensor.grad for t in replica.trained if t.tensor.grad is not None]
            found[nets.number] = [loss, *(gradient.clone() for gradient in gradients)]
    return found


def test_a_virtual_worker_computes_the_same_bits_on_any_process(solver: Path) -> None:
    """Its records, its dropout and its statistics do not depend on its neighbours."""
    alone = {}
    for rank in range(3):
        alone |= passes(solver, (0, 1, 2, 3), rank)
    together = passes(solver, (0, 2, 3), 0) | passes(solver, (0, 2, 3), 1)
    for found in (together, passes(solver, (0, 3), 0)):
        assert found.keys() == alone.keys()
        for number, tensors in found.items():
            assert all(map(torch.equal, tensors, alone[number])), number
    assert not torch.equal(alone[0][0], alone[1][0])


def test_virtual_workers_of_a_process_share_each_parameter(solver: Path) -> None:
    with closing(replica_of(solver, (0, 1, 4), 1)) as replica:
        assert [nets.number for nets in replica.nets] == [1, 2, 3]
        assert [nets.name for nets in replica.nets] == [f"virtual worker {n}" for n in (1, 2, 3)]
        shared = {info.name: info.parameter for info in replica.train.parameters_info}
        for nets in replica.nets:
            for net in nets.all():
                for info in net.parameters_info:
                    assert info.parameter is shared[info.name]
        assert [t.tensor for t in replica.trained] == [info.parameter for info in replica.exchanged]


def test_a_net_that_does_not_run_keeps_no_activations(solver: Path) -> None:
    with closing(replica_of(solver, (0, 2), 0)) as replica:
        net = replica.nets[0].train
        _, outputs = replica.forward_backward(replica.nets[0], 0, lambda: None, lambda _: None)
        assert net.loss.grad_fn is None
        assert all(value.grad_fn is None for value in outputs.values())


def test_virtual_workers_divide_the_batches_that_are_prepared_ahead(solver: Path) -> None:
    depths = {}
    for count in (1, 2, 9):
        replica = replica_of(solver, (0, count), 0)
        readers = [reader for nets in replica.nets for _, reader in nets.train.readers()]
        depths[count] = {reader._depth for reader in readers}
        replica.close()
    assert depths == {1: {4}, 2: {2}, 9: {1}}


NOISE = """
import random
import caffe, numpy, torch
class Noise(caffe.Layer):
    def setup(self, bottom, top):
        self.first = numpy.random.rand()
    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].data.shape)
    def forward(self, bottom, top):
        noise = self.first + numpy.random.rand() + random.random() + float(torch.rand(1))
        top[0].data[...] = bottom[0].data * noise
    def backward(self, top, propagate_down, bottom):
        bottom[0].diff[...] = top[0].diff
"""


def test_users_layers_draw_the_same_numbers_on_any_process(
    solver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = solver.parent
    (folder / "noise_layer.py").write_text(NOISE, encoding="utf-8")
    net = folder / "net.prototxt"
    layer = 'layer { name: "n" type: "Python" bottom: "ip" top: "noisy" python_param { module: "noise_layer" layer: "Noise" } }'
    text = net.read_text(encoding="utf-8").replace('bottom: "ip" bottom', 'bottom: "noisy" bottom')
    head, mark, loss = text.partition('layer { name: "accuracy"')
    net.write_text(head + layer + mark + loss, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(mode, "MODE", mode.ProcessMode())
    apart = passes(solver, (0, 1, 2), 0) | passes(solver, (0, 1, 2), 1)
    np.random.rand()
    together = passes(solver, (0, 2), 0)
    for number in (0, 1):
        assert all(map(torch.equal, together[number], apart[number])), number
    assert not torch.equal(together[0][0], together[1][0])


def test_virtual_workers_that_leave_are_closed_and_those_that_arrive_share_the_parameters(
    solver: Path,
) -> None:
    with closing(replica_of(solver, (0, 2, 5), 1)) as replica:
        parameters = [info.parameter for info in replica.train.parameters_info]
        first, second, third = replica.nets
        replica.go_on(member_of((0, 3, 5), 1))
        assert replica.nets == (second, third)
        replica.go_on(member_of((0, 1, 5), 1))
        *arrived, fourth, fifth = replica.nets
        assert [nets.number for nets in arrived] == [1, 2]
        assert (fourth, fifth) == (second, third)
        assert arrived[1] is not first
        for nets in replica.nets:
            own = [info.parameter for info in nets.train.parameters_info]
            assert all(one is other for one, other in zip(own, parameters, strict=True))
        with pytest.raises(DataError, match="is closed"):
            first.train()
        assert {reader._depth for nets in replica.nets for _, reader in nets.train.readers()} == {1}
        assert replica.keeps_state == ""


def test_a_layer_that_keeps_a_state_is_named(solver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pooling, "KEEPS_STATE", True)
    with closing(replica_of(solver, (0, 2), 0)) as replica:
        assert replica.keeps_state == "layer 'pool' (Pooling) keeps its own state"


@pytest.mark.parametrize("keeps", [False, True])
def test_a_process_that_goes_on_elsewhere_has_its_parameters_and_no_state_of_layers(
    solver: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    monkeypatch.setattr(Pooling, "KEEPS_STATE", keeps)
    with closing(replica_of(solver, (0, 2, 4, 6), 2)) as replica:
        before = {nets.number: nets for nets in replica.nets}
        parameters = [info.parameter for info in replica.train.parameters_info]
        parameters[0].grad = torch.ones_like(parameters[0])
        replica.go_on(member_of((0, 3, 6), 1))
        assert [nets.number for nets in replica.nets] == [3, 4, 5]
        for nets in replica.nets:
            assert (nets is before.get(nets.number)) == (not keeps and nets.number in before)
            own = [info.parameter for info in nets.train.parameters_info]
            assert all(one is other for one, other in zip(own, parameters, strict=True))
            nets.train()
        assert parameters[0].grad is None


RANKED = """
import caffe
SEEN = []
class Ranked(caffe.Layer):
    def reshape(self, bottom, top):
        pass
    def forward(self, bottom, top):
        SEEN.append((self.rank, caffe.solver_rank(), caffe.solver_count()))
"""


def test_users_layers_have_the_rank_of_their_virtual_worker(
    solver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = solver.parent
    (folder / "ranked_layer.py").write_text(RANKED, encoding="utf-8")
    net = folder / "net.prototxt"
    layer = 'layer { name: "r" type: "Python" bottom: "ip" python_param { module: "ranked_layer" layer: "Ranked" } }'
    net.write_text(net.read_text(encoding="utf-8") + layer, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(mode, "MODE", mode.ProcessMode())
    with closing(replica_of(solver, (0, 1, 3), 1)) as replica:
        for nets in replica.nets:
            replica.forward_backward(nets, 0, lambda: None, lambda _: None)
    seen = importlib.import_module("ranked_layer").SEEN
    assert seen == [(1, 1, 3), (1, 1, 3), (2, 2, 3), (2, 2, 3)]


TEST_LAYER = """
layer { name: "judge" type: "InnerProduct" bottom: "data" top: "judge" include { phase: TEST }
  inner_product_param { num_output: 2 weight_filler { type: "gaussian" std: 1 } } }
"""


def test_a_layer_that_only_a_test_net_has_gets_weights(solver: Path, tmp_path: Path) -> None:
    """As in Caffe, which copies models to each test net; also for virtual workers that come
    later.
    """
    net = tmp_path / "net.prototxt"
    net.write_text(net.read_text() + TEST_LAYER)
    with closing(replica_of(solver, (0, 1, 2), 0)) as replica:
        judge = replica.nets[0].tests[0].layers_by_name["judge"]
        value = np.full(judge.blobs()[0].shape, 0.25, np.float32)
        saved = NetParameter(name="net")
        saved.layer.add(name="judge", type="InnerProduct").blobs.extend(
            [from_array(value), from_array(np.zeros(2))]
        )
        (tmp_path / "judge.caffemodel").write_bytes(saved.SerializeToString())
        notes = replica.load([tmp_path / "judge.caffemodel"])
        assert "test net #0: weights of 1 layer loaded (judge)" in notes[-1]
        replica.go_on(member_of((0, 2), 0))
        for nets in replica.nets:
            found = nets.tests[0].layers_by_name["judge"].blobs()[0]
            assert torch.equal(found.detach(), torch.from_numpy(value)), nets.name
        assert len(replica.nets) == 2
