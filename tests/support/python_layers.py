"""Layers as users write them for Caffe; `import caffe` is what the Python layer makes of it."""

from __future__ import annotations

import json
import sys

import caffe  # type: ignore[import-not-found]
import numpy as np


class Scaled(caffe.Layer):  # type: ignore[misc]
    """y = k x, k from param_str."""

    def setup(self, bottom, top):  # type: ignore[no-untyped-def]
        self.factor = float(self.param_str or 10)

    def reshape(self, bottom, top):  # type: ignore[no-untyped-def]
        top[0].reshape(*bottom[0].data.shape)

    def forward(self, bottom, top):  # type: ignore[no-untyped-def]
        top[0].data[...] = self.factor * bottom[0].data

    def backward(self, top, propagate_down, bottom):  # type: ignore[no-untyped-def]
        if propagate_down[0]:
            bottom[0].diff[...] = self.factor * top[0].diff


class Affine(caffe.Layer):  # type: ignore[misc]
    """y = x W^T + b with learnable W and b, first values 0.5 and the numbers 0, 1, ..."""

    def setup(self, bottom, top):  # type: ignore[no-untyped-def]
        self.outputs = json.loads(self.param_str)["outputs"]
        self.blobs.add_blob(self.outputs, bottom[0].shape[1])
        self.blobs.add_blob(self.outputs)
        self.blobs[0].data[...] = 0.5
        self.blobs[1].data[...] = np.arange(self.outputs)

    def reshape(self, bottom, top):  # type: ignore[no-untyped-def]
        top[0].reshape(bottom[0].num, self.outputs)

    def forward(self, bottom, top):  # type: ignore[no-untyped-def]
        top[0].data[...] = bottom[0].data @ self.blobs[0].data.T + self.blobs[1].data

    def backward(self, top, propagate_down, bottom):  # type: ignore[no-untyped-def]
        self.blobs[0].diff[...] += top[0].diff.T @ bottom[0].data
        self.blobs[1].diff[...] += top[0].diff.sum(axis=0)
        if propagate_down[0]:
            bottom[0].diff[...] = top[0].diff @ self.blobs[0].data


class Counting(caffe.Layer):  # type: ignore[misc]
    """A data layer: 0, 1, 2, ... and labels; counts where it stands."""

    def setup(self, bottom, top):  # type: ignore[no-untyped-def]
        self.next = 0
        top[0].reshape(4, 2)
        top[1].reshape(4)

    def reshape(self, bottom, top):  # type: ignore[no-untyped-def]
        pass

    def forward(self, bottom, top):  # type: ignore[no-untyped-def]
        values = np.arange(self.next, self.next + 4)
        top[0].data[...] = values[:, None]
        top[1].data[...] = values % 2
        self.next += 4

    def backward(self, top, propagate_down, bottom):  # type: ignore[no-untyped-def]
        pass


class Growing(caffe.Layer):  # type: ignore[misc]
    """A data layer whose pictures are one larger each time."""

    def setup(self, bottom, top):  # type: ignore[no-untyped-def]
        self.side = 4

    def reshape(self, bottom, top):  # type: ignore[no-untyped-def]
        top[0].reshape(1, 2, self.side, self.side)

    def forward(self, bottom, top):  # type: ignore[no-untyped-def]
        top[0].data[...] = self.side
        self.side += 1

    def backward(self, top, propagate_down, bottom):  # type: ignore[no-untyped-def]
        pass


class HalfSquare(caffe.Layer):  # type: ignore[misc]
    """A loss: half the mean squared difference of two bottoms."""

    def setup(self, bottom, top):  # type: ignore[no-untyped-def]
        if len(bottom) != 2:
            raise Exception("need two bottoms")

    def reshape(self, bottom, top):  # type: ignore[no-untyped-def]
        top[0].reshape(1)

    def forward(self, bottom, top):  # type: ignore[no-untyped-def]
        self.difference = bottom[0].data - bottom[1].data
        top[0].data[0] = np.sum(self.difference**2) / bottom[0].num / 2

    def backward(self, top, propagate_down, bottom):  # type: ignore[no-untyped-def]
        for place, sign in ((0, 1), (1, -1)):
            if propagate_down[place]:
                bottom[place].diff[...] = sign * top[0].diff[0] * self.difference / bottom[0].num


class Phase(caffe.Layer):  # type: ignore[misc]
    """A single number: the phase."""

    def reshape(self, bottom, top):  # type: ignore[no-untyped-def]
        top[0].reshape()

    def forward(self, bottom, top):  # type: ignore[no-untyped-def]
        top[0].data[()] = self.phase


class Raising(caffe.Layer):  # type: ignore[misc]
    """Raises RuntimeError in the method that param_str names; `exit` ends the process."""

    def _maybe(self, method):  # type: ignore[no-untyped-def]
        if self.param_str == method:
            raise RuntimeError(f"no {method} today")

    def setup(self, bottom, top):  # type: ignore[no-untyped-def]
        self._maybe("setup")

    def reshape(self, bottom, top):  # type: ignore[no-untyped-def]
        self._maybe("reshape")
        top[0].reshape(*bottom[0].data.shape)

    def forward(self, bottom, top):  # type: ignore[no-untyped-def]
        self._maybe("forward")
        if self.param_str == "exit":
            sys.exit(3)
        top[0].data[...] = bottom[0].data

    def backward(self, top, propagate_down, bottom):  # type: ignore[no-untyped-def]
        self._maybe("backward")


class InPlace(caffe.Layer):  # type: ignore[misc]
    """Adds one, in the bottom's own memory."""

    def reshape(self, bottom, top):  # type: ignore[no-untyped-def]
        assert top[0] is bottom[0]

    def forward(self, bottom, top):  # type: ignore[no-untyped-def]
        top[0].data[...] += 1

    def backward(self, top, propagate_down, bottom):  # type: ignore[no-untyped-def]
        bottom[0].diff[...] = 2 * top[0].diff


class Flat(InPlace):
    """The same, of each item's values in one row."""

    def reshape(self, bottom, top):  # type: ignore[no-untyped-def]
        top[0].reshape(bottom[0].shape[0], bottom[0].count // bottom[0].shape[0])


class Noisy(Flat):
    """Adds noise from numpy's generator, and the number of its virtual worker."""

    def forward(self, bottom, top):  # type: ignore[no-untyped-def]
        assert (caffe.solver_rank(), caffe.solver_count()) == (self.rank, self.workers)
        noise = np.random.normal(size=bottom[0].shape) + caffe.solver_rank()
        top[0].data[...] = bottom[0].data + 0.1 * noise

    def backward(self, top, propagate_down, bottom):  # type: ignore[no-untyped-def]
        bottom[0].diff[...] = top[0].diff


class Remembering(Flat):
    """Adds a part of all that it has seen so far."""

    def setup(self, bottom, top):  # type: ignore[no-untyped-def]
        self.seen = 0.0

    def forward(self, bottom, top):  # type: ignore[no-untyped-def]
        self.seen += float(bottom[0].data.mean())
        top[0].data[...] = bottom[0].data + 0.1 * self.seen

    def backward(self, top, propagate_down, bottom):  # type: ignore[no-untyped-def]
        bottom[0].diff[...] = top[0].diff


class NotALayer:
    """Derives from nothing of Caffe."""
