"""Recurrent networks of a step net: the operator's arguments, and a step's gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.proto import caffe2_pb2

Triple = tuple[str, str, int]
GIVEN = "_given_grad"
"""Behind the name of a state after the step: the gradient that comes from outside and from the
step behind.
"""


@dataclass
class _Links:
    """What ties a step to the outside: forward, backward, and the states' outputs."""

    forward: list[Triple] = field(default_factory=list)
    backward: list[Triple] = field(default_factory=list)
    aliases: list[Triple] = field(default_factory=list)
    states: list[str] = field(default_factory=list)


def recurrent_net(
    net: Any,
    cell_net: Any,
    inputs: Sequence[tuple[Any, Any]],
    initial_cell_inputs: Sequence[tuple[Any, Any]],
    links: Mapping[Any, Any],
    timestep: Any = None,
    scope: str | None = None,
    outputs_with_grads: Sequence[int] = (0,),
    recompute_blobs_on_backward: Iterable[Any] | None = None,
    forward_only: bool = False,
) -> Any:
    """Add a recurrent network to a net.

    Args:
        net: the net.
        cell_net: the net of one step.
        inputs: a pair: the step's input, and the sequence of shape (T, N, D).
        initial_cell_inputs: pairs of the step's state before it, and the first
            state, of shape (1, N, D), (N, D) or (D).
        links: from the step's state before it to that after it.
        timestep: the step's number, where the step net reads it.
        scope: before the names of the operator's own blobs.
        outputs_with_grads: the outputs that get gradients from outside.
        recompute_blobs_on_backward: blobs of a step that its gradient makes again.
        forward_only: whether there is no gradient.

    Returns:
        for each state the values of all steps and the last one: references.

    Raises:
        AssertionError: there is more than one input.
    """
    assert len(inputs) == 1, "Only one input blob is supported so far"
    prefix = str(net.NextName("recurrent") if scope is None else scope)
    known = [str(blob) for pair in (*inputs, *initial_cell_inputs) for blob in pair]
    known += [] if timestep is None else [str(timestep)]
    references = [core.BlobReference(b) for b in cell_net.Proto().external_input if b not in known]
    blobs = [pair[1] for pair in (*inputs, *initial_cell_inputs)] + references
    names = [str(blob) for blob in blobs]
    recomputed = [str(blob) for blob in recompute_blobs_on_backward or ()]
    cell_net.Proto().type = "simple"
    backward = None if forward_only else _backward_net(cell_net, list(links.values()), recomputed)
    tied = _tie(prefix, inputs, initial_cell_inputs, links, backward)
    arguments = _named("link", tied.forward)
    for part, values in zip(
        ("alias_src", "alias_dst", "alias_offset"), _columns(tied.aliases), strict=True
    ):
        arguments[part] = values
    if backward is not None:
        arguments.update(_named("backward_link", tied.backward))
        arguments.update(backward.arguments(references, names, outputs_with_grads, recomputed))
    outputs = [dst for _, dst, _ in tied.aliases]
    results = net.RecurrentNetwork(
        blobs,
        [*map(core.BlobReference, outputs), core.ScopedBlobReference(f"{prefix}/step_workspaces")],
        recurrent_states=tied.states,
        initial_recurrent_state_ids=[names.index(str(first)) for _, first in initial_cell_inputs],
        step_net=cell_net.Proto(),
        timestep="timestep" if timestep is None else str(timestep),
        enable_rnn_executor=1,
        **arguments,
    )
    return results[:-1]


def _columns(triples: Sequence[Triple]) -> tuple[list[str], list[str], list[int]]:
    return [a for a, _, _ in triples], [b for _, b, _ in triples], [c for _, _, c in triples]


def _named(prefix: str, triples: Sequence[Triple]) -> dict[str, Any]:
    parts = (f"{prefix}_internal", f"{prefix}_external", f"{prefix}_offset")
    return dict(zip(parts, _columns(triples), strict=True))


class _Backward:
    """The net of the gradient of a step, and the gradient of each blob of it."""

    def __init__(self, proto: caffe2_pb2.NetDef, mapping: dict[str, str]) -> None:
        self.proto, self.mapping = proto, mapping

    def gradient_of(self, blob: str) -> str:
        """Return the gradient of a state before the step; zeros are made where nothing reads it."""
        wanted = f"{blob}_grad"
        found = self.mapping.get(blob)
        if found is None:
            self._add("ConstantFill", blob, wanted, value=0.0)
        elif found != wanted:
            self._add("Copy", found, wanted)
        self.mapping[blob] = wanted
        return wanted

    def _add(self, kind: str, read: str, made: str, **arguments: Any) -> None:
        blobs = [core.BlobReference(read)], [core.BlobReference(made)]
        self.proto.op.extend([core.CreateOperator(kind, *blobs, **arguments)])

    def arguments(
        self,
        references: Sequence[Any],
        names: Sequence[str],
        outputs_with_grads: Sequence[int],
        recomputed: Sequence[str],
    ) -> dict[str, Any]:
        params = [str(blob) for blob in references if str(blob) in self.mapping]
        made: dict[str, Any] = {
            "param": [names.index(name) for name in params],
            "param_grads": [self.mapping[name] for name in params],
            "outputs_with_grads": list(outputs_with_grads),
            "backward_step_net": self.proto,
        }
        if recomputed:
            made["recompute_blobs_on_backward"] = list(recomputed)
        return made


