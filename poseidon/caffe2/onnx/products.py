"""Products of matrices, reductions and rankings."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2.onnx.nodes import Node, converts


@converts("MatMul")
def _matmul(node: Node) -> None:
    ranks = [len(node.facts.shapes.get(name, "..")) for name in node.inputs]
    if ranks == [1, 1]:
        node.emit("ReduceSum", [node.step("Mul", node.inputs)], axes=[0], keepdims=0)
    else:
        node.emit("BatchMatMul", broadcast=1)


@converts("Gemm")
def _gemm(node: Node) -> None:
    alpha, beta = float(node.get("alpha", 1.0)), float(node.get("beta", 1.0))
    transposed_a, transposed_b = int(node.get("transA", 0)), int(node.get("transB", 0))
    bias = node.facts.shapes.get(node.inputs[2]) if 2 in node else None
    width = (node.facts.shapes.get(node.inputs[1]) or [None, None])[0 if transposed_b else 1]
    if alpha == beta == 1 and not transposed_a and bias is not None and bias == [width]:
        node.emit("FC" if transposed_b else "FCTransposed")
        return
    factors: dict[str, Any] = {"trans_a": transposed_a, "trans_b": transposed_b}
    if 2 not in node and alpha == 1:
        node.emit("MatMul", node.inputs[:2], **factors)
        return
    value = node.step("MatMul", node.inputs[:2], **factors)
    if 2 not in node:
        node.emit("Scale", [value], scale=alpha)
        return
    value = value if alpha == 1 else node.step("Scale", [value], scale=alpha)
    added = node.inputs[2] if beta == 1 else node.step("Scale", [node.inputs[2]], scale=beta)
    node.emit("Add", [value, added])


@converts("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2")
@converts("ReduceSumSquare", "ReduceLogSum")
def _reduce(node: Node) -> None:
    axes, keep = node.setting("axes", 1), int(node.get("keepdims", 1))
    if not axes and node.get("noop_with_empty_axes"):
        node.emit("Copy", node.inputs[:1])
    elif node.kind == "ReduceSumSquare":
        node.emit("ReduceSum", [node.step("Sqr", node.inputs[:1])], axes=axes, keepdims=keep)
    elif node.kind == "ReduceLogSum":
        node.emit("Log", [node.step("ReduceSum", node.inputs[:1], axes=axes, keepdims=keep)])
    else:
        node.emit(node.kind, node.inputs[:1], axes=axes, keepdims=keep)


@converts("ArgMax", "ArgMin")
def _arg_extreme(node: Node) -> None:
    node.allow(select_last_index=0)
    node.emit(node.kind, axis=node.axis(0), keepdims=int(node.get("keepdims", 1)))


@converts("TopK")
def _top_k(node: Node) -> None:
    node.allow(largest=1)
    count = node.setting("k", 1)
    count = count[0] if isinstance(count, list) else count
    node.emit("TopK", node.inputs[:1], node.outputs, k=int(count), axis=node.axis(-1))
