"""The types of pycaffe's lists. Scripts compare them: `type(net.params[k]) is
caffe._caffe.BlobVec`.
"""

from __future__ import annotations

from typing import Any


class LayerVec(list[Any]):
    """The layers of a net: `net.layers`."""


class NetVec(list[Any]):
    """The test nets of a solver: `solver.test_nets`."""


class StringVec(list[str]):
    """Names: `net._layer_names`, `net._blob_names`."""


class IntVec(list[int]):
    """Indices: `net._inputs`, `net._outputs`, `net._bottom_ids(layer)`."""


class DtypeVec(list[float]):
    """Numbers: `net._blob_loss_weights`."""