def _backward_net(cell_net: Any, states: Sequence[Any], recomputed: Sequence[str]) -> _Backward:
    """Return the gradient of a step; the gradients of the states after it are given.

    Raises:
        AssertionError: an operator that is run again makes more than the blobs named.
    """
    step = cell_net.Proto()
    given = {
        core.BlobReference(name): core.BlobReference(name + GIVEN) for name in map(str, states)
    }
    operators, mapping = core.GradientRegistry.GetBackwardPass(step.op, given)
    proto = core.Net("RecurrentBackwardStep").Proto()
    proto.type = "simple"
    for op in step.op:
        if set(op.output) & set(recomputed):
            assert set(op.output) <= set(recomputed), f"{op.type} makes blobs not to recompute"
            proto.op.extend([op])
    proto.op.extend(operators)
    undefined = core.get_undefined_blobs(core.get_ssa(proto)[0])
    made = {name for op in step.op for name in op.output}
    proto.external_input.extend(sorted(made & undefined - set(step.external_output)))
    proto.external_input.extend([*step.external_input, *step.external_output])
    return _Backward(proto, {str(blob): str(gradient) for blob, gradient in mapping.items()})


def _tie(
    prefix: str,
    inputs: Sequence[tuple[Any, Any]],
    initial: Sequence[tuple[Any, Any]],
    links: Mapping[Any, Any],
    backward: _Backward | None,
) -> _Links:
    """Return the ties of states and sequence; the backward net gets its external inputs."""
    after_of = {str(before): str(after) for before, after in links.items()}
    tied = _Links()
    for blob, _ in initial:
        before = str(blob)
        after, state = after_of[before], f"{prefix}/{before}_states"
        tied.states.append(state)
        tied.forward += [(before, state, 0), (after, state, 1)]
        tied.aliases += [(state, f"{after}_all", 1), (state, f"{after}_last", -1)]
        if backward is not None:
            backward.proto.external_input.append(after + GIVEN)
            tied.backward += [
                (after + GIVEN, f"{state}_grad", 1),
                (backward.gradient_of(before), f"{state}_grad", 0),
            ]
    for element, sequence in inputs:
        tied.forward.append((str(element), str(sequence), 0))
        if backward is not None:
            gradient = backward.mapping.get(str(element)) or backward.gradient_of(str(element))
            tied.backward.append((gradient, f"{sequence}_grad", 0))
    return tied


def set_rnn_executor_config(
    rnn_op: Any, num_threads: int | None = None, max_cuda_streams: int | None = None
) -> None:
    """Set how many threads and streams an operator's steps may use; here it is a hint only.

    Raises:
        AssertionError: the operator is not a recurrent network.
    """
    assert rnn_op.type in ("RecurrentNetwork", "RecurrentNetworkGradient")
    for name, value in (
        ("rnn_executor.num_threads", num_threads),
        ("rnn_executor.max_cuda_streams", max_cuda_streams),
    ):
        kept = [argument for argument in rnn_op.arg if argument.name != name]
        if value is not None:
            del rnn_op.arg[:]
            rnn_op.arg.extend([*kept, caffe2_pb2.Argument(name=name, i=value)])


def retrieve_step_blobs(net: Any, prefix: str = "rnn") -> list[bytes]:
    """Copy all steps' blobs of a net's recurrent networks to the workspace after a run.

    Args:
        net: the net.
        prefix: the copies are `<prefix>_<blob><step>`.

    Returns:
        The names of the copies, as bytes.
    """
    names: list[bytes] = []
    networks = [op for op in net.Proto().op if op.type == "RecurrentNetwork"]
    for number, op in enumerate(networks, 1):
        listed = f"{prefix}_step_blob{number}"
        fetch = core.CreateOperator(
            "RecurrentNetworkBlobFetcher", [op.output[-1]], [listed], prefix=prefix
        )
        workspace.RunOperatorOnce(fetch)
        names.extend(workspace.FetchBlob(listed).tolist())
    return names
