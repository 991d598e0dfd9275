"""Every solver against the weights that Caffe itself computed, step by step: alone, and through
the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from google.protobuf import text_format

from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TRAIN, NetState, SolverParameter
from poseidon.caffe.proto.definition import SolverDefinition, read_net
from poseidon.caffe.solver.settings import SolverSettings, solver_settings
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.hooks import Hooks
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeOptions
from ps_server.network import Network
from tests.support.cluster import memory_store
from tests.support.exchanges import AloneExchange, plain_exchange, plain_store
from tests.support.golden import FOLDER
from tests.support.threads import on_threads

CASES = sorted(path.stem for path in (FOLDER.parent / "solvers").glob("*.npz"))
Recorded = dict[str, np.ndarray]
Make = Callable[[Sequence[Trained], ExchangeSettings], Exchange]


def recorded(shared: Path, case: str) -> Recorded:
    with np.load(shared / "golden" / "solvers" / f"{case}.npz") as file:
        return {name: file[name] for name in file.files}


def settings_of(found: Recorded) -> SolverSettings:
    param = text_format.Parse(str(found["solver"]), SolverParameter())
    return solver_settings(SolverDefinition(param=param, source="golden", folder=Path()))


def net_of(shared: Path, found: Recorded) -> Net:
    definition = read_net(shared / "golden" / "solvers" / "net.prototxt")
    net = compile_net(definition, LayerContext(phase=TRAIN, seed=1), state=NetState(phase=TRAIN))
    for info in net.parameters_info:
        layer, index = info.name.rsplit(".", 1)
        info.parameter.data.copy_(torch.from_numpy(found[f"start:{layer}:{index}"]))
    return net


def replay(shared: Path, case: str, make: Make, part: slice) -> None:
    """Train on the recorded inputs; every step's loss and weights must be Caffe's."""
    found = recorded(shared, case)
    solver = settings_of(found)
    net = net_of(shared, found)
    infos = net.parameters_info
    trained = [
        Trained(name=i.name, tensor=i.parameter, rule=solver.rule(i.lr_mult, i.decay_mult))
        for i in infos
    ]
    exchange = make(
        trained, ExchangeSettings(clip=solver.clip, gradient_scale=1 / solver.iter_size)
    )
    hooks = Hooks([net], trained, exchange, passes=solver.iter_size)
    try:
        exchange.open(None)
        for step in range(len(found["x"])):
            x, label = (torch.from_numpy(found[name][step][part]) for name in ("x", "l"))
            exchange.start(step, solver.rate(step))
            hooks.start()
            for _ in range(solver.iter_size):
                net({"x": x, "l": label})
                net.loss.backward()
                hooks.next_pass()
            hooks.finish()
            exchange.finish()
            if part == slice(None):
                assert float(net.loss.detach()) == pytest.approx(
                    float(found["loss"][step]), rel=1e-4
                )
            exchange.settle()
            for info in infos:
                layer, index = info.name.rsplit(".", 1)
                np.testing.assert_allclose(
                    info.parameter.detach().numpy(),
                    found[f"step{step}:{layer}:{index}"],
                    rtol=1e-4,
                    atol=2e-6,
                    err_msg=f"{info.name} after step {step}",
                )
    finally:
        hooks.close()
        exchange.close()


@pytest.mark.parametrize("case", CASES)
def test_one_process_takes_caffes_steps(shared: Path, case: str) -> None:
    replay(shared, case, AloneExchange, slice(None))


@pytest.mark.parametrize("case", ["adam", "sgd_clip", "sgd_iter_size", "sgd_l1", "sgd_momentum"])
def test_two_workers_on_two_shards_take_caffes_steps(shared: Path, case: str) -> None:
    with memory_store(2, 2) as connect:

        def run(rank: int) -> None:
            def make(trained: Sequence[Trained], settings: ExchangeSettings) -> Exchange:
                store = plain_store(
                    trained,
                    settings,
                    Membership(network=Network(size=2), shards=2, options=ExchangeOptions(rows=2)),
                )
                return plain_exchange(connect(rank, store), trained, store, settings)

            replay(shared, case, make, slice(rank, None, 2))

        on_threads(2, run)
