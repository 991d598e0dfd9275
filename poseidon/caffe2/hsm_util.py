"""Trees for hierarchical softmax, and their paths: the argument `hierarchy` of `HSoftmax`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from poseidon.caffe2.proto.hsm_pb2 import HierarchyProto, NodeProto, TreeProto


def create_node_with_words(words: Iterable[int], name: str = "node") -> NodeProto:
    """Return a node whose children are words."""
    return NodeProto(name=name, word_ids=words)


def create_node_with_nodes(nodes: Iterable[NodeProto], name: str = "node") -> NodeProto:
    """Return a node whose children are copies of nodes."""
    return NodeProto(name=name, children=nodes)


def create_hierarchy(tree_proto: TreeProto) -> HierarchyProto:
    """Return the path of each word of a tree; the offsets of the tree's nodes are set."""
    hierarchy = HierarchyProto()
    _walk(tree_proto.root_node, [], hierarchy)
    return hierarchy


def _walk(
    node: NodeProto, above: Sequence[tuple[int, int, int]], hierarchy: HierarchyProto
) -> None:
    """Set offsets below a node, depth first; `above` has index, length and target of each step."""
    length = len(node.children) + len(node.word_ids)
    node.offset = hierarchy.size
    hierarchy.size += length
    for target, child in enumerate(node.children):
        _walk(child, [*above, (node.offset, length, target)], hierarchy)
    for target, word in enumerate(node.word_ids, len(node.children)):
        path = hierarchy.paths.add(word_id=word)
        for index, size, taken in [*above, (node.offset, length, target)]:
            path.path_nodes.add(index=index, length=size, target=taken)
