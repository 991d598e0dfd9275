"""`debug_info`: the mean absolute values of a net's blobs in each pass, in the log lines of a job
(`poseidon.caffe.net.debug`).

Law: the log changes no value. Splits are layers here, so they have lines, as in Caffe.
"""

from __future__ import annotations

import logging

from poseidon.caffe.layers.sources import Input
from poseidon.caffe.net.debug import mean_magnitude, norms
from poseidon.observe.metrics.glog_lines import (
    GlogSink,
    all_params,
    backward_bottom,
    backward_param,
    forward_param,
    forward_top,
)
from poseidon.pycaffe.graph import NetGraph

LOG = GlogSink(logging.getLogger("poseidon.caffe.net"))


class DebugLog:
    """The log of a net's passes, layer by layer."""

    def __init__(self, net: NetGraph) -> None:
        self._net = net
        self._layers = net.compiled.definition.param.layer

    def forward(self, index: int) -> None:
        """Log the tops and the learnable blobs of a layer that has run."""
        node, param = self._net.nodes[index], self._layers[index]
        if isinstance(node.layer, Input):
            return
        for name, top in zip(self._net.tops[index], node.tops, strict=True):
            LOG.write(forward_top(param.name, name, mean_magnitude(top.read_data())))
        for number, blob in enumerate(node.blobs):
            name = param.param[number].name if number < len(param.param) else ""
            mean = mean_magnitude(blob.read_data())
            LOG.write(forward_param(param.name, name or str(number), mean))

    def backward(self, index: int) -> None:
        """Log the diffs that a layer has computed; after the first layer the norms of all."""
        node, layer = self._net.nodes[index], self._layers[index].name
        if node.flags.backward:
            bottoms = zip(self._net.bottoms[index], node.bottoms, node.flags.bottoms, strict=True)
            for name, bottom, has_diff in bottoms:
                if has_diff:
                    LOG.write(backward_bottom(layer, name, mean_magnitude(bottom.read_diff())))
            for number, (blob, source) in enumerate(
                zip(node.blobs, node.layer.sources(), strict=True)
            ):
                if source.requires_grad:
                    LOG.write(backward_param(layer, number, mean_magnitude(blob.read_diff())))
        if index == 0:
            blobs = [blob for _, blob in self._net.learned_blobs()]
            data, diffs = [b.read_data() for b in blobs], [b.read_diff() for b in blobs]
            LOG.write(all_params(*norms(data), *norms(diffs)))
