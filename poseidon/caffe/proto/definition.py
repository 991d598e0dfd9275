"""Net and solver definitions with their source file and line numbers, and the layers of a net by
phase, level and stage.

Law: a definition is read once, validated and upgraded to the current format, and never changed
afterwards. It keeps its file and line numbers, so that later errors can name them.

Law: layers are selected by Caffe's rules (Net::FilterNet, Net::StateMeetsRule). A layer without
rules is always included. A layer with `include` rules is included if the state meets one of them; a
layer with `exclude` rules is excluded if the state meets one of them; a layer may not have both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path

from google.protobuf.message import Message

from poseidon.base import paths
from poseidon.caffe.proto.caffe_pb2 import (
    TEST,
    TRAIN,
    LayerParameter,
    NetParameter,
    NetState,
    NetStateRule,
    Phase,
    SolverParameter,
)
from poseidon.caffe.proto.overrides import TRAIN_NET_FIELDS, field_of, flag_text, override
from poseidon.caffe.proto.text import M, decode, parse, parse_binary, read_content
from poseidon.caffe.proto.tokens import Setting, settings
from poseidon.caffe.proto.upgrade import (
    dropped_settings,
    is_v0,
    kept_layers,
    upgrade_net,
    upgrade_solver,
)
from poseidon.caffe.proto.upgrade_v1 import UpgradeError
from poseidon.errors import DefinitionError, counted

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetDefinition:
    """A net definition and its location.

    Attributes:
        param: the net in the current format.
        source: the file, or another name for the origin of the text.
        layer_lines: the line of each layer of `param`, from 1; empty if unknown.
        folder: the folder of the file, for relative paths in it.
        left_out: the tops of layers that `filter_net` has left out.
    """

    param: NetParameter
    source: str
    layer_lines: tuple[int, ...]
    folder: Path
    left_out: frozenset[str] = frozenset()

    def error(self, layer: int | str, message: str) -> DefinitionError:
        """Return an error about one layer, with file, line, the layer's name and its type.

        Args:
            layer: index in `param.layer`, or the layer's name.
        """
        index = self._index(layer)
        if index is None:
            return DefinitionError(f"layer '{layer}': {message}", source=self.source)
        found = self.param.layer[index]
        line = self.layer_lines[index] if index < len(self.layer_lines) else None
        kind = f" ({found.type})" if found.type else ""
        return DefinitionError(
            f"layer '{found.name}'{kind}: {message}", source=self.source, line=line
        )

    def resolve(self, path: str) -> Path:
        """Resolve a path of this definition; see `paths.resolve`."""
        try:
            return paths.resolve(path, folder=self.folder)
        except DefinitionError as error:
            index = next(
                (i for i, layer in enumerate(self.param.layer) if path in _strings(layer)), None
            )
            if index is None:
                raise
            raise self.error(index, error.message) from error

    def state(self, phase: int, *, level: int = 0, stages: Iterable[str] = ()) -> NetState:
        """Return the state to build the net for without a solver: its own stages and these, as in
        Caffe's Net.
        """
        return NetState(phase=phase, level=level, stage=[*self.param.state.stage, *stages])  # type: ignore[arg-type]

    def with_layers(self, kept: Sequence[int]) -> NetDefinition:
        """Return this definition with only the layers of these indices, in this order."""
        param = deepcopy(self.param)
        del param.layer[:]
        param.layer.extend(self.param.layer[index] for index in kept)
        lines = tuple(self.layer_lines[index] for index in kept) if self.layer_lines else ()
        return replace(self, param=param, layer_lines=lines)

    def _index(self, layer: int | str) -> int | None:
        if isinstance(layer, int):
            return layer
        names = [candidate.name for candidate in self.param.layer]
        return names.index(layer) if layer in names else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TestNet:
    """One of a solver's test nets: the net, the state to build it for, and the batches of a test
    pass.
    """

    __test__ = False  # pytest would take the class for a test

    definition: NetDefinition
    state: NetState
    iterations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverDefinition:
    """A solver definition and its location.

    Attributes:
        param: the solver in the current format, with its type as a string.
        source: the file, or another name for where the text came from.
        folder: the folder of the file, for relative paths in it.
        lines: every setting with its line.
        nets: net definitions that were sent with it, by the path in `param`; other nets are read
            from disk.
        overridden: the settings from the command line, by the field that they set.
    """

    param: SolverParameter
    source: str
    folder: Path
    lines: tuple[Setting, ...] = ()
    nets: Mapping[str, NetDefinition] = field(default_factory=dict)
    overridden: Mapping[str, str] = field(default_factory=dict)

    def error(self, name: str, message: str) -> DefinitionError:
        """Return an error about the setting `name`, with file and, where the file has it, line."""
        if name in self.overridden:
            return DefinitionError(f"{name}: {message}", source=flag_text(self.overridden[name]))
        line = next((setting.line for setting in self.lines if setting.path == (name,)), None)
        return DefinitionError(f"{name}: {message}", source=self.source, line=line)

    def resolve(self, path: str) -> Path:
        """Resolve a path of this definition; see `paths.resolve`."""
        try:
            return paths.resolve(path, folder=self.folder)
        except DefinitionError as error:
            raise self._error_of_path(path, error) from error

    def net_definition(self) -> NetDefinition:
        """Return the train net, which exactly one of net, net_param, train_net and
        train_net_param names.

        Raises:
            DefinitionError: none or several of them are set, or the net is wrong.
        """
        named = [name for name in TRAIN_NET_FIELDS if self.param.HasField(name)]
        choices = ", ".join(TRAIN_NET_FIELDS)
        if not named:
            raise DefinitionError(
                f"no train net is named; expected one of {choices}", source=self.source
            )
        if len(named) > 1:
            raise self.error(
                named[1],
                f"the train net is named twice, by {' and '.join(named)}; expected one of {choices}",
            )
        return self._net(named[0])

    def train_state(self, definition: NetDefinition) -> NetState:
        """Return the state of the train net: phase TRAIN, merged with the net's own state and
        then train_state.
        """
        return _merged(TRAIN, definition.param.state, self.param.train_state)

    def with_settings(self, settings: Sequence[str]) -> SolverDefinition:
        """Return this solver with fields from the command line in place of the file's; see
        `overrides.override`.

        Raises:
            DefinitionError: there is no such field, or a value is not legal for it.
        """
        if not settings:
            return self
        overridden = {**self.overridden, **{field_of(setting): setting for setting in settings}}
        try:
            param = upgrade_solver(override(self.param, settings))
        except UpgradeError as error:
            raise DefinitionError(error.message, source=self.source) from error
        lines = tuple(line for line in self.lines if line.path[0] not in overridden)
        return replace(self, param=param, lines=lines, overridden=overridden)

    def with_train_state(self, *, level: int | None, stages: Sequence[str]) -> SolverDefinition:
        """Return this solver with a level (unless None) and additional stages in its
        train_state.
        """
        if level is None and not stages:
            return self
        param = deepcopy(self.param)
        if level is not None:
            param.train_state.level = level
        param.train_state.stage.extend(stages)
        return replace(self, param=param)

    def without_weights(self) -> SolverDefinition:
        """Return this solver without the models that it starts from."""
        param = deepcopy(self.param)
        param.ClearField("weights")
        return replace(self, param=param)

    def test_nets(self) -> tuple[TestNet, ...]:
        """Return the test nets in Caffe's order: each test_net_param, each test_net, then the
        common net.

        The common net (net or net_param) is tested once for each remaining test_iter.

        Raises:
            DefinitionError: test_iter, test_state or test_interval do not match the nets, or a net
                is wrong.
        """
        nets = [
            self._inline_net("test_net_param", index)
            for index in range(len(self.param.test_net_param))
        ]
        nets += [self._net_file("test_net", path) for path in self.param.test_net]
        common = [name for name in ("net", "net_param") if self.param.HasField(name)]
        remaining = len(self.param.test_iter) - len(nets)
        if remaining < 0 or (remaining > 0 and not common):
            raise self._miscounted(len(nets))
        if remaining:
            nets += [self._net(common[0])] * remaining
        self._check_tests(len(nets))
        states = list(self.param.test_state) or [NetState() for _ in nets]
        return tuple(
            TestNet(
                definition=net, state=_merged(TEST, net.param.state, state), iterations=iterations
            )
            for net, state, iterations in zip(nets, states, self.param.test_iter, strict=True)
        )

    def nets_and_states(self) -> list[tuple[NetDefinition, NetState]]:
        """Return the train net and the test nets, each with the state to build it for."""
        train = self.net_definition()
        tests = [(test.definition, test.state) for test in self.test_nets()]
        return [(train, self.train_state(train)), *tests]

    def snapshot_prefix(self, job_folder: Path | None = None) -> Path:
        """Return the prefix of snapshot files.

        `snapshot_prefix` means what it means in Caffe: if it is a folder, the solver file's name is
        appended. A prefix that ends with a slash is a folder that may not exist yet; Caffe refuses
        it until the folder exists.

        Args:
            job_folder: the folder of snapshots for a solver without snapshot_prefix. They are named
                after the solver file without `_solver`, or after its folder if it is called
                solver.prototxt. None: beside the solver file under its name, as in Caffe.
        """
        stem = Path(self.source).stem
        if not self.param.snapshot_prefix:
            if job_folder is None:
                return self.folder / stem
            return job_folder / (
                self.folder.name if stem == "solver" else stem.replace("_solver", "")
            )
        try:
            prefix = paths.resolve_prefix(self.param.snapshot_prefix, folder=self.folder)
        except DefinitionError as error:
            raise self._error_of_path(self.param.snapshot_prefix, error) from error
        return (
            prefix / stem if prefix.is_dir() or self.param.snapshot_prefix.endswith("/") else prefix
        )

    def _miscounted(self, nets: int) -> DefinitionError:
        """Return the error of a test_iter that has not one value for each test net."""
        found, hint = counted(len(self.param.test_iter), "value"), ""
        if "test_iter" in self.overridden and nets:
            hint = f": {' '.join([flag_text(self.overridden['test_iter'])] * nets)}"
        return self.error(
            "test_iter", f"{found} for {counted(nets, 'test net')}; expected one for each{hint}"
        )

    def _error_of_path(self, path: str, error: DefinitionError) -> DefinitionError:
        """Return an error about a path with the setting that has it."""
        for setting, value in self.param.ListFields():
            if path == value or (setting.is_repeated and path in value):
                return self.error(setting.name, error.message)
        return error

    def _check_tests(self, nets: int) -> None:
        for iterations in self.param.test_iter:
            if iterations < 1:
                raise self.error("test_iter", f"expected 1 batch or more, found {iterations}")
        states = len(self.param.test_state)
        if states and states != nets:
            if "test_iter" in self.overridden:
                raise self._miscounted(states)
            raise self.error(
                "test_state",
                f"{counted(states, 'value')} for {counted(nets, 'test net')}; expected none or "
                "one for each",
            )
        if nets and self.param.test_interval <= 0:
            given = self.param.HasField("test_interval")
            found = str(self.param.test_interval) if given else "none"
            raise self.error(
                "test_interval",
                f"expected a positive number, found {found}; one above "
                "max_iter leaves out all tests but the first and the last",
            )

    def _net(self, name: str) -> NetDefinition:
        if name.endswith("_param"):
            return self._inline_net(name, 0)
        return self._net_file(name, str(getattr(self.param, name)))

    def _net_file(self, name: str, path: str) -> NetDefinition:
        if not path:
            raise self.error(name, "expected the path of a net definition, found an empty string")
        if path in self.nets:
            return self.nets[path]
        resolved = self.resolve(path)
        if not resolved.exists():
            searched = ", ".join(map(str, paths.candidates(path, folder=self.folder)))
            raise self.error(name, f"there is no net definition '{path}' (searched: {searched})")
        return read_net(resolved)

    def _inline_net(self, name: str, index: int) -> NetDefinition:
        found = getattr(self.param, name)
        param: NetParameter = found[index] if name == "test_net_param" else found
        lines = _inner(self.lines, name, index)
        return _net_definition(param, source=self.source, lines=lines, folder=self.folder)


def read_net(path: str | Path) -> NetDefinition:
    """Read a net definition in any format that Caffe has had, text or binary, and upgrade it.

    Raises:
        DefinitionError: the file cannot be read or the definition is wrong.
    """
    path = Path(path)
    return parse_net(read_content(path), source=str(path), folder=path.absolute().parent)


def parse_net(content: bytes, *, source: str, folder: Path) -> NetDefinition:
    """Parse the content of a net definition file; see `read_net`.

    Args:
        source: the name of the file, for errors.
        folder: the folder of the file, for relative paths in it.

    Raises:
        DefinitionError: the definition is wrong.
    """
    param, lines = _parse(content, NetParameter(), "net", source)
    return _net_definition(param, source=source, lines=lines, folder=folder)


def read_solver(path: str | Path) -> SolverDefinition:
    """Read a solver definition and upgrade it: the enum solver_type becomes the string type.

    Raises:
        DefinitionError: the file cannot be read or the definition is wrong.
    """
    path = Path(path)
    return parse_solver(read_content(path), source=str(path), folder=path.absolute().parent)


def parse_solver(
    content: bytes, *, source: str, folder: Path, nets: Mapping[str, NetDefinition] | None = None
) -> SolverDefinition:
    """Parse the content of a solver definition file; see `read_solver`.

    Args:
        source: the name of the file, for errors.
        folder: the folder of the file, for relative paths in it.
        nets: see `SolverDefinition`.

    Raises:
        DefinitionError: the definition is wrong.
    """
    param, lines = _parse(content, SolverParameter(), "solver", source)
    try:
        param = upgrade_solver(param)
    except UpgradeError as error:
        raise DefinitionError(error.message, source=source) from error
    return SolverDefinition(
        param=param, source=source, folder=folder, lines=tuple(lines), nets=nets or {}
    )


def _parse(content: bytes, message: M, kind: str, source: str) -> tuple[M, list[Setting]]:
    """Parse text or binary content into a message.

    Also return the line of each setting of a text.
    """
    binary = parse_binary(content, type(message)())
    if binary is not None:
        return binary, []
    text = decode(content, source=source)
    parse(text, message, source=source)
    if not message.ListFields():
        raise DefinitionError(f"the file is empty: it holds no {kind}", source=source)
    return message, list(settings(text))


def _strings(message: Message) -> Iterator[str]:
    """Yield the strings of a message and of those inside it."""
    for setting, value in message.ListFields():
        for each in value if setting.is_repeated else [value]:
            if isinstance(each, Message):
                yield from _strings(each)
            elif isinstance(each, str):
                yield each


def _net_definition(
    param: NetParameter, *, source: str, lines: Iterable[Setting], folder: Path
) -> NetDefinition:
    """Upgrade a net to the current format and keep the line number of each layer."""
    found = list(lines)
    layer_lines = tuple(line for path, line in found if path in (("layer",), ("layers",)))
    for index, message in dropped_settings(param):
        line_suffix = f":{layer_lines[index]}" if layer_lines else ""
        LOGGER.warning("%s%s: %s", source, line_suffix, message)
    try:
        upgraded = upgrade_net(param)
    except UpgradeError as error:
        line = (
            _second_kind(found)
            if error.layer is None or not layer_lines
            else layer_lines[error.layer]
        )
        raise DefinitionError(error.message, source=source, line=line) from error
    if is_v0(param) and layer_lines:
        layer_lines = tuple(layer_lines[index] for index in kept_layers(param))
    if layer_lines and len(upgraded.layer) > len(layer_lines):
        # The upgrade has turned the net's inputs into a layer.
        layer_lines = (next(line for path, line in found if path == ("input",)), *layer_lines)
    return NetDefinition(param=upgraded, source=source, layer_lines=layer_lines, folder=folder)


def _second_kind(lines: Iterable[Setting]) -> int | None:
    """Return the line of the first block of a net whose kind, `layer` or `layers`, differs from the
    blocks before it.
    """
    blocks = [setting for setting in lines if setting.path in (("layer",), ("layers",))]
    return next((line for path, line in blocks if path != blocks[0].path), None)


def _inner(lines: Iterable[Setting], name: str, index: int) -> list[Setting]:
    """Return the settings inside block number `index` of those called `name`, with paths
    relative to the block.
    """
    inside: list[Setting] = []
    count = -1
    for path, line in lines:
        if path == (name,):
            count += 1
        elif path[0] == name and count == index:
            inside.append(Setting(path[1:], line))
    return inside


def _merged(phase: Phase, *states: NetState) -> NetState:
    """Merge states into one of a given phase, later ones over earlier ones, as Caffe's
    Solver::InitTrainNet.
    """
    merged = NetState(phase=phase)
    for state in states:
        merged.MergeFrom(state)
    return merged


def meets(state: NetState, rule: NetStateRule) -> bool:
    """Return whether the state meets every condition of the rule. An empty rule is always met.

    Args:
        state: the phase, level and stages that the net is built for.
        rule: phase equal; min_level <= level <= max_level; every `stage` set; no `not_stage` set.
    """
    stages = set(state.stage)
    return (
        (not rule.HasField("phase") or rule.phase == state.phase)
        and (not rule.HasField("min_level") or state.level >= rule.min_level)
        and (not rule.HasField("max_level") or state.level <= rule.max_level)
        and stages.issuperset(rule.stage)
        and stages.isdisjoint(rule.not_stage)
    )


def is_included(layer: LayerParameter, state: NetState) -> bool:
    """Return whether a layer is part of the net of this state.

    The layer has rules of at most one kind.
    """
    if layer.include:
        return _meets_any(state, layer.include)
    return not _meets_any(state, layer.exclude)


def filter_net(definition: NetDefinition, state: NetState) -> NetDefinition:
    """Return the definition with only the layers that belong to `state`.

    Raises:
        DefinitionError: a layer has both include and exclude rules.
    """
    for index, layer in enumerate(definition.param.layer):
        if layer.include and layer.exclude:
            raise definition.error(
                index, "has both include and exclude rules; expected rules of one kind"
            )
    layers = definition.param.layer
    kept = [index for index, layer in enumerate(layers) if is_included(layer, state)]
    others = set(range(len(layers))).difference(kept)
    tops = {top for index in others for top in layers[index].top}
    return replace(definition.with_layers(kept), left_out=definition.left_out | tops)


def _meets_any(state: NetState, rules: Iterable[NetStateRule]) -> bool:
    return any(meets(state, rule) for rule in rules)
