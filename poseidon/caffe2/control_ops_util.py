"""The operators `If` and `While` around given nets: which of their blobs are local.

A blob of an inner net is an outside one where its name is in the lexical scope, the names that the
operator's surroundings have, or where an operator reads it before the net makes it. All others are
in the workspace of the inner net, an object in a blob of the outer net, where gradients find them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from poseidon.caffe2 import core


@dataclass
class _Body:
    """An inner net, its outside blobs, and the blob of its workspace."""

    net: core.Net
    reads: list[str]
    writes: list[str]
    workspace: core.BlobReference

    def do_net(self, name: str, **arguments: Any) -> core.Net:
        """Return a net of one operator, `Do`, that runs the inner net in its workspace."""
        outside = [*self.reads, *self.writes]
        names = list(dict.fromkeys(outside))
        outputs = [*_references(self.writes), self.workspace]
        net = core.Net(name)
        net.Do(
            [*_references(self.reads), self.workspace],
            outputs,
            net=self.net.Proto(),
            inner_blobs=names,
            outer_blobs_idx=[outside.index(blob) for blob in names],
            **arguments,
        )
        net.AddExternalOutput(*outputs)
        return net


def _references(names: Iterable[str]) -> list[core.BlobReference]:
    return [core.BlobReference(name) for name in names]


def get_external_blob_names(
    net: core.Net, lexical_scope: Iterable[Any]
) -> tuple[set[str], set[str]]:
    """Return the outside blobs that a net reads, and those that it writes.

    Raises:
        AssertionError: it reads a blob that is neither its own nor in the lexical scope.
    """
    outside = {str(name) for name in lexical_scope}
    ssa, _ = core.get_ssa(net.Proto())
    reads = core.get_undefined_blobs(ssa)
    for name in sorted(reads):
        assert name in outside, f"Input blob {name} is undefined"
    return reads, {name for op in net.Proto().op for name in op.output if name in outside}


def _body(outer: core.Net, net: core.Net, scope: Iterable[Any], suffix: str) -> _Body:
    reads, writes = get_external_blob_names(net, scope)
    workspace = outer.NextScopedBlob(f"{outer.Name()}/workspace_{suffix}")
    return _Body(net, sorted(reads), sorted(writes), workspace)


def _union(*parts: Iterable[str]) -> list[str]:
    return sorted({name for part in parts for name in part})


def add_if_op(
    if_net: core.Net,
    cond_blob: Any,
    lexical_scope: Iterable[Any],
    then_net: core.Net,
    else_net: Any = None,
) -> None:
    """Add an operator `If` to a net.

    Args:
        if_net: the net.
        cond_blob: one boolean.
        lexical_scope: the names of the blobs that exist outside.
        then_net, else_net: what runs where it is true, and where it is false.
    """
    scope = list(lexical_scope)
    bodies = {"then_net": _body(if_net, then_net, scope, "if_then")}
    if else_net is not None:
        bodies["else_net"] = _body(if_net, else_net, scope, "if_else")
    workspaces = [body.workspace for body in bodies.values()]
    nets = {name: body.do_net(f"do_{name}").Proto() for name, body in bodies.items()}
    outputs = [*_references(_union(*(body.writes for body in bodies.values()))), *workspaces]
    for workspace in workspaces:
        if_net.CreateScope([], [workspace])
    reads = _references(_union(*(body.reads for body in bodies.values())))
    if_net.If([cond_blob, *reads, *workspaces], outputs, **nets)
    if_net.AddExternalOutput(*outputs)


def add_while_op(
    while_net: core.Net,
    cond_blob: Any,
    lexical_scope: Iterable[Any],
    loop_body_net: core.Net,
    condition_body_net: core.Net | None = None,
) -> None:
    """Add an operator `While` to a net.

    Args:
        while_net: the net.
        cond_blob: one boolean; the loop ends where it is false.
        lexical_scope: the names of the blobs that exist outside.
        loop_body_net: what runs in each iteration.
        condition_body_net: what sets the boolean, before the first iteration and after each.

    Raises:
        AssertionError: the condition net does not write the boolean.
    """
    scope = list(lexical_scope)
    body = _body(while_net, loop_body_net, scope, "loop_body")
    # The loop may run no iteration: what it writes must exist before.
    body.reads = _union(body.reads, body.writes)
    bodies = [body]
    nets = {"loop_net": body.do_net("do_loop_body_net", copy_external_blobs=True).Proto()}
    if condition_body_net is not None:
        condition = _body(while_net, condition_body_net, scope, "loop_cond")
        assert any(str(cond_blob) in op.output for op in condition_body_net.Proto().op), (
            "Condition net does not write into condition blob"
        )
        condition.writes = _union(condition.writes, [str(cond_blob)])
        bodies.append(condition)
        nets["cond_net"] = condition.do_net("do_loop_condition_net").Proto()
        if str(cond_blob) not in map(str, scope):
            while_net.ConstantFill([], cond_blob, dtype=core.DataType.BOOL, value=False)
    workspaces = [part.workspace for part in bodies]
    for workspace in workspaces:
        while_net.CreateScope([], [workspace])
    inputs = [*_references(_union(*(part.reads for part in bodies))), *workspaces]
    outputs = [*_references(_union(*(part.writes for part in bodies))), *workspaces]
    while_net.While([cond_blob, *inputs], outputs, **nets)
    while_net.AddExternalOutput(*outputs)
