"""Blockwise model-update filtering: replicas train alone for a block, then update a common model.

Scalable Training of Deep Learning Machines by Incremental Block Training with Intra-block Parallel
Optimization and Blockwise Model-Update Filtering, Chen and Huo, ICASSP 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.data_parallel_model import sharing
from poseidon.caffe2.data_parallel_model.collectives import (
    AddBlobSync,
    Rendezvous,
    all_reduce,
    sync,
)
from poseidon.caffe2.data_parallel_model.parallelize import (
    Builder,
    add_gradients,
    build_replicas,
    loss_scale,
    prepare,
)
from poseidon.caffe2.data_parallel_model.replicas import (
    check_params,
    check_scope,
    choose_devices,
    for_each_replica,
    group_of,
    infer_devices,
    option_of,
)
from poseidon.caffe2.data_parallel_model.running import BARRIER_TIMEOUT_S, set_nets


def Parallelize_BMUF(
    model_helper_obj: Any,
    input_builder_fun: Builder,
    forward_pass_builder_fun: Callable[[Any, float], Any],
    param_update_builder_fun: Builder,
    block_learning_rate: float = 1.0,
    block_momentum: float | None = None,
    devices: Sequence[int] | None = None,
    rendezvous: Rendezvous | None = None,
    net_type: str = "dag",
    master_device: int | None = None,
    use_nccl: bool = False,
    nesterov: bool = False,
    optimize_gradient_memory: bool = False,
    reset_momentum_sgd: bool = False,
    warmup_iterations: int | None = None,
    max_concurrent_distributed_ops: int = 4,
    add_blobs_to_sync: Sequence[str] | None = None,
    num_threads_per_device: int = 4,
    cpu_device: bool = False,
    barrier_net_timeout_sec: float = BARRIER_TIMEOUT_S,
) -> None:
    """Build a model for each device, and the net that joins the replicas after each block.

    `RunNet(model, n)` runs n iterations of each replica alone, then once, for each parameter with
    the mean a over all replicas, the common model g and the momentum v:

        v = block_momentum * v + block_learning_rate * (a - g)
        g = g + v        (nesterov: less block_momentum * (v - the v before))

    and gives g to all replicas.

    Args:
        model_helper_obj, input_builder_fun and the other builders: see `Parallelize`.
        block_learning_rate: of the common model.
        block_momentum: of the common model; by default 1 - 1/N for N replicas on all shards.
        devices, rendezvous, net_type: see `Parallelize`.
        master_device: the device that updates the common model; by default the first.
        use_nccl: see `Parallelize`.
        nesterov: whether the momentum is Nesterov's.
        optimize_gradient_memory: see `Parallelize`.
        reset_momentum_sgd: whether the momenta of MomentumSGDUpdate start at 0 in each block.
        warmup_iterations: of `RunWarmup`, after which all replicas get the parameters of the first.
        max_concurrent_distributed_ops: see `Parallelize`.
        add_blobs_to_sync: names, without device scopes, of more blobs to copy from the first.
        num_threads_per_device, cpu_device, barrier_net_timeout_sec: see `Parallelize`.

    Raises:
        AssertionError: the call is in a device scope, or the forward pass returns no losses.
    """
    check_scope()
    choose_devices(model_helper_obj, devices, cpu=cpu_device)
    model = model_helper_obj
    most = prepare(
        model, rendezvous, net_type, num_threads_per_device, max_concurrent_distributed_ops
    )
    scale = loss_scale(model, None)
    losses, _ = build_replicas(model, input_builder_fun, forward_pass_builder_fun, scale, True)
    names = list(model._device_grouped_blobs)
    model._param_names = names
    add_gradients(model, losses)
    check_params(model.params)
    infer_devices(model)
    for_each_replica(model, param_update_builder_fun)
    master = model._devices[0] if master_device is None else master_device
    start, update = _net_like(model, "global_model_init"), _net_like(model, "global_model")
    model._global_model_init_net, model._global_model_param_updates_net = start, update
    if warmup_iterations is not None:
        model._warmup_iterations = warmup_iterations
        model._warmup_broadcast = _net_like(model, "warmup-broadcast")
        sync(model, model.param_init_net, model._warmup_broadcast, names, most)
    momentum = 1.0 - scale if block_momentum is None else block_momentum
    with core.DeviceScope(option_of(model, master)):
        params = [group_of(model, name)[master] for name in names]
        for param in params:
            if warmup_iterations is not None:
                model._warmup_broadcast.Copy(param, f"{param}_g")
            start.ConstantFill(param, f"{param}_v", value=0.0)
            start.Copy(param, f"{param}_g")
            if nesterov:
                start.ConstantFill(param, f"{param}_prev", value=0.0)
    all_reduce(model, update, names, use_nccl, most)
    with core.DeviceScope(option_of(model, master)):
        for param in params:
            _add_update(update, param, scale, block_learning_rate, momentum, nesterov)
    sync(model, model.param_init_net, update, names, most)
    AddBlobSync(model, add_blobs_to_sync or (), net=update)
    if reset_momentum_sgd:
        _reset_momenta(model, update)
    if optimize_gradient_memory:
        sharing.share_gradient_blobs(model, losses)
    set_nets(
        model, [model.param_init_net, start], [model.net, (update, 1)], barrier_net_timeout_sec
    )


def _net_like(model: Any, name: str) -> Any:
    """Return an empty net that runs as the model's."""
    net = core.Net(name)
    net.Proto().type = model.net.Proto().type
    net.Proto().num_workers = model.net.Proto().num_workers
    return net


def _add_update(
    net: Any, param: Any, mean: float, rate: float, momentum: float, nesterov: bool
) -> None:
    """Add the update of the common model `<param>_g`; the parameter has the replicas' sum.

    Args:
        net: the net.
        param: the reference to the parameter of the master device.
        mean: 1 / replicas.
        rate: the block learning rate.
        momentum: the block momentum.
        nesterov: whether it is Nesterov's.
    """
    common, velocity, before = f"{param}_g", f"{param}_v", f"{param}_prev"
    net.Scale(param, param, scale=mean)
    net.Sub([param, common], param)
    net.Scale(param, param, scale=rate)
    net.Scale(velocity, velocity, scale=momentum)
    net.Add([velocity, param], velocity)
    net.Add([common, velocity], common)
    if nesterov:
        net.Sub([velocity, before], before)
        net.Scale(before, before, scale=momentum)
        net.Sub([common, before], common)
        net.Copy(velocity, before)
    net.Copy(common, param)


def _reset_momenta(model: Any, net: Any) -> None:
    for op in model.net.Proto().op:
        if op.type == "MomentumSGDUpdate":
            with core.DeviceScope(op.device_option):
                net.ConstantFill([op.input[1]], op.input[1], value=0.0)
