"""The verdict on one file of the corpus: read, upgraded, printed; a net is also built and run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import torch

from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.net.compile import compile_net, filter_phase
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import (
    TEST,
    TRAIN,
    NetParameter,
    NetState,
    Phase,
    SolverParameter,
)
from poseidon.caffe.proto.definition import NetDefinition, read_net, read_solver
from poseidon.caffe.proto.text import parse, to_text
from poseidon.caffe.proto.tokens import settings
from poseidon.caffe.solver.settings import solver_settings
from poseidon.errors import PoseidonError
from tests.corpus.random_inputs import random_inputs, with_random_inputs

PHASES = (TRAIN, TEST)
SOLVER_FIELDS = frozenset({"base_lr", "net", "train_net", "max_iter"})
# A backward pass holds weights and gradients; nets beyond this are run forward only.
BACKWARD_BYTES = 3 << 30


@dataclass(slots=True, kw_only=True)
class Verdict:
    """One file's line of the report.

    Attributes:
        kind: net or solver.
        grammar: which it was written in.
        read: parsed and upgraded.
        printed: what is printed reads back equal.
        built, ran: of a net's phases; None for a solver.
        words: what was run, or why something was not.
    """

    kind: str
    grammar: str
    read: bool = False
    printed: bool = False
    built: bool | None = None
    ran: bool | None = None
    words: list[str] = field(default_factory=list)


def verdict_of(path: Path, *, run: bool = True) -> Verdict:
    """Read a file, and build and run its net."""
    names = {names for names, _ in settings(path.read_text(encoding="utf-8"))}
    solver = any((name,) in names for name in SOLVER_FIELDS)
    verdict = Verdict(kind="solver" if solver else "net", grammar=_grammar(names))
    try:
        if solver:
            _take_solver(path, verdict)
        else:
            _take_net(path, verdict, run)
    except PoseidonError as error:
        verdict.words.append(_words(error, path))
    return verdict


def _grammar(names: set[tuple[str, ...]]) -> str:
    if ("layers", "layer") in names:
        return "V0"
    parts = ["V1"] if ("layers",) in names else []
    parts += [name for name in ("input_dim", "solver_type") if (name,) in names]
    if any(("layers", name) in names for name in ("cropsize", "meanfile")):
        parts.append("old transformations")
    return ", ".join(parts) or "today's"


def _take_solver(path: Path, verdict: Verdict) -> None:
    solver = read_solver(path)
    verdict.read = True
    verdict.printed = _prints(solver.param)
    rule = solver_settings(solver).base_rule
    endless = (
        ""
        if solver.param.HasField("max_iter")
        else "; no max_iter: for a script that counts steps itself"
    )
    verdict.words.append(f"legal ({rule.kind.value}, {solver.param.lr_policy}){endless}")


def _take_net(path: Path, verdict: Verdict, run: bool) -> None:
    verdict.built = verdict.ran = False
    definition = read_net(path)
    verdict.read = not definition.param.layers and not definition.param.input
    verdict.printed = _prints(definition.param)
    stand_in, replaced = with_random_inputs(definition)
    words = _take_states(stand_in, _states(definition), run)
    verdict.built, verdict.ran = True, run and not any("not finite" in word for word in words)
    verdict.words += words
    if replaced:
        verdict.words.append(f"random inputs for {' and '.join(replaced)}")


def _states(definition: NetDefinition) -> list[NetState]:
    """The phases, each with every stage that a layer asks for; one for a net that is the same in
    both: TRAIN if it has a loss.
    """
    states = [
        NetState(phase=phase, stage=stages)
        for phase in PHASES
        for stages in _stages(definition, phase)
    ]
    layers = {id(state): _layers(definition, state) for state in states}
    if len(states) == 2 and layers[id(states[0])] == layers[id(states[1])]:
        return (
            states[:1]
            if any("Loss" in layer.type for layer in definition.param.layer)
            else states[1:]
        )
    return [state for state in states if layers[id(state)]]


def _stages(definition: NetDefinition, phase: int) -> list[list[str]]:
    """The stages that layers of a phase name, one by one; none at all where none is named."""
    rules = [
        rule for layer in definition.param.layer for rule in layer.include if rule.phase == phase
    ]
    return [[stage] for stage in sorted({stage for rule in rules for stage in rule.stage})] or [[]]


def _layers(definition: NetDefinition, state: NetState) -> list[str]:
    try:
        return [layer.name for layer in filter_phase(definition, state).param.layer]
    except PoseidonError:  # nothing for this phase
        return []


def _take_states(definition: NetDefinition, states: list[NetState], run: bool) -> list[str]:
    """What each net did; later ones have the weights and means of the first, as a solver's test
    nets do.
    """
    nets: list[Net] = []
    words = []
    try:
        for state in states:
            context = LayerContext(phase=state.phase, seed=1)
            nets.append(
                compile_net(definition, context, state=state, share_with=nets[0] if nets else None)
            )
            if run:
                name = " ".join((Phase.Name(state.phase), *state.stage))
                words.append(f"{name}: {_run(nets[-1], state.phase)}")
    finally:
        for net in nets:
            net.close()
    return words


def _run(net: Net, phase: int) -> str:
    size = sum(info.parameter.nbytes for info in net.parameters_info)
    backward = phase == TRAIN and net.plan.losses and 2 * size <= BACKWARD_BYTES
    net.train(phase == TRAIN)
    with torch.set_grad_enabled(bool(backward)):
        outputs = net(random_inputs(net))
    finite = all(bool(value.isfinite().all()) for value in outputs.values())
    if not backward:
        why = (
            " (its backward pass takes more than 3 GiB)"
            if phase == TRAIN and net.plan.losses
            else ""
        )
        return f"forward{'' if finite else ', not finite'}{why}"
    net.loss.backward()
    gradients = [info.parameter.grad for info in net.parameters_info if info.lr_mult]
    finite = finite and all(bool(grad.isfinite().all()) for grad in gradients if grad is not None)
    return f"forward, backward{'' if finite else ', not finite'}"


def _prints(param: NetParameter | SolverParameter) -> bool:
    return parse(to_text(param), type(param)(), source="printed") == param


def _words(error: PoseidonError, path: Path) -> str:
    """The error without the place, which the line of the report has."""
    return re.sub(r"^[^ ]*:(?=\d+)", "line ", str(error).replace(str(path.parent), "")).replace(
        "|", "\\|"
    )
