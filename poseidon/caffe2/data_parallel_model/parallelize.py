"""Synchronous data parallelism: a part of the batch per device, one summed gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.data_parallel_model import sharing
from poseidon.caffe2.data_parallel_model.collectives import (
    Rendezvous,
    all_reduce,
    between_hosts,
    share_computed_params,
    sync,
)
from poseidon.caffe2.data_parallel_model.replicas import (
    blobs_to_sync,
    check_operators,
    check_params,
    check_scope,
    choose_devices,
    for_each_replica,
    group_by_device,
    infer_devices,
    log,
    made_for_first,
    replica,
)
from poseidon.caffe2.data_parallel_model.running import BARRIER_TIMEOUT_S, set_nets

Builder = Callable[[Any], Any]
"""Takes the model and adds operators to it."""
EXTRA_THREADS = 8
"""Threads for collectives between hosts, beside the threads of the devices."""


def Parallelize(
    model_helper_obj: Any,
    input_builder_fun: Builder,
    forward_pass_builder_fun: Callable[[Any, float], Any],
    param_update_builder_fun: Builder | None = None,
    optimizer_builder_fun: Builder | None = None,
    post_sync_builder_fun: Builder | None = None,
    pre_grad_net_transformer_fun: Builder | None = None,
    net_transformer_fun: Callable[[Any, int, str, int], Any] | None = None,
    devices: Sequence[int] | None = None,
    rendezvous: Rendezvous | None = None,
    net_type: str = "dag",
    broadcast_computed_params: bool = True,
    optimize_gradient_memory: bool = False,
    dynamic_memory_management: bool = False,
    blobs_to_keep: Iterable[str] | None = None,
    use_nccl: bool = False,
    max_concurrent_distributed_ops: int = 16,
    cpu_device: bool = False,
    ideep: bool = False,
    num_threads_per_device: int = 4,
    shared_model: bool = False,
    combine_spatial_bn: bool = False,
    barrier_net_timeout_sec: float = BARRIER_TIMEOUT_S,
    shard_batch_sizes: Sequence[int] | None = None,
) -> None:
    """Build a model on each device with the operators that keep replicas equal, in place.

    Args:
        model_helper_obj: an empty ModelHelper; parameters that it has are not data-parallel.
        input_builder_fun: adds the inputs; called for each device in its scopes. A
            reader that the devices share is made outside.
        forward_pass_builder_fun: adds the layers and returns the list of losses. It gets the model
            and `loss_scale`, by which it multiplies each loss.
        param_update_builder_fun: adds the updates; called for each device in its scopes.
        optimizer_builder_fun: adds the updates of all devices; called once outside scopes. Without
            either the model is for tests: forward only.
        post_sync_builder_fun: adds what follows the first copies; called for each device.
        pre_grad_net_transformer_fun: called once before the gradient operators are added.
        net_transformer_fun: called once behind these with the model, the number of devices, the
            prefix of their scopes and their type.
        devices: the numbers of the devices; by default all GPUs, or one a processor.
        rendezvous: None for one host, else a dict with `kv_handler` (the blob of a store handler),
            `num_shards`, `shard_id` (of this process), `engine` ("GLOO", or "NCCL" between GPUs)
            and, where wanted, `interface` (the network interface or address that the other hosts
            reach).
        net_type: how the net runs: `dag` overlaps sums with the backward pass, `simple` does not.
        broadcast_computed_params: whether each iteration copies the first device's running means.
        optimize_gradient_memory: see `OptimizeGradientMemory`, which is to be preferred.
        dynamic_memory_management: whether blobs but `blobs_to_keep` are freed after use.
        blobs_to_keep: names without the scope of a device.
        use_nccl: whether NCCL sums over the GPUs of a host.
        max_concurrent_distributed_ops: collectives between hosts that run at the same time.
        cpu_device: whether the devices are replicas on the CPU.
        ideep: the same under the names `ideep_<device>/`.
        num_threads_per_device: threads that run the net.
        shared_model: whether all replicas on the CPU read one set of parameters.
        combine_spatial_bn: whether SpatialBN normalizes the joined batch of all devices of a host.
        barrier_net_timeout_sec: how long `RunInitNet` and `RunNet` wait for the slowest shard.
        shard_batch_sizes: the batch size of each shard, where these differ. Gradients are weighted
            by n_i / sum n_i, so that the update equals an update with the whole batch. By default
            all shards count the same.

    Raises:
        AssertionError: in a device scope, with both builders of updates, or without losses.
    """
    check_scope()
    choose_devices(
        model_helper_obj, devices, cpu=cpu_device, ideep=ideep, shared_model=shared_model
    )
    model = model_helper_obj
    updates = param_update_builder_fun is not None or optimizer_builder_fun is not None
    assert param_update_builder_fun is None or optimizer_builder_fun is None, (
        "Can only specify one of param_update_builder_fun, optimizer_builder_fun"
    )
    assert not (optimize_gradient_memory and dynamic_memory_management), (
        "optimize_gradient_memory and dynamic_memory_management exclude each other"
    )
    most = prepare(
        model, rendezvous, net_type, num_threads_per_device, max_concurrent_distributed_ops
    )
    if not updates and model.init_params:
        log.warning(
            "Model %s has no updates, so it is for tests, but it has init_params=True: its "
            "param_init_net, when it is run, replaces the parameters of the training model. Make "
            "it with ModelHelper(init_params=False)",
            model.name,
        )
    losses, old = build_replicas(
        model,
        input_builder_fun,
        forward_pass_builder_fun,
        loss_scale(model, shard_batch_sizes),
        updates,
    )
    computed = group_by_device(model, model.GetComputedParams(""))
    model._device_grouped_blobs.update(computed)
    model._param_names = list(model._device_grouped_blobs)
    model._computed_param_names = list(computed)
    if pre_grad_net_transformer_fun is not None:
        pre_grad_net_transformer_fun(model)
    if updates:
        add_gradients(model, losses)
    if net_transformer_fun is not None:
        net_transformer_fun(model, len(model._devices), model._device_prefix, model._device_type)
    if not updates:
        infer_devices(model)
        model._data_parallel_model_init_nets = [model.param_init_net]
        model._data_parallel_model_nets = [model.net]
        return
    if combine_spatial_bn:
        sharing.combine(model)
    check_params(model.params)
    _sum_gradients(model, old, broadcast_computed_params, use_nccl, most)
    all_params = set(model.GetParams(""))
    if shared_model:
        sharing.keep_params_of_first(model)
    if param_update_builder_fun is not None:
        for_each_replica(model, param_update_builder_fun)
    elif optimizer_builder_fun is not None:
        model._optimizer = optimizer_builder_fun(model)
    _sync_at_start(model, post_sync_builder_fun)
    if optimize_gradient_memory:
        sharing.share_gradient_blobs(model, losses)
    if dynamic_memory_management:
        sharing.release_blobs(model, blobs_to_keep)
    set_nets(model, [model.param_init_net], [model.net], barrier_net_timeout_sec)
    if shared_model:
        sharing.read_params_of_first(model, all_params)


def prepare(
    model: Any, rendezvous: Rendezvous | None, net_type: str, threads_per_device: int, most: int
) -> int:
    """Set the net's type, threads and attributes; return how many collectives overlap.

    Raises:
        ValueError: the rendezvous lacks an entry.
    """
    if rendezvous is not None:
        for key in ("kv_handler", "shard_id", "num_shards", "engine"):
            if key not in rendezvous:
                raise ValueError(
                    f"rendezvous={rendezvous} has no {key}: expected kv_handler, shard_id, "
                    "num_shards and engine"
                )
    log.info("Parallelizing model for devices: %s", model._devices)
    extra = EXTRA_THREADS if rendezvous is not None else 0
    threads = len(model._devices) * threads_per_device + extra
    model.net.Proto().num_workers = threads
    model.net.Proto().type = net_type
    model._rendezvous = rendezvous
    model._sync_barrier_net = None
    model._broadcast_context = None
    model._optimizer = None
    model._grad_names = []
    return min(most, threads - 1)


def loss_scale(model: Any, shard_batch_sizes: Sequence[int] | None) -> float:
    """Return the factor of this shard's losses: the sum over all devices is the batch mean.

    Raises:
        ValueError: there is not one batch size above 0 for each shard.
    """
    rendezvous = model._rendezvous
    shards = 1 if rendezvous is None else rendezvous["num_shards"]
    if shard_batch_sizes is None:
        return 1.0 / (len(model._devices) * shards)
    sizes = list(shard_batch_sizes)
    if len(sizes) != shards or min(sizes) <= 0:
        raise ValueError(
            f"shard_batch_sizes={sizes}: expected {shards} numbers above 0, one for each shard"
        )
    own = sizes[0 if rendezvous is None else rendezvous["shard_id"]]
    return own / sum(sizes) / len(model._devices)


def build_replicas(
    model: Any,
    input_builder_fun: Builder,
    forward_pass_builder_fun: Callable[[Any, float], Any],
    scale: float,
    updates: bool,
) -> tuple[dict[int, Any], list[Any]]:
    """Build inputs and forward pass for each device; group the parameters.

    Returns:
        The losses of each device, and the parameters that the model had before.

    Raises:
        AssertionError: losses are needed and no list is returned; or a parameter is made twice.
    """
    old = list(model.params)

    def build(replicated: Any) -> Any:
        input_builder_fun(replicated)
        losses = forward_pass_builder_fun(replicated, scale)
        if updates:
            assert isinstance(losses, list) and all(
                isinstance(x, core.BlobReference) for x in losses
            ), "Model builder function must return list of loss blobs"
        return losses

    losses = for_each_replica(model, build)
    check_params(model.params)
    model._losses_by_gpu = losses
    model._device_grouped_blobs = group_by_device(model, model.params[len(old) :])
    return losses, old


def add_gradients(model: Any, losses: dict[int, Any]) -> None:
    """Add the gradient operators; the gradient of each loss is 1."""
    seeds = {}
    for device in model._devices:
        with core.DeviceScope(core.DeviceOption(model._device_type, device)):
            for loss in losses[device]:
                seeds[str(loss)] = str(model.ConstantFill(loss, f"{loss}_grad", value=1.0))
    model.AddGradientOperators(seeds)


def _sum_gradients(
    model: Any, old: Sequence[Any], broadcast: bool, use_nccl: bool, most: int
) -> None:
    """Add the sums of the gradients, the last layer first: its gradient is there first."""
    known = [param for param in model.params if param in model.param_to_grad]
    grouped = group_by_device(
        model, [model.param_to_grad[param] for param in known if param not in set(old)]
    )
    model._device_grouped_blobs.update(grouped)
    model._grad_names = list(grouped)
    infer_devices(model)
    if broadcast:
        share_computed_params(model, use_nccl)
    if grouped:
        all_reduce(model, model.net, model._grad_names[::-1], use_nccl, most)
    else:
        log.info("The forward pass has made no parameters")


def _sync_at_start(model: Any, post_sync_builder_fun: Builder | None) -> None:
    """Add the copies of all that the init net makes: replicas start equal."""
    blobs, names = blobs_to_sync(model)
    if model._shared_model and between_hosts(model._rendezvous):
        names |= made_for_first(model)
    model._device_grouped_blobs.update(group_by_device(model, blobs))
    infer_devices(model)
    check_operators(model)
    model.Proto().arg.add(name="first_iter_only_one_worker", i=1)
    sync(model, model.param_init_net, model.param_init_net, names, max_concurrent_distributed_ops=1)
    if post_sync_builder_fun is not None:
        for device in model._devices:
            with replica(model, device):
                post_sync_builder_fun(model)
