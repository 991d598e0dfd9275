"""Recurrent networks from a net for one step; `rnn_cell` has common ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from poseidon.caffe2 import core


def recurrent_net(
    net: Any,
    cell_net: Any,
    inputs: Sequence[tuple[Any, Any]],
    initial_cell_inputs: Sequence[tuple[Any, Any]],
    links: Mapping[Any, Any],
    timestep: Any = None,
    scope: str | None = None,
    outputs_with_grads: Sequence[int] = (0,),
    recompute_blobs_on_backward: Sequence[Any] | None = None,
    forward_only: bool = False,
) -> tuple[Any, ...]:
    """Add a RecurrentNetwork, which runs a net for each step of a sequence.

    Args:
        net: the net that gets the operator.
        cell_net: the net of one step.
        inputs: one pair: the step net's input, and the sequence, of shape (T, N, ...).
        initial_cell_inputs: for each state the step net's input, and the blob with the first value, of shape (1, N, D),
            (N, D) or (D,).
        links: for each input that is a state the output that is its next value.
        timestep: the step net's input that gets the number of the step, by default `timestep`.
        scope: what the names of the states begin with.
        outputs_with_grads: the outputs from which gradients come.
        recompute_blobs_on_backward: kept for Caffe2's scripts: the backward pass reads what the forward pass has made.
        forward_only: whether it is never differentiated.

    Returns:
        for each state the blobs of all values, (T, N, D), and of the last, (1, N, D).
    """
    assert len(inputs) == 1, "Only one input blob is supported so far"
    prefix = net.NextName("recurrent") if scope is None else scope
    step, clock = cell_net.Proto(), "timestep" if timestep is None else str(timestep)
    fed = {str(inner) for inner, _ in (*inputs, *initial_cell_inputs)}
    known = fed | {str(outer) for _, outer in (*inputs, *initial_cell_inputs)} | {clock}
    references = [core.BlobReference(name) for name in step.external_input if name not in known]
    all_inputs = [outer for _, outer in (*inputs, *initial_cell_inputs)] + references
    forward_links, aliases, states = [], [], []
    for inner, _ in initial_cell_inputs:
        state, made = f"{prefix}/{inner}_states", str(links[inner])
        states.append(state)
        forward_links += [(str(inner), state, 0), (made, state, 1)]
        aliases += [(state, f"{made}_all", 1), (state, f"{made}_last", -1)]
    forward_links += [(str(inner), str(outer), 0) for inner, outer in inputs]
    step.type = "simple"
    arguments = _lists("link_", ("internal", "external", "offset"), forward_links)
    arguments |= _lists("alias_", ("src", "dst", "offset"), aliases)
    if not forward_only:
        arguments |= _backward(cell_net, inputs, initial_cell_inputs, links, prefix, references, all_inputs)
        arguments["outputs_with_grads"] = list(outputs_with_grads)
    results = net.RecurrentNetwork(
        all_inputs,
        [alias for _, alias, _ in aliases] + [f"{prefix}/step_workspaces"],
        recurrent_states=states,
        initial_recurrent_state_ids=[all_inputs.index(outer) for _, outer in initial_cell_inputs],
        step_net=step,
        timestep=clock,
        **arguments,
    )
    return tuple(results[:-1])


def _lists(prefix: str, names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    """Return the columns of a table as arguments."""
    return {prefix + name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def _backward(
    cell_net: Any,
    inputs: Sequence[tuple[Any, Any]],
    initial: Sequence[tuple[Any, Any]],
    links: Mapping[Any, Any],
    prefix: str,
    references: Sequence[Any],
    all_inputs: Sequence[Any],
) -> dict[str, Any]:
    """Return the arguments of the backward pass: its net for one step, its links, and the gradients of parameters."""
    step = cell_net.Proto()
    read_inside = {name for op in step.op for name in op.input}
    given = {
        name: f"{name}_grad_given"
        if name in read_inside
        else f"{name}_grad"  # the sum with others is `_grad`
        for name in dict.fromkeys([*map(str, links.values()), *step.external_output])
    }
    operators, gradients = core.GradientRegistry.GetBackwardPass(step.op, given)
    found = {str(name): str(gradient) for name, gradient in gradients.items()}
    net = core.Net("RecurrentBackwardStep")
    net.Proto().op.extend(operators)
    net.Proto().type = "simple"
    made = {name for op in operators for name in op.output}
    read = [name for op in operators for name in op.input]
    net.Proto().external_input.extend(
        dict.fromkeys(name for name in (*read, *given.values()) if name not in made)
    )
    backward_links: list[tuple[Any, ...]] = []
    for inner, _ in initial:
        state = f"{prefix}/{inner}_states_grad"
        backward_links += [
            (found.get(str(inner), f"{inner}_grad"), state, 0),
            (given[str(links[inner])], state, 1),
        ]
    backward_links += [(found[str(inner)], f"{outer}_grad", 0) for inner, outer in inputs]
    params = [reference for reference in references if str(reference) in found]
    return {
        **_lists("backward_link_", ("internal", "external", "offset"), backward_links),
        "backward_step_net": net.Proto(),
        "param": [all_inputs.index(param) for param in params],
        "param_grads": [found[str(param)] for param in params],
    }
