"""What tests of optimizers are built on: two small regressions that an
optimizer must solve, and learning rate changes.
"""

from __future__ import annotations

import unittest
from typing import Any

import numpy as np

from poseidon.caffe2 import brew, cnn, core, optimizer, workspace
from poseidon.caffe2.model_helper import ModelHelper
from poseidon.caffe2.modeling.initializers import Initializer, PseudoFP16Initializer

STEPS = 2000
SOLUTION = np.array([2, 6, 5, 0, 1], dtype=np.float32)
"""The weights that generate the labels."""


class OptimizerTestBase:
    """Tests of an optimizer; a subclass that is a `unittest.TestCase` too says which.

    It has `build_optimizer(model)`, which adds the optimizer to a model and returns it, and
    `check_optimizer(optimizer)`, which looks at the blobs that the optimizer owns after training.
    """

    _skip_gpu = False

    def _createDense(
        self, dtype: int = core.DataType.FLOAT
    ) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
        """Return a model of one fully-connected layer, the solution, the inputs and the labels."""
        np.random.seed(123)
        half = dtype == core.DataType.FLOAT16
        data = np.random.randint(2, size=(20, SOLUTION.size)).astype(
            np.float16 if half else np.float32
        )
        label = np.dot(data, SOLUTION)[:, np.newaxis]
        model = ModelHelper(name="test", arg_scope={"order": "NCHW"})
        initializer = PseudoFP16Initializer if half else Initializer
        out = brew.fc(
            model,
            "data",
            "fc",
            SOLUTION.size,
            1,
            ("ConstantFill", {}),
            ("ConstantFill", {}),
            axis=0,
            WeightInitializer=initializer,
            BiasInitializer=initializer,
        )
        if half:
            out = model.HalfToFloat(out, out + "_fp32")
        loss = model.AveragedLoss(model.SquaredL2Distance([out, "label"]), "avg_loss")
        gradients = model.AddGradientOperators([loss])
        assert isinstance(gradients["fc_w"], core.BlobReference)
        return model, SOLUTION, data, label

    def testDense(self) -> None:
        """Train the dense model: its weights must be the solution."""
        model, solution, data, label = self._createDense()
        made = self.build_optimizer(model)  # type: ignore[attr-defined]
        _create(model, data[0], label[0])
        for _ in range(STEPS):
            _step(model, data, label)
        np.testing.assert_allclose(solution[np.newaxis, :], workspace.FetchBlob("fc_w"), atol=1e-2)
        self.check_optimizer(made)  # type: ignore[attr-defined]

    @unittest.skipIf(not workspace.has_gpu_support, "No gpu support")
    def testGPUDense(self, dtype: int = core.DataType.FLOAT) -> None:
        """Run one step of a model with parameters on a GPU and on the CPU."""
        with core.DeviceScope(core.DeviceOption(workspace.GpuDeviceType, 0)):
            model, _, data, label = self._createDense(dtype)
            out = model.HalfToFloat("fc", "fc_fp32") if dtype == core.DataType.FLOAT16 else "fc"
            model.CopyGPUToCPU(out, "fc_cpu")
            workspace.FeedBlob("data", data[0])
            workspace.FeedBlob("label", label[0])
        brew.fc(model, "fc_cpu", "fc2", dim_in=1, dim_out=10, axis=0)
        self.build_optimizer(model)  # type: ignore[attr-defined]
        if not self._skip_gpu:
            workspace.RunNetOnce(model.param_init_net)
            workspace.CreateNet(model.net, True)
            workspace.RunNet(model.net.Proto().name)

    def testSparse(self) -> None:
        """Train a model that gathers its weights, each up to twice: they must be the solution."""
        copies = 2
        np.random.seed(123)
        data = np.random.randint(2, size=(20, SOLUTION.size * copies)).astype(np.float32)
        label = np.dot(data, np.repeat(SOLUTION, copies))
        model = cnn.CNNModelHelper("NCHW", name="test")
        weights = model.param_init_net.ConstantFill([], "w", shape=[SOLUTION.size], value=0.0)
        model.params.append(weights)
        out = model.ReduceFrontSum(model.net.Gather([weights, "indices"], "gather"), "sum")
        loss = model.AveragedLoss(model.SquaredL2Distance([out, "label"]), "avg_loss")
        gradients = model.AddGradientOperators([loss])
        assert isinstance(gradients["w"], core.GradientSlice)
        made = self.build_optimizer(model)  # type: ignore[attr-defined]
        workspace.CreateBlob("indices")
        workspace.CreateBlob("label")
        for kind in (np.int32, np.int64):
            workspace.RunNetOnce(model.param_init_net)
            workspace.CreateNet(model.net, True)
            for _ in range(STEPS):
                row = np.random.randint(len(data))
                indices = np.repeat(np.arange(SOLUTION.size), copies)[data[row] == 1]
                if indices.size:
                    workspace.FeedBlob("indices", indices.astype(kind))
                    workspace.FeedBlob("label", np.array(label[row], dtype=np.float32))
                    workspace.RunNet(model.net.Proto().name)
            np.testing.assert_allclose(SOLUTION, workspace.FetchBlob("w"), atol=1e-2)
        self.check_optimizer(made)  # type: ignore[attr-defined]


