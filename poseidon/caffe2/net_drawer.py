"""Drawings of nets with Graphviz, through pydot.

python -m poseidon.caffe2.net_drawer --input=predict_net.pbtxt [--output_prefix=drawn_] [--minimal]
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pydot
from google.protobuf.message import DecodeError

from poseidon.base.text_files import visible_line
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.utils import ArgsToDict, GetContentFromProtoString

log = logging.getLogger(__name__)

OP_STYLE: dict[str, Any] = {
    "shape": "box",
    "color": "#0F9D58",
    "style": "filled",
    "fontcolor": "#FFFFFF",
}
BLOB_STYLE: dict[str, Any] = {"shape": "octagon"}


def _escape_label(name: str) -> str:
    """Return a text as Graphviz takes it: quoted, with line ends written out."""
    quoted = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{quoted}"'


def _operators(operators_or_net: Any, name: str | None) -> tuple[list[Any], str]:
    if isinstance(operators_or_net, caffe2_pb2.NetDef):
        return list(operators_or_net.op), name or operators_or_net.name
    if hasattr(operators_or_net, "Proto"):
        return _operators(operators_or_net.Proto(), name)
    return list(operators_or_net), name or "unnamed"


def GetOpNodeProducer(append_output: bool, **kwargs: Any) -> Callable[[Any, int], Any]:
    """Return `(operator, index)` that makes an operator's node; kwargs go to Graphviz."""

    def produce(op: Any, op_id: int) -> Any:
        parts = [op.name or op.type]
        parts.append(f"(#{op_id}, {op.type})" if op.name else f"(#{op_id})")
        label = " ".join(parts)
        if append_output:
            label += "".join(f"\n{output}" for output in op.output)
        return pydot.Node(_escape_label(label), **(kwargs or OP_STYLE))

    return produce


def GetPydotGraph(
    operators_or_net: Any,
    name: str | None = None,
    rankdir: str = "LR",
    op_node_producer: Callable[[Any, int], Any] | None = None,
) -> Any:
    """Return a graph of operators and blobs; a blob that is written again is a node of its own.

    Args:
        operators_or_net: operators, a net or a NetDef.
        name: of the graph.
        rankdir: its direction, Graphviz's `LR`, `TB`, `RL` or `BT`.
        op_node_producer: makes the node of an operator.
    """
    operators, name = _operators(operators_or_net, name)
    graph = pydot.Dot(_escape_label(name), rankdir=rankdir)
    produce = op_node_producer or GetOpNodeProducer(False, **OP_STYLE)
    versions: defaultdict[str, int] = defaultdict(int)
    nodes: dict[tuple[str, int], Any] = {}

    def blob(blob_name: str) -> Any:
        key = blob_name, versions[blob_name]
        if key not in nodes:
            nodes[key] = pydot.Node(
                _escape_label(f"{blob_name}_{key[1]}"), label=_escape_label(blob_name), **BLOB_STYLE
            )
            graph.add_node(nodes[key])
        return nodes[key]

    for index, op in enumerate(operators):
        node = produce(op, index)
        graph.add_node(node)
        for read in op.input:
            graph.add_edge(pydot.Edge(blob(read), node))
        for made in op.output:
            if (made, versions[made]) in nodes:
                versions[made] += 1
            graph.add_edge(pydot.Edge(node, blob(made)))
    return graph


def GetPydotGraphMinimal(
    operators_or_net: Any,
    name: str | None = None,
    rankdir: str = "LR",
    minimal_dependency: bool = False,
    op_node_producer: Callable[[Any, int], Any] | None = None,
) -> Any:
    """Return a graph of operators only, with edges from a blob's maker to its readers.

    Args:
        operators_or_net, name, rankdir, op_node_producer: see `GetPydotGraph`.
        minimal_dependency: whether edges that follow from others are left out.
    """
    operators, name = _operators(operators_or_net, name)
    graph = pydot.Dot(_escape_label(name), rankdir=rankdir)
    produce = op_node_producer or GetOpNodeProducer(True, **OP_STYLE)
    maker: dict[str, int] = {}
    above: list[set[int]] = []
    nodes = []
    for index, op in enumerate(operators):
        nodes.append(produce(op, index))
        graph.add_node(nodes[-1])
        before = {maker[read] for read in op.input if read in maker}
        covered = set().union(*(above[earlier] for earlier in before)) if before else set()
        for earlier in sorted(before - covered if minimal_dependency else before):
            graph.add_edge(pydot.Edge(nodes[earlier], nodes[index]))
        above.append(before | covered)
        maker.update(dict.fromkeys(op.output, index))
    return graph


def GetOperatorMapForPlan(plan_def: Any) -> dict[str, list[Any]]:
    """Return the operators of a plan's nets by plan and net; a nameless net has a number."""
    return {
        f"{plan_def.name}_{net.name or f'network_{number}'}": list(net.op)
        for number, net in enumerate(plan_def.network)
    }


