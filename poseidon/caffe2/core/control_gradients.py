"""Gradients of operators that run nets: `Do`, `If`, `While`.

Each inner net is differentiated on its own; the gradient operator runs what comes out. Where an
operator does not touch a blob, or runs no iteration, the gradient that was given passes through.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from poseidon.caffe2.core.blobs import BlobReference, CreateOperator, GradientSlice
from poseidon.caffe2.core.gradient_sums import rename, rename_inner_outputs
from poseidon.caffe2.core.gradients import IR, GradientRegistry
from poseidon.caffe2.proto.caffe2_pb2 import NetDef, OperatorDef
from poseidon.caffe2.runtime.chains import first_reads, made_by
from poseidon.caffe2.utils import GetArgumentDict, MakeArgument

SEED = "/_DO_OPERATOR_INNER_GRAD_"
"""Behind the name of an inner blob: the gradient that its `Do` is given."""
RESULT = "/_DO_OPERATOR_INNER_GRAD_COPY_"
"""Behind the name of an inner blob: the gradient that its `Do` gives."""
CARRIED = "/_WHILE_OPERATOR_GRAD_"
"""Behind the name of a blob: its gradient between two iterations of a `While`."""
ITERATION = "/_WHILE_OPERATOR_ITERATION_GRAD_"
"""Behind the name of a blob: what one iteration of a `While` adds to its gradient."""

Gradients = dict[str, str]
Given = Sequence[Any]
"""The gradients of the outputs: names, references or None."""
Result = tuple[list[OperatorDef], list[str | None]]


def _operator(
    kind: str, inputs: Iterable[str], outputs: Iterable[str], **arguments: Any
) -> OperatorDef:
    return CreateOperator(
        kind, [BlobReference(n) for n in inputs], [BlobReference(n) for n in outputs], **arguments
    )


def _zeros(like: str, name: str) -> OperatorDef:
    return _operator("ConstantFill", [like], [name], value=0.0)


def _backward(net: NetDef, given: Mapping[str, str]) -> tuple[list[OperatorDef], Gradients]:
    """Return the gradient operators of a net, and the gradient of each blob.

    Raises:
        ValueError: a gradient is sparse.
    """
    seeds = {BlobReference(blob): BlobReference(gradient) for blob, gradient in given.items()}
    operators, found = IR(net.op).GetBackwardPass(seeds)
    for blob, gradient in found.items():
        if isinstance(gradient, GradientSlice):
            raise ValueError(f"the gradient of {blob} in {net.name} is sparse; use EnsureDense")
    return operators, {str(blob): str(gradient) for blob, gradient in found.items()}


def _net_of(net: NetDef, operators: Sequence[OperatorDef]) -> NetDef:
    made = copy.deepcopy(net)
    del made.op[:], made.external_input[:], made.external_output[:]
    made.name = f"{net.name}_grad" if net.name else ""
    made.op.extend(operators)
    return made


def _gradient_of(
    op: OperatorDef, inputs: Iterable[str], outputs: Iterable[str], arguments: Mapping[str, Any]
) -> OperatorDef:
    """Return an operator of the same type and device as another one, marked as a gradient."""
    made = copy.deepcopy(op)
    del made.input[:], made.output[:], made.arg[:], made.control_input[:]
    made.name = f"{op.name}_grad" if op.name else ""
    made.input.extend(inputs)
    made.output.extend(outputs)
    made.arg.extend(MakeArgument(name, value) for name, value in arguments.items())
    made.is_gradient_op = True
    return made


def _distinct(op: OperatorDef, given: Given) -> tuple[list[OperatorDef], Gradients]:
    """Return the gradient of each output by name, each in its own blob, and the copies for that."""
    gradients: Gradients = {}
    copies = []
    for name, gradient in zip(op.output, given, strict=True):
        if gradient is None or name in gradients:
            continue
        if isinstance(gradient, GradientSlice):
            raise ValueError(f"the gradient of {name} is sparse; EnsureDense makes it dense")
        gradient = str(gradient)
        if gradient in gradients.values():
            copy = f"{name}_{gradient}_DEDUP"
            copies.append(_operator("Copy", [gradient], [copy]))
            gradient = copy
        gradients[name] = gradient
    if not gradients:
        raise ValueError(f"no output of {op.type} has a gradient")
    return copies, gradients


# Do.


def _bindings(op: OperatorDef) -> dict[str, str]:
    """Return the outside name of each inner blob of a `Do`.

    Raises:
        ValueError: an outside blob has no inner name, or two.
    """
    arguments = GetArgumentDict(op)
    outside = [*op.input[:-1], *op.output[:-1]]
    names = [name.decode() for name in arguments.get("inner_blobs", [])]
    made = {
        name: outside[index]
        for name, index in zip(names, arguments.get("outer_blobs_idx", []), strict=True)
    }
    if sorted(made.values()) != sorted(set(outside)):
        raise ValueError("Do: each outside blob must have one name in the inner net")
    return made


@GradientRegistry.RegisterGradient("Do")
def gen_do_gradient(op: OperatorDef, g_output: Given) -> Result:
    """Return the gradient operators of a `Do`, and the gradients of its inputs."""
    operators, given = _distinct(op, g_output)
    net = GetArgumentDict(op)["net"]
    outer_of = _bindings(op)
    inner_of = {outer: inner for inner, outer in outer_of.items()}
    seeds = {inner_of[name] + SEED: gradient for name, gradient in given.items()}
    inner, found = _backward(net, {inner_of[name]: inner_of[name] + SEED for name in given})

    bound: dict[str, str] = {}
    gradients: list[str | None] = []
    results: list[str] = []
    reads = set(first_reads(net.op))
    for name in op.input[:-1]:
        # A blob that is overwritten before it is read has no gradient here: what was found belongs
        # to its later value.
        gradient = found.get(inner_of[name]) if inner_of[name] in reads else None
        if gradient is None:
            gradients.append(None)
            continue
        copy = inner_of[name] + RESULT
        inner.append(_operator("Copy", [gradient], [copy]))
        bound[copy] = f"{name}_grad"
        results.append(f"{name}_grad")
        gradients.append(f"{name}_grad")
    if not results:
        return [], []
    saved = []
    for blob in first_reads(inner):
        if blob in outer_of or blob in seeds:
            bound[blob] = outer_of.get(blob) or seeds[blob]
        else:
            saved.append(blob)
    inputs = list(dict.fromkeys(bound[blob] for blob in bound if not blob.endswith(RESULT)))
    outside = [*inputs, *results]
    workspaces = op.output[-1]
    arguments: dict[str, Any] = {
        "net": _net_of(net, inner),
        "inner_blobs": list(bound),
        "outer_blobs_idx": [outside.index(name) for name in bound.values()],
    }
    if saved:
        arguments["saved_fwd_blobs"] = saved
    operators.append(_gradient_of(op, [*inputs, workspaces], [*results, workspaces], arguments))
    return operators, gradients


# If.


@GradientRegistry.RegisterGradient("If")
def gen_if_gradient(op: OperatorDef, g_output: Given) -> Result:
    """Return the gradient operators of an `If`, and the gradients of its inputs.

    Raises:
        ValueError: the branches give a blob gradients of different names.
    """
    operators, given = _distinct(op, g_output)
    arguments = GetArgumentDict(op)
    nets = {name: arguments[name] for name in ("then_net", "else_net") if name in arguments}
    branches = {name: _backward(net, given) for name, net in nets.items()}
    branches.setdefault("else_net", ([], dict(given)))
    made: dict[str, dict[str, str]] = {
        name: {blob: gradient for blob, gradient in found.items() if gradient in set(made_by(ops))}
        for name, (ops, found) in branches.items()
    }
    gradients: Gradients = dict(given)
    for of_branch in made.values():
        for blob, gradient in of_branch.items():
            if blob in gradients and gradients[blob] not in (gradient, given.get(blob)):
                raise ValueError(f"the branches of an If give {blob} two gradients")
            gradients[blob] = gradient
    wanted = set(op.input) & {blob for of_branch in made.values() for blob in of_branch}
    for name, (ops, _) in branches.items():
        for blob in sorted(wanted - set(made[name])):
            # This branch does not use the blob: what was given passes where the blob stays, else it
            # is zero.
            stays = name not in nets or blob not in made_by(nets[name].op)
            if blob not in given or not stays:
                ops.append(_zeros(blob, gradients[blob]))
            elif given[blob] != gradients[blob]:
                ops.append(_operator("Copy", [given[blob]], [gradients[blob]]))
    every = [part for ops, _ in branches.values() for part in ops]
    reads = [name for ops, _ in branches.values() for name in first_reads(ops)]
    outputs = made_by(every)
    inner: dict[str, NetDef] = {
        str(name): _net_of(nets.get(name, nets["then_net"]), ops)
        for name, (ops, _) in branches.items()
        if ops
    }
    if not outputs:
        return [], [None] * len(op.input)
    inner.setdefault("then_net", _net_of(nets["then_net"], []))
    if "else_net" in inner and "else_net" not in nets:
        inner["else_net"].name += "_else"
    inputs = list(dict.fromkeys([op.input[0], *reads]))
    operators.append(_gradient_of(op, inputs, outputs, inner))
    return operators, [gradients[name] if name in wanted else None for name in op.input]


# While.


@GradientRegistry.RegisterGradient("While")
def gen_while_gradient(op: OperatorDef, g_output: Given) -> Result:
    """Return the gradient operators of a `While`, and the gradients of its inputs.

    The gradient loop runs as often as the loop did: while there are workspaces of its iterations.
    The gradient of a blob that the loop changes passes from iteration to iteration; the gradients
    of blobs that it only reads are summed.

    Raises:
        ValueError: the loop is not a single `Do` that keeps its workspaces.
    """
    copies, given = _distinct(op, g_output)
    net = GetArgumentDict(op)["loop_net"]
    if [part.type for part in net.op] != ["Do"] or GetArgumentDict(net.op[0]).get(
        "reuse_workspace"
    ):
        raise ValueError("the loop of a While must be one Do that keeps its workspaces")
    body = net.op[0]
    workspaces = body.output[-1]
    inner, found, changed = _iteration(net, given)
    inner = _renamed_results(inner, found)
    begin, end = copies, []
    for name in changed:
        seed = name + CARRIED
        copied = _operator("Copy", [given[name]], [seed]) if name in given else _zeros(name, seed)
        begin.append(copied)
        end.append(
            _operator("Copy", [name + ITERATION], [seed])
            if found.get(name, seed) != seed
            else _zeros(seed, seed)
        )
    constant = [name for name in body.input[:-1] if name in found and name not in body.output]
    for name in constant:
        begin.append(_zeros(name, name + CARRIED))
        end.append(_operator("Sum", [name + CARRIED, name + ITERATION], [name + CARRIED]))
    condition = f"{workspaces}/gradient_cond"
    test = _operator("HasScope", [workspaces], [condition])
    begin.append(test)
    nets = {
        "loop_net": _net_of(net, [*inner, *end]),
        "cond_net": NetDef(name=f"{net.name}_grad_cond", op=[test]),
    }
    inputs = dict.fromkeys([condition, *first_reads([*inner, *end]), workspaces])
    outputs = dict.fromkeys([*made_by([*inner, *end]), condition])
    loop = _gradient_of(op, inputs, outputs, nets)
    gradients = {name: f"{name}_grad" for name in [*changed, *constant] if name in op.input}
    after = [_operator("Copy", [name + CARRIED], [grad]) for name, grad in gradients.items()]
    for part in (*begin, *after):
        if op.HasField("device_option"):
            part.device_option.CopyFrom(op.device_option)
    return [*begin, loop, *after], [gradients.get(name) for name in op.input]


def _iteration(net: NetDef, given: Gradients) -> tuple[list[OperatorDef], Gradients, list[str]]:
    """Return one iteration's gradient operators, gradients, and blobs whose gradients carry over.

    These have a given gradient, or an iteration changes them and a later one uses them.
    """
    body = net.op[0]
    changed = list(given)
    while True:
        inner, found = _backward(net, {name: name + CARRIED for name in changed})
        more = [
            name
            for name in body.input[:-1]
            if name in body.output and name in found and name not in changed
        ]
        if not more:
            return inner, found, changed
        changed += more


def _renamed_results(operators: list[OperatorDef], found: Gradients) -> list[OperatorDef]:
    """Give the gradients of the loop's own blobs names that nothing outside has."""
    names = {
        gradient: blob + ITERATION
        for blob, gradient in found.items()
        if gradient in made_by(operators) and gradient == f"{blob}_grad"
    }
    for op in operators:
        rename(op.input, names)
        rename(op.output, names)
    return operators


def disambiguate_grad_if_op_output(grad_op: OperatorDef, idx: int, new_grad_output: str) -> None:
    """Rename an output of an `If`, in its branches too."""
    rename_inner_outputs(grad_op, grad_op.output[idx], new_grad_output)
    grad_op.output[idx] = new_grad_output
