"""Conditions and loops around the nets of models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.control_ops_util import add_if_op, add_while_op


def cond(
    model: Any,
    cond_blob: Any,
    external_blobs: Iterable[Any],
    then_model: Any,
    else_model: Any = None,
) -> None:
    """Run one of two models.

    Args:
        model: the model that gets the operator.
        cond_blob: one boolean.
        external_blobs: the blobs of `model` that the others read and write.
        then_model, else_model: what runs where it is true, and where it is false.
    """
    blob = _reference(cond_blob)
    add_if_op(
        model.net, blob, external_blobs, then_model.net, else_model.net if else_model else None
    )


def loop(
    model: Any,
    cond_blob: Any,
    external_blobs: Iterable[Any],
    loop_model: Any,
    cond_model: Any = None,
) -> None:
    """Run a model again and again.

    Args:
        model: the model that gets the operator.
        cond_blob: one boolean; the loop ends where it is false.
        external_blobs: the blobs of `model` that the others read and write.
        loop_model: what runs in each iteration.
        cond_model: what sets the boolean, before each iteration.
    """
    blob = _reference(cond_blob)
    add_while_op(
        model.net, blob, external_blobs, loop_model.net, cond_model.net if cond_model else None
    )


def _reference(blob: Any) -> Any:
    return core.BlobReference(blob) if isinstance(blob, str) else blob