def GetPlanGraph(plan_def: Any, name: str | None = None, rankdir: str = "TB") -> Any:
    """Return a graph of the nets of a plan, in the order in which its steps run them."""
    graph = pydot.Dot(_escape_label(name or plan_def.name), rankdir=rankdir)
    previous = None
    for net in _nets_in_order(plan_def.execution_step):
        node = pydot.Node(_escape_label(net), **OP_STYLE)
        graph.add_node(node)
        if previous is not None:
            graph.add_edge(pydot.Edge(previous, node))
        previous = node
    return graph


def _nets_in_order(steps: Iterable[Any]) -> Iterable[str]:
    for step in steps:
        yield from step.network
        yield from _nets_in_order(step.substep)


def GetGraphInJson(operators_or_net: Any, output_filepath: str) -> None:
    """Write operators and blobs of a net as JSON: nodes, and edges by their indices."""
    operators, _ = _operators(operators_or_net, None)
    nodes: list[dict[str, Any]] = []
    edges: list[dict[str, int]] = []
    blobs: dict[str, int] = {}

    def blob(name: str) -> int:
        if name not in blobs:
            blobs[name] = len(nodes)
            nodes.append({"id": len(nodes), "label": name})
        return blobs[name]

    for op in operators:
        index = len(nodes)
        arguments = {key: str(value) for key, value in ArgsToDict(op.arg).items()}
        nodes.append({"id": index, "label": op.type, "args": arguments})
        edges += [{"source": blob(name), "target": index} for name in op.input]
        edges += [{"source": index, "target": blob(name)} for name in op.output]
    with open(output_filepath, "w", encoding="utf-8") as file:
        json.dump({"nodes": nodes, "edges": edges}, file)


def GetGraphPngSafe(func: Callable[..., Any], *args: Any, **kwargs: Any) -> bytes | None:
    """Return a graph's picture as PNG; None, with a log line, where it cannot be drawn."""
    try:
        graph = func(*args, **kwargs)
        return bytes(graph.create_png())
    except Exception as error:  # noqa: BLE001 (Graphviz may be absent, or refuse the graph, in many ways)
        log.error("Failed to draw graph: %s", error)
        return None


def _nets_of_plan(plan: Any) -> dict[str, list[Any]]:
    """Return the operators of a plan's nets; ValueError if none, as of a NetDef's bytes."""
    operators = [op for net in plan.network for op in net.op]
    if not operators or not all(op.type for op in operators):
        raise ValueError("this is not a plan")
    return GetOperatorMapForPlan(plan)


def main(arguments: list[str] | None = None) -> int:
    """Draw the nets of a NetDef or PlanDef as `.dot` and `.pdf`; return the exit code.

    Args:
        arguments: by default the command line's.
    """
    parser = argparse.ArgumentParser(description="Caffe2 net drawer.")
    parser.add_argument("--input", required=True, help="the file of the NetDef or PlanDef")
    parser.add_argument("--output_prefix", default="", help="put before the names of the files")
    parser.add_argument("--minimal", action="store_true", help="draw operators only")
    parser.add_argument(
        "--minimal_dependency",
        action="store_true",
        help="with --minimal: leave out edges that follow from others",
    )
    parser.add_argument(
        "--append_output", action="store_true", help="with --minimal: name the outputs of operators"
    )
    parser.add_argument("--rankdir", default="LR", help="direction: LR, TB, RL or BT")
    given = parser.parse_args(arguments)
    kinds = {
        caffe2_pb2.PlanDef: _nets_of_plan,
        caffe2_pb2.NetDef: lambda net: {net.name or "net": list(net.op)},
    }
    try:
        graphs = GetContentFromProtoString(Path(given.input).read_bytes(), kinds)
    except (OSError, DecodeError, RecursionError) as error:
        sentence = f"{given.input} cannot be read as a NetDef or a PlanDef: {error}"
        print(visible_line(sentence), file=sys.stderr)
        return 1
    for name, operators in graphs.items():
        options: dict[str, Any] = {"name": name, "rankdir": given.rankdir}
        if given.minimal:
            producer = GetOpNodeProducer(given.append_output, **OP_STYLE)
            graph = GetPydotGraphMinimal(
                operators,
                minimal_dependency=given.minimal_dependency,
                op_node_producer=producer,
                **options,
            )
        else:
            graph = GetPydotGraph(operators, **options)
        path = Path(f"{given.output_prefix}{name.replace('/', '_')}.dot")
        graph.write(str(path), format="raw")
        print(visible_line(f"Wrote {path}"))
        try:
            graph.write_pdf(str(path.with_suffix(".pdf")))
            print(visible_line(f"Wrote {path.with_suffix('.pdf')}"))
        except Exception as error:  # noqa: BLE001 (Graphviz may be absent, or refuse the graph, in many ways)
            sentence = f"No PDF of {name}: Graphviz's dot draws it, and says {error}"
            print(visible_line(sentence), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
