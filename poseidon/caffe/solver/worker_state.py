"""The state of one virtual worker between two iterations: what its next one depends on, besides
the values that all virtual workers share.

Law: nets that were compiled for a virtual worker and got its state compute what the nets that the
state is of would have computed, on any process. Layers that keep more (`Layer.KEEPS_STATE`) are
excepted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.blob import from_array, to_array
from poseidon.caffe.proto.caffe_pb2 import PoseidonLayerState, PoseidonNetState, PoseidonWorkerState
from poseidon.caffe.solver.replica import WorkerNets


def state_of(nets: WorkerNets, losses: Sequence[float]) -> PoseidonWorkerState:
    """Return the state of a virtual worker.

    Args:
        losses: in its average, oldest first.
    """
    state = PoseidonWorkerState(rank=nets.number, torch_rng=nets.train.random_state())
    state.smoothed_loss.extend(losses)
    for name, reader in nets.train.readers():
        state.reader.add(layer=name, batches=reader.batches_done)
    of_tests = [
        PoseidonNetState(layer=_layers_of(net), torch_rng=net.random_state() or None)
        for net in nets.tests
    ]
    found = [PoseidonNetState(layer=_layers_of(nets.train)), *of_tests]
    if any(one.ByteSize() for one in found):
        state.net.extend(found)
    return state


def _layers_of(net: Net) -> list[PoseidonLayerState]:
    return [
        PoseidonLayerState(
            name=name, values=[from_array(value.detach().cpu().numpy()) for value in values]
        )
        for name, layer in net.layer_modules
        if (values := layer.saved_state())
    ]


def restore(nets: WorkerNets, state: PoseidonWorkerState, *, batches: int = 0) -> None:
    """Set the nets of a virtual worker to its state.

    The readers of test nets follow from the number of test passes (`Tester.skip_to`). A test net
    with other random layers than the saved one keeps its generators: it is a different net.

    Args:
        batches: that a data layer has read that the state does not have.

    Raises:
        SnapshotError: the state is of a different net.
    """
    known = {reader.layer: reader.batches for reader in state.reader}
    for name, reader in nets.train.readers():
        reader.skip_to(known.get(name, batches))
    nets.train.set_random_state(state.torch_rng)
    saved = list(state.net) or [PoseidonNetState()] * (1 + len(nets.tests))
    for net, own in zip((nets.train, *nets.tests), saved, strict=False):
        _restore_layers(net, own)
        if own.torch_rng and len(own.torch_rng) == len(net.random_state()):
            net.set_random_state(own.torch_rng)


def _restore_layers(net: Net, saved: PoseidonNetState) -> None:
    known = {layer.name: layer.values for layer in saved.layer}
    for name, layer in net.layer_modules:
        device = layer.context.device
        values = known.get(name, ())
        layer.restore_state([torch.from_numpy(to_array(v).copy()).to(device) for v in values])
