"""Hierarchical softmax: losses against full paths, gradients, the search and Huffman trees."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.caffe2 import hsm_util
from poseidon.caffe2.proto.hsm_pb2 import TreeProto
from tests.support.caffe2_operators import Array, assert_gradients, numbers, run

LEFT = hsm_util.create_node_with_words([0, 1, 2], "left")
RIGHT = hsm_util.create_node_with_words([3, 4], "right")
TREE = TreeProto(root_node=hsm_util.create_node_with_nodes([LEFT, RIGHT], "root"))
HIERARCHY = hsm_util.create_hierarchy(TREE)
X, W, B = numbers(4, 3), numbers(7, 3, seed=1), numbers(7, seed=2)
LABELS = np.array([1, 4, 0, 4], "i4")


def chances(rows: slice) -> Array:
    scores = np.exp(X @ W[rows].T + B[rows])
    return scores / scores.sum(1, keepdims=True)


def leaves() -> Array:
    """Return the probability of each word for each example."""
    inner = chances(slice(0, 2))
    return np.hstack([inner[:, :1] * chances(slice(2, 5)), inner[:, 1:] * chances(slice(5, 7))])


def test_rows_are_numbered_depth_first() -> None:
    assert HIERARCHY.size == 7
    assert [child.offset for child in TREE.root_node.children] == [2, 5]
    steps = {
        path.word_id: [(n.index, n.length, n.target) for n in path.path_nodes]
        for path in HIERARCHY.paths
    }
    assert steps[4] == [(0, 2, 1), (5, 2, 1)]


def test_the_loss_is_that_of_the_path() -> None:
    loss, kept = run("HSoftmax", [X, W, B, LABELS], 2, hierarchy=HIERARCHY.SerializeToString())
    np.testing.assert_allclose(loss, -np.log(leaves()[range(4), LABELS]), rtol=1e-4)
    assert len(kept) == 2 * ((2 + 3) + (2 + 2) + (2 + 3) + (2 + 2))
    arguments = {"hierarchy": HIERARCHY.SerializeToString()}
    assert_gradients("HSoftmax", [X, W, B, LABELS], [0, 1, 2], 2, **arguments)


def test_a_label_outside_the_tree_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"no path for the labels \[9\]"):
        inputs = [X[:1], W, B, np.array([9], "i4")]
        run("HSoftmax", inputs, 2, hierarchy=HIERARCHY.SerializeToString())


def test_the_search_finds_the_likeliest() -> None:
    names, scores = run(
        "HSoftmaxSearch", [X, W, B], 2, tree=TREE.SerializeToString(), beam=50.0, topN=9
    )
    wanted = {"left": chances(slice(0, 2))[:, 0], "right": chances(slice(0, 2))[:, 1]}
    wanted |= {str(word): leaves()[:, word] for word in range(5)}
    for example in range(4):
        found = [
            (name.decode(), score)
            for name, score in zip(names[example], scores[example], strict=True)
        ]
        assert found[7:] == [("", 0), ("", 0)]
        assert [score for _, score in found[:7]] == sorted(score for _, score in found[:7])
        for name, score in found[:7]:
            np.testing.assert_allclose(score, -np.log(wanted[name][example]), rtol=1e-4)


def test_a_narrow_beam_drops_what_costs_more() -> None:
    names, scores = run("HSoftmaxSearch", [X, W, B], 2, tree=TREE.SerializeToString(), beam=1e-6)
    assert (names == b"").all()
    assert not scores.any()


def test_rare_words_are_deep_in_a_huffman_tree() -> None:
    labels = np.repeat(np.arange(4), [1, 2, 4, 8])
    (text,) = run("HuffmanTreeHierarchy", [labels], num_classes=4)
    hierarchy = hsm_util.create_hierarchy(TreeProto.FromString(text[0]))
    found = {path.word_id: len(path.path_nodes) for path in hierarchy.paths}
    assert found == {0: 3, 1: 3, 2: 2, 3: 1}
    assert hierarchy.size == 6
