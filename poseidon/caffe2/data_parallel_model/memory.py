"""Less memory: parameters that replicas share, and gradients that share blobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from poseidon.caffe2 import memonger, workspace
from poseidon.caffe2.data_parallel_model.replicas import log, scope_of, stripBlobName


def keep_params_of_first(model: Any) -> None:
    """Leave in the model only the parameters of the first device: only these are updated."""
    model.params = model.GetParams(scope_of(model, model._devices[0]))
    kept = set(model.params)
    model.param_to_grad = {
        param: grad for param, grad in model.param_to_grad.items() if param in kept
    }
    model.weights = [weight for weight in model.weights if weight in kept]
    model.biases = [bias for bias in model.biases if bias in kept]


def read_params_of_first(model: Any, all_params: Iterable[Any]) -> None:
    """Make all replicas read the parameters of the first device, and remove what makes the
    others.
    """
    others = {str(param) for param in all_params} - {str(param) for param in model.GetParams()}
    first = scope_of(model, model._devices[0])
    for net in (model.param_init_net, model.net):
        proto = net.Proto()
        kept = []
        for op in proto.op:
            if others.isdisjoint(op.output):
                op.input[:] = [
                    first + stripBlobName(name) if name in others else name for name in op.input
                ]
                kept.append(type(op).FromString(op.SerializeToString()))
        del proto.op[:]
        proto.op.extend(kept)


def share_gradient_blobs(model: Any, losses: Mapping[int, Sequence[Any]]) -> None:
    """Let the gradients of each device share blobs."""
    log.warning(
        "optimize_gradient_memory is deprecated, use data_parallel_model.OptimizeGradientMemory()"
    )
    for device in model._devices:
        model.net._net = memonger.share_grad_blobs(
            model.net,
            losses[device],
            set(model.param_to_grad.values()),
            scope_of(model, device),
            share_activations=False,
        )


def release_blobs(model: Any, blobs_to_keep: Iterable[str] | None) -> None:
    """Free each blob after its last use.

    Args:
        model: the model.
        blobs_to_keep: names, without the scope of a device, of blobs that stay.
    """
    kept = {
        scope_of(model, device) + name for device in model._devices for name in blobs_to_keep or ()
    }
    if model._rendezvous is not None:
        kept.update(str(grad) for grad in model.param_to_grad.values())
    model.net._net = memonger.release_blobs_when_used(model.net.Proto(), kept)


def OptimizeGradientMemory(
    model: Any,
    input_shapes: Mapping[str, Sequence[int]] | None,
    excluded_blobs: Iterable[str],
    recycle_activations: bool,
) -> None:
    """Let the gradients of each device share blobs, where one is not used any more when the
    other is made.

    Args:
        model: a parallelized model; call it before its net is created.
        input_shapes: the shape of each input, by its name without the scope of a device; with it,
            blobs of like size are shared. Empty where they are unknown, None to leave shapes out of
            account.
        excluded_blobs: names of blobs that are not shared, since the script reads them.
        recycle_activations: whether activations of the forward pass share blobs too.
    """
    shapes = None
    if input_shapes is not None:
        known = {
            scope_of(model, device) + name: shape
            for name, shape in input_shapes.items()
            for device in model._devices
        }
        shapes, _ = workspace.InferShapesAndTypes([model.param_init_net, model.net], known)
    for device in model._devices:
        prefix = scope_of(model, device)
        model.net._net = memonger.share_grad_blobs(
            model.net,
            model._losses_by_gpu[device],
            set(model.param_to_grad.values()),
            prefix,
            dont_share_blobs={prefix + name for name in excluded_blobs},
            share_activations=recycle_activations,
            blob_shapes=shapes,
        )
