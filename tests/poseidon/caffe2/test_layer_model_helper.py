"""Models of layers: what their nets compute, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import layer_model_instantiator as instantiator
from poseidon.caffe2 import optimizer, schema, workspace
from poseidon.caffe2.core import NameScope
from poseidon.caffe2.layer_model_helper import LayerModelHelper
from poseidon.caffe2.layers import layers
from poseidon.caffe2.layers.tags import TagContext, Tags
from poseidon.caffe2.modeling.parameter_sharing import ParameterSharing
from tests.support.caffe2_operators import Array, numbers

X = numbers(6, 4)
LABEL = np.array([1, 0, 0, 1, 1, 0], "int32")


def model_of(*columns: tuple[str, Any], label: Any = np.int32) -> LayerModelHelper:
    return LayerModelHelper(
        "model", schema.Struct(*columns), schema.Struct(("label", schema.Scalar(label)))
    )


def vectors(size: int = 4) -> Any:
    return schema.Scalar((np.float32, (size,)))


def fetch(record: Any) -> Array:
    found: Array = workspace.FetchBlob(str(record()))
    return found


def sigmoid(x: Array) -> Array:
    found: Array = 1 / (1 + np.exp(-x))
    return found


def logistic() -> tuple[LayerModelHelper, Any, Any]:
    """Return a logistic regression, its logit and its probability."""
    model = model_of(("x", vectors()))
    logit = model.FC(model.input_feature_schema.x, 1, name="score")
    probability = model.Sigmoid(logit, 1)
    labelled = schema.Struct(("label", model.trainer_extra_schema.label), ("logit", logit))
    model.add_loss(model.BatchLRLoss(labelled))
    model.output_schema = schema.Struct(("probability", probability))
    model.default_optimizer = optimizer.SgdOptimizer(0.5, policy="fixed")
    return model, logit, probability


def test_three_nets_of_one_model() -> None:
    model, logit, probability = logistic()
    init_net, train_net = instantiator.generate_training_nets(model)
    eval_net = instantiator.generate_eval_net(model)
    predict_net = instantiator.generate_predict_net(model)
    workspace.RunNetOnce(init_net)
    schema.FeedRecord(train_net.input_record(), [X, LABEL])
    assert logit.field_type() == probability.field_type() == np.dtype((np.float32, (1,)))
    w, b = workspace.FetchBlob("score/w"), workspace.FetchBlob("score/b")
    assert w.shape == (1, 4) and abs(w).max() <= 0.5
    p = sigmoid(X @ w.T + b)
    workspace.RunNetOnce(train_net)
    np.testing.assert_allclose(fetch(probability), p, rtol=1e-5)
    chosen = np.where(LABEL[:, None] == 1, p, 1 - p)
    np.testing.assert_allclose(fetch(model.loss[0]), -np.log(chosen).mean(), rtol=1e-5)
    step = 0.5 * ((p - LABEL[:, None]) * X).mean(0)
    np.testing.assert_allclose(workspace.FetchBlob("score/w"), w - step, rtol=1e-4, atol=1e-6)
    kinds = [[op.type for op in net.Proto().op] for net in (eval_net, predict_net)]
    assert kinds == [["FC", "Sigmoid"]] * 2  # the loss belongs to the training only
    assert predict_net.output_record().field_names() == ["probability"]
    assert eval_net.input_record().field_names() == ["x", "label"]
    workspace.RunNetOnce(predict_net)
    assert not np.allclose(fetch(probability), p)


def run(model: LayerModelHelper, output: Any, *arrays: Array, context: str = "prediction") -> Array:
    """Return what a model computes of arrays, in one of its nets."""
    model.output_schema = schema.Struct(("output", output))
    init_net, train_net = instantiator.generate_training_nets_forward_only(model)
    nets = {
        "training": train_net,
        "eval": instantiator.generate_eval_net(model),
        "prediction": instantiator.generate_predict_net(model),
    }
    workspace.RunNetOnce(init_net)
    schema.FeedRecord(model.input_feature_schema + model.trainer_extra_schema, arrays)
    workspace.RunNetOnce(nets[context])
    return fetch(output)


def test_layers_on_dense_columns() -> None:
    model = model_of(("x", vectors()), ("z", vectors(3)))
    x, z = model.input_feature_schema.x, model.input_feature_schema.z
    joined = model.Concat(schema.Struct(("a", x), ("b", z)))
    product = model.FCWithoutBias(joined, 2)
    total = model.Add([product, product], "twice")
    z_values = numbers(6, 3, seed=1)
    found = run(model, total, X, z_values, LABEL)
    w = workspace.FetchBlob("fc_without_bias/w")
    np.testing.assert_allclose(found, 2 * np.hstack([X, z_values]) @ w.T, rtol=1e-5, atol=1e-6)
    assert total.field_type() == np.dtype((np.float32, (2,)))
    assert str(total()) == "Add/twice"


def test_joining_along_new_axes() -> None:
    model = model_of(("x", vectors()), ("z", vectors()))
    both = model.input_feature_schema
    stacked = model.Concat(both, axis=1, add_axis=1)
    assert stacked.field_type().shape == (2, 4)
    assert model.Concat(both, axis=0).field_type().shape == (4,)
    np.testing.assert_array_equal(run(model, stacked, X, 2 * X, LABEL), np.stack([X, 2 * X], 1))
    with pytest.raises(AssertionError, match="a new axis cannot be the batch"):
        model.Concat(both, axis=0, add_axis=1)
    wide = model_of(("x", vectors()), ("y", schema.Scalar((np.float32, (2, 3)))))
    with pytest.raises(AssertionError, match=r"the shapes .* differ"):
        wide.Concat(wide.input_feature_schema)


@pytest.mark.parametrize(
    ("context", "always", "dropped"),
    [
        *(("training", False, True), ("eval", False, False), ("eval", True, True)),
        ("prediction", True, False),
    ],
)
def test_dropout_belongs_to_training(context: str, always: bool, dropped: bool) -> None:
    model = model_of(("x", vectors()))
    output = model.Dropout(model.input_feature_schema.x, ratio=0.9, dropout_for_eval=always)
    found = run(model, output, np.tile(X, (20, 1)), LABEL, context=context)
    assert bool((found == 0).any()) is dropped


@pytest.mark.parametrize("average", [True, False])
def test_losses(average: bool) -> None:
    model = LayerModelHelper(
        "losses",
        schema.Struct(("one", vectors(1)), ("many", vectors(3))),
        schema.Struct(
            ("value", schema.Scalar(np.float32)),
            ("bits", schema.Scalar((np.float32, (3,)))),
            ("weight", schema.Scalar(np.float32)),
        ),
    )
    given, extra = model.input_feature_schema, model.trainer_extra_schema
    squares = model.BatchMSELoss(
        schema.Struct(("label", extra.value), ("prediction", given.one), ("weight", extra.weight)),
        average_loss=average,
    )
    crosses = model.BatchSigmoidCrossEntropyLoss(
        schema.Struct(("label", extra.bits), ("prediction", given.many)), average_loss=average
    )
    one, many, value = numbers(6, 1), numbers(6, 3), numbers(6, seed=2)
    bits, weight = (numbers(6, 3, seed=3) > 0).astype("float32"), np.abs(numbers(6, seed=4))
    found = run(model, squares, one, many, value, bits, weight, context="eval")
    join = np.mean if average else np.sum
    np.testing.assert_allclose(found, join(weight * (one[:, 0] - value) ** 2 / 2), rtol=1e-5)
    p = sigmoid(many)
    wanted = -(bits * np.log(p) + (1 - bits) * np.log(1 - p)).mean(1)
    np.testing.assert_allclose(fetch(crosses), join(wanted), rtol=1e-5)


def test_softmax_loss() -> None:
    model = model_of(("x", vectors(3)), label=np.int64)
    both = model.BatchSoftmaxLoss(
        schema.Struct(
            ("label", model.trainer_extra_schema.label),
            ("prediction", model.input_feature_schema.x),
        )
    )
    x, label = numbers(6, 3), np.array([0, 2, 1, 1, 0, 2])
    softmax = run(model, both.softmax, x, label)
    e = np.exp(x)
    np.testing.assert_allclose(softmax, e / e.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(
        fetch(both.loss), -np.log(softmax[np.arange(6), label]).mean(), rtol=1e-5
    )


@pytest.mark.parametrize("reducer", ["Sum", "Mean", "Max", "Sqrt", "None", "WeightedSum"])
def test_rows_of_a_table(reducer: str) -> None:
    limit = schema.Metadata(categorical_limit=7)
    if reducer == "WeightedSum":
        column = schema.Map(schema.Scalar(np.int64, metadata=limit), np.float32)
    else:
        column = schema.List(schema.Scalar(np.int64, metadata=limit))
    model = model_of(("ids", column))
    rows = model.SparseLookup(model.input_feature_schema.ids, [2], reducer)
    lengths, ids = np.array([2, 0, 3], "int32"), np.array([6, 1, 0, 0, 3])
    scores = np.abs(numbers(5))
    given = [lengths, ids, scores] if reducer == "WeightedSum" else [lengths, ids]
    found = run(model, rows, *given, LABEL)
    table = workspace.FetchBlob("sparse_lookup/w")
    assert table.shape == (7, 2)
    picked = np.split(table[ids], [2, 2])
    nothing = np.zeros(2)
    wanted = {
        "Sum": [part.sum(0) for part in picked],
        "Mean": [part.mean(0) if len(part) else nothing for part in picked],
        "Max": [part.max(0) if len(part) else nothing for part in picked],
        "Sqrt": [part.sum(0) / np.sqrt(max(len(part), 1)) for part in picked],
        "None": table[ids],
        "WeightedSum": [
            (part * s[:, None]).sum(0)
            for part, s in zip(picked, np.split(scores, [2, 2]), strict=True)
        ],
    }
    np.testing.assert_allclose(found, np.array(wanted[reducer]), rtol=1e-5, atol=1e-7)
    with pytest.raises(AssertionError, match="reducer is Product, expected Sum, Mean, Max"):
        model.SparseLookup(model.input_feature_schema.ids, [2], "Product")


def test_sparse_rows_are_trained() -> None:
    column = schema.List(schema.Scalar(np.int64, metadata=schema.Metadata(categorical_limit=5)))
    model = model_of(("ids", column))
    logit = model.FC(model.SparseLookup(model.input_feature_schema.ids, [3], "Sum"), 1)
    model.add_loss(
        model.BatchLRLoss(
            schema.Struct(("label", model.trainer_extra_schema.label), ("logit", logit))
        )
    )
    model.output_schema = schema.Struct(("logit", logit))
    model.default_optimizer = optimizer.AdagradOptimizer(alpha=0.5, epsilon=1e-4)
    init_net, train_net = instantiator.generate_training_nets(model)
    assert "SparseAdagrad" in [op.type for op in train_net.Proto().op]
    workspace.RunNetOnce(init_net)
    schema.FeedRecord(
        train_net.input_record(),
        [np.array([1, 2], "int32"), np.array([4, 0, 1]), np.array([1, 0], "int32")],
    )
    before = workspace.FetchBlob("sparse_lookup/w")
    workspace.CreateNet(train_net)
    workspace.RunNet(train_net, 100)
    changed = (workspace.FetchBlob("sparse_lookup/w") != before).any(1)
    assert changed.tolist() == [True, True, False, False, True]
    assert fetch(model.loss[0]) < 0.05


def test_tags_choose_the_nets_of_a_layer() -> None:
    model = model_of(("x", vectors()))
    x = model.input_feature_schema.x
    with Tags([Tags.EXCLUDE_FROM_PREDICTION]), Tags("mine"):
        model.Relu(x, 1)
    Tags(Tags.TRAIN_ONLY)(model.Tanh)(x, 1)
    last = model.Sigmoid(x, 1)
    assert TagContext.current().tags == []
    model.output_schema = schema.Struct(("last", last))
    nets = [
        instantiator.generate_training_nets_forward_only(model)[1],
        instantiator.generate_eval_net(model),
        instantiator.generate_predict_net(model),
        instantiator.generate_eval_net(model, ["mine"]),
    ]
    assert [[op.type for op in net.Proto().op] for net in nets] == [
        ["Relu", "Tanh", "Sigmoid"],
        ["Relu", "Sigmoid"],
        ["Sigmoid"],
        ["Relu"],
    ]


def test_parameters_may_be_shared() -> None:
    model = model_of(("x", vectors()))
    x = model.input_feature_schema.x
    with ParameterSharing({"second": "first"}):
        one, other = model.FC(x, 3, name="first"), model.FC(x, 3, name="second")
        with pytest.raises(ValueError, match=r"first/w has the shape \[3, 4\], not \[3, 3\]"):
            model.create_param(model.params[0], [3, 3], "ConstantFill")
    assert list(map(str, model.params)) == ["first/w", "first/b"]
    found = run(model, other, X, LABEL)
    np.testing.assert_array_equal(found, fetch(one))


def test_names_of_layers() -> None:
    model = model_of(("x", vectors()))
    x = model.input_feature_schema.x
    names = [str(model.FC(x, 1)()) for _ in range(2)]
    with NameScope("part"):
        names.append(str(model.FC(x, 1)()))
    assert names == ["fc/output", "fc_auto_0/output", "part/fc/output"]
    with pytest.raises(AttributeError, match="there is no layer FullyConnected; use an operator"):
        model.FullyConnected(x, 1)


def test_layers_and_functions_of_a_script() -> None:
    class Twice(layers.ModelLayer):
        def __init__(self, model: Any, input_record: Any, name: str = "twice") -> None:
            super().__init__(model, name, input_record)
            self.output_schema = self.scalar(input_record.field_type().shape)

        def add_ops(self, net: Any) -> None:
            inputs, outputs = self.input_record.field_blobs(), self.output_schema.field_blobs()
            net.Scale(inputs, outputs, scale=2.0)

    layers.register_layer("Twice", Twice)
    with pytest.raises(AssertionError, match="the layer Twice exists already"):
        layers.register_layer("Twice", Twice)

    def halves(net: Any, inputs: Any, outputs: Any, scale: float) -> None:
        net.Scale(inputs[0](), outputs["a"](), scale=scale)
        net.Scale(inputs[0](), outputs["b"](), scale=1 - scale)

    model = model_of(("x", vectors()))
    doubled = model.Twice(model.input_feature_schema.x)
    parts = model.Functional([doubled], ["a", "b"], halves, scale=0.25)
    assert parts.a.field_type() == np.dtype((np.float32, (4,)))
    np.testing.assert_allclose(run(model, parts.b, X, LABEL), 1.5 * X, rtol=1e-6)


def test_a_parameter_needs_an_optimizer_and_a_gradient() -> None:
    model, _, _ = logistic()
    model.default_optimizer = None
    for name in model.param_to_optim:
        model.param_to_optim[name] = None
    with pytest.raises(ValueError, match=r"score/w has no optimizer; set model\.default_optimizer"):
        instantiator.generate_training_nets(model)
    model, _, _ = logistic()
    model.FC(model.input_feature_schema.x, 1, name="unused")
    with pytest.raises(ValueError, match="unused/w has no gradient"):
        instantiator.generate_training_nets(model)
    model.param_to_optim.update({"unused/w": model.NoOptim, "unused/b": model.NoOptim})
    instantiator.generate_training_nets(model)


def test_metrics_are_in_the_output_of_evaluation() -> None:
    model, logit, _ = logistic()
    model.add_metric_field("score", model.ReduceMean(logit, 1, axes=[0]))
    with pytest.raises(AssertionError, match="there is a metric score already"):
        model.add_metric_field("score", logit)
    record = instantiator.generate_eval_net(model).output_record()
    assert record.field_names() == ["probability", "score"]
