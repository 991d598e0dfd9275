"""Orders of operators, and sharing by an order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import brew, core, memonger, model_helper, workspace


def net_of(*operators: tuple[str, str]) -> Any:
    net = core.Net("order")
    for read, made in operators:
        net.Copy(read, made) if " " not in read else net.Add(read.split(), made)
    return net.Proto().op


def test_the_graph_of_operators_in_place() -> None:
    graph = memonger.compute_interference_graph(net_of(("b", "b"), ("b", "b"), ("b", "b")))
    assert graph.edges() == [(0, 1), (0, 2), (1, 2)]
    assert graph.successors(0) == [1, 2] and graph.predecessors(2) == [0, 1]
    assert graph.deps(0, 2) == {"b"} and len(graph) == 3 and graph.nodes[1]["op"].type == "Copy"


@pytest.mark.parametrize(
    ("operators", "last_first", "longest_first"),
    [
        ([("a", "b")], [0], [0]),
        ([("w", "v"), ("data v", "c"), ("u", "u"), ("c u", "d")], [2, 0, 1, 3], [0, 1, 2, 3]),
        (
            [("w", "v"), ("data v", "c"), ("u", "u"), ("c u", "d"), ("e", "f"), ("f", "g")],
            [4, 5, 2, 0, 1, 3],
            [0, 1, 2, 3, 4, 5],
        ),
    ],
)
def test_orders(operators: Any, last_first: list[int], longest_first: list[int]) -> None:
    graph = memonger.compute_interference_graph(net_of(*operators))
    assert memonger.topological_sort_traversal(graph) == last_first
    assert memonger.topological_sort_traversal_longest_path(graph) == longest_first


@pytest.mark.parametrize("algorithm", list(memonger.AssignmentAlgorithm))
@pytest.mark.parametrize(
    "order", [memonger.topological_sort_traversal, memonger.topological_sort_traversal_longest_path]
)
def test_results_stay_and_memory_falls(algorithm: Any, order: Any) -> None:
    workspace.ResetWorkspace()
    model = model_helper.ModelHelper(name="m")
    blob: Any = "data"
    for layer in range(1, 4):
        blob = brew.fc(model, blob, f"fc{layer}", 5, 5)
    soft = blob.Relu([], blob).Softmax([], "pred")
    soft.LabelCrossEntropy(["label"], ["xent"]).AveragedLoss([], "loss")
    gradient = str(model.AddGradientOperators(["loss"])["fc1_w"])
    static = [name for op in model.param_init_net.Proto().op for name in op.output]
    static += ["data", "label", "loss", gradient]
    workspace.RunNetOnce(model.param_init_net)
    workspace.FeedBlob("data", np.random.RandomState(0).randn(3, 5).astype(np.float32))
    workspace.FeedBlob("label", np.int32([0, 1, 4]))
    workspace.RunNetOnce(model.net)
    expected = [workspace.FetchBlob(name).tolist() for name in ("loss", gradient)]
    for sizes in (None, memonger.collect_blob_sizes(model.Proto())):
        found = memonger.optimize_interference(model.Proto(), static, order, sizes, algorithm)
        workspace.ResetBlob(gradient)
        workspace.RunNetOnce(found.net)
        assert [workspace.FetchBlob(name).tolist() for name in ("loss", gradient)] == expected
        statistics = memonger.compute_statistics(found.assignments)
        assert statistics.optimized_nbytes < statistics.baseline_nbytes
        assert not set(found.blob_assignments).intersection(static)