class LRModificationTestBase:
    """Tests of an optimizer that multiplies its learning rate by a blob; used beside
    `OptimizerTestBase`.
    """

    def _gradient_ratio_reference(self, model: Any, params: Any, max_gradient_norm: float) -> Any:
        """Return the factor that brings the norm of all gradients down to a limit."""
        squares = 0.0
        for param in params:
            gradient = model.param_to_grad[param]
            if isinstance(gradient, core.GradientSlice):
                gradient = gradient.values
            squares += np.power(np.linalg.norm(workspace.FetchBlob(gradient)), 2.0)
        return max_gradient_norm / np.maximum(max_gradient_norm, np.sqrt(squares))

    def test_global_norm_based_gradient_clipping(self) -> None:
        """Check the factor by which large gradients are scaled down."""
        model, _, data, label = self._createDense()  # type: ignore[attr-defined]
        made = self.build_optimizer(model, max_gradient_norm=1.0)  # type: ignore[attr-defined]
        params = [
            param for param in model.GetParams(top_scope=True) if param in model.param_to_grad
        ]
        dense = [p for p in params if not isinstance(model.param_to_grad[p], core.GradientSlice)]
        _create(model, data[0], label[0])
        assert made._lr_multiplier is not None
        _step(model, data, label)
        expected = self._gradient_ratio_reference(model, dense, 1.0)
        np.testing.assert_almost_equal(
            workspace.FetchBlob("norm_clipped_grad_update/norm_ratio"), expected
        )
        assert expected < 1.0, "no gradient was scaled"

    def test_lr_injection(self) -> None:
        """Check that the injected factor reaches the learning rate."""
        model, _, data, label = self._createDense()  # type: ignore[attr-defined]
        made = self.build_optimizer(  # type: ignore[attr-defined]
            model, max_gradient_norm=1, allow_lr_injection=True
        )
        _create(model, data[0], label[0])
        assert made._lr_multiplier is not None
        assert optimizer.get_lr_injection() == 1
        optimizer.set_lr_injection(0)
        assert optimizer.get_lr_injection() == 0
        workspace.RunNet(model.net.Proto().name)
        assert workspace.FetchBlob("lr_multiplier") == 0


def _create(model: Any, data: np.ndarray, label: np.ndarray) -> None:
    workspace.FeedBlob("data", data)
    workspace.FeedBlob("label", label)
    workspace.RunNetOnce(model.param_init_net)
    workspace.CreateNet(model.net, True)


def _step(model: Any, data: np.ndarray, label: np.ndarray) -> None:
    """Run the net on one row, chosen at random."""
    row = np.random.randint(len(data))
    workspace.FeedBlob("data", data[row])
    workspace.FeedBlob("label", label[row])
    workspace.RunNet(model.net.Proto().name)
