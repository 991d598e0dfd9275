"""Readers of images and records."""

from __future__ import annotations

from typing import Any


def image_input(
    model: Any,
    blob_in: Any,
    blob_out: Any,
    order: str = "NCHW",
    use_gpu_transform: bool = False,
    **kwargs: Any,
) -> Any:
    """Add `ImageInput`, and for NCHW on the CPU the transposition of its images.

    Args:
        blob_in: the reader.
        blob_out: the names of images and labels (and further outputs).
        kwargs: the arguments of the operator; `is_test` is 0 by default.

    Returns:
        the references to the outputs.
    """
    kwargs.setdefault("is_test", 0)
    if order != "NCHW":
        return model.net.ImageInput(blob_in, blob_out, **kwargs)
    if use_gpu_transform:
        return model.net.ImageInput(blob_in, blob_out, use_gpu_transform=1, **kwargs)
    outputs = model.net.ImageInput(blob_in, [blob_out[0] + "_nhwc", *blob_out[1:]], **kwargs)
    return (model.net.NHWC2NCHW(outputs[0], blob_out[0]), *outputs[1:])


def db_input(model: Any, blobs_out: Any, batch_size: int, db: str, db_type: str) -> Any:
    """Add a reader of a database of TensorProtos; return the references to its outputs."""
    reader = model.param_init_net.CreateDB([], "dbreader_" + db, db=db, db_type=db_type)
    return model.net.TensorProtosDBInput(reader, blobs_out, batch_size=batch_size)
