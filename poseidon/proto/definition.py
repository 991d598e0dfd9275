"""A net or solver definition together with where it came from.

Law: a definition is read once, checked and brought to today's grammar, and never changed again.
It keeps its file and lines, so that whoever finds a mistake later can still name the place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from poseidon.errors import DefinitionError
from poseidon.proto import paths
from poseidon.proto.caffe_pb2 import TEST, TRAIN, NetParameter, NetState, Phase, SolverParameter
from poseidon.proto.overrides import TRAIN_NET_FIELDS, field_of, override
from poseidon.proto.text import M, decode, parse, parse_binary, read_content
from poseidon.proto.tokens import Setting, settings
from poseidon.proto.upgrade.driver import upgrade_net, upgrade_solver
from poseidon.proto.upgrade.errors import UpgradeError
from poseidon.proto.upgrade.v0 import is_v0, kept_layers, stray_settings

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetDefinition:
    """A net and its place.

    Attributes:
        param: the net in today's grammar.
        source: the file, or another name for where the text came from.
        layer_lines: the line of each layer of `param`, from 1; empty when unknown.
        folder: the folder that relative paths in it may start from.
    """

    param: NetParameter
    source: str
    layer_lines: tuple[int, ...]
    folder: Path

    def error(self, layer: int | str, message: str) -> DefinitionError:
        """An error about one layer, with file, line, the layer's name and its type.

        Args:
            layer: index in `param.layer`, or the layer's name.
            message: what is wrong and what was expected.
        """
        index = self._index(layer)
        if index is None:
            return DefinitionError(f"layer '{layer}': {message}", source=self.source)
        found = self.param.layer[index]
        line = self.layer_lines[index] if index < len(self.layer_lines) else None
        kind = f" ({found.type})" if found.type else ""
        return DefinitionError(f"layer '{found.name}'{kind}: {message}", source=self.source, line=line)

    def resolve(self, path: str) -> Path:
        """The file or folder that a path in this definition means; see `paths.resolve`."""
        return paths.resolve(path, folder=self.folder)

    def with_layers(self, kept: Sequence[int]) -> NetDefinition:
        """This definition with only the layers of these indices, in this order."""
        param = NetParameter()
        param.CopyFrom(self.param)
        del param.layer[:]
        param.layer.extend(self.param.layer[index] for index in kept)
        lines = tuple(self.layer_lines[index] for index in kept) if self.layer_lines else ()
        return NetDefinition(param=param, source=self.source, layer_lines=lines, folder=self.folder)

    def _index(self, layer: int | str) -> int | None:
        if isinstance(layer, int):
            return layer
        names = [candidate.name for candidate in self.param.layer]
        return names.index(layer) if layer in names else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TestNet:
    """One of a solver's test nets: the net, the state to build it for, and batches a test pass."""

    __test__ = False  # pytest would take the class for a test

    definition: NetDefinition
    state: NetState
    iterations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverDefinition:
    """A solver and its place.

    Attributes:
        param: the solver, its type as today's string.
        source: the file, or another name for where the text came from.
        folder: the folder that relative paths in it may start from.
        lines: every setting with its line.
        nets: net definitions that came along with it, by the path that it names them by; others are read from disk.
        overridden: the command line's settings, by the field that they set.
    """

    param: SolverParameter
    source: str
    folder: Path
    lines: tuple[Setting, ...] = ()
    nets: Mapping[str, NetDefinition] = field(default_factory=dict)
    overridden: Mapping[str, str] = field(default_factory=dict)

    def error(self, name: str, message: str) -> DefinitionError:
        """An error about the setting `name`, with file and, where the file has it, line."""
        if name in self.overridden:
            return DefinitionError(f"{name}: {message}", source=f"--set {self.overridden[name]}")
        line = next((setting.line for setting in self.lines if setting.path == (name,)), None)
        return DefinitionError(f"{name}: {message}", source=self.source, line=line)

    def resolve(self, path: str) -> Path:
        """The file or folder that a path in this definition means; see `paths.resolve`."""
        return paths.resolve(path, folder=self.folder)

    def net_definition(self) -> NetDefinition:
        """The train net: exactly one of net, net_param, train_net and train_net_param names it.

        Raises:
            DefinitionError: none or several of them are given, or the net is wrong.
        """
        given = [name for name in TRAIN_NET_FIELDS if self.param.HasField(name)]
        choices = ", ".join(TRAIN_NET_FIELDS)
        if not given:
            raise DefinitionError(f"no train net is given; expected one of {choices}", source=self.source)
        if len(given) > 1:
            raise self.error(
                given[1], f"the train net is given twice, by {' and '.join(given)}; expected one of {choices}"
            )
        return self._net(given[0])

    def train_state(self, definition: NetDefinition) -> NetState:
        """The state to build the train net for: TRAIN, then the net's own state, then train_state."""
        return _merged(TRAIN, definition.param.state, self.param.train_state)

    def with_settings(self, settings: Sequence[str]) -> SolverDefinition:
        """This solver with fields set in place of those of its file; see `overrides.override`.

        Raises:
            DefinitionError: there is no such field, or a value does not fit it.
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
        """This solver with another level and more stages in its train_state; as it is where none are given."""
        if level is None and not stages:
            return self
        param = SolverParameter()
        param.CopyFrom(self.param)
        if level is not None:
            param.train_state.level = level
        param.train_state.stage.extend(stages)
        return replace(self, param=param)

    def test_nets(self) -> tuple[TestNet, ...]:
        """The test nets in Caffe's order: each test_net_param, each test_net, then the common net.

        The common net (net or net_param) is tested once for every test_iter that is left over.

        Raises:
            DefinitionError: test_iter, test_state or test_interval do not fit the nets, or a net is wrong.
        """
        nets = [self._inline_net("test_net_param", index) for index in range(len(self.param.test_net_param))]
        nets += [self._net_file("test_net", path) for path in self.param.test_net]
        common = [name for name in ("net", "net_param") if self.param.HasField(name)]
        left_over = len(self.param.test_iter) - len(nets)
        if left_over < 0 or (left_over > 0 and not common):
            raise self.error(
                "test_iter",
                f"{len(self.param.test_iter)} given for {len(nets)} test nets; expected one for each",
            )
        if left_over:
            nets += [self._net(common[0])] * left_over
        self._check_tests(len(nets))
        states = list(self.param.test_state) or [NetState() for _ in nets]
        return tuple(
            TestNet(definition=net, state=_merged(TEST, net.param.state, state), iterations=iterations)
            for net, state, iterations in zip(nets, states, self.param.test_iter, strict=True)
        )

    def snapshot_prefix(self, job_folder: Path | None = None) -> Path:
        """The prefix of snapshot files.

        A prefix that is given means what it means in Caffe; where it is a folder, it gets the solver file's name in it.

        Args:
            job_folder: where snapshots go that no prefix is given for, under the solver's name without `_solver`, or
                that of its folder where it has no other name; None: beside the solver file under its name, as Caffe does.
        """
        stem = Path(self.source).stem
        if not self.param.snapshot_prefix:
            if job_folder is None:
                return self.folder / stem
            return job_folder / (self.folder.name if stem == "solver" else stem.replace("_solver", ""))
        prefix = paths.resolve_prefix(self.param.snapshot_prefix, folder=self.folder)
        return prefix / stem if prefix.is_dir() else prefix

    def _check_tests(self, nets: int) -> None:
        for iterations in self.param.test_iter:
            if iterations < 1:
                raise self.error("test_iter", f"expected 1 batch or more, found {iterations}")
        if self.param.test_state and len(self.param.test_state) != nets:
            raise self.error(
                "test_state",
                f"{len(self.param.test_state)} given for {nets} test nets; expected none or one for each",
            )
        if nets and self.param.test_interval <= 0:
            raise self.error(
                "test_interval",
                f"expected a positive number, found {self.param.test_interval}; one above max_iter leaves out all tests but "
                "the first and the last",
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
            looked = ", ".join(map(str, paths.places_of(path, folder=self.folder)))
            raise self.error(name, f"there is no net definition '{path}' (looked for {looked})")
        return read_net(resolved)

    def _inline_net(self, name: str, index: int) -> NetDefinition:
        found = getattr(self.param, name)
        param: NetParameter = found[index] if name == "test_net_param" else found
        lines = _inner(self.lines, name, index)
        return _net_definition(param, source=self.source, lines=lines, folder=self.folder)


def read_net(path: str | Path) -> NetDefinition:
    """Reads a net definition, of any grammar that Caffe ever had, in text or in binary, into today's.

    Raises:
        DefinitionError: the file cannot be read or the definition is wrong.
    """
    path = Path(path)
    return net_of(read_content(path), source=str(path), folder=path.absolute().parent)


def net_of(content: bytes, *, source: str, folder: Path) -> NetDefinition:
    """The net definition in the content of a file; see `read_net`.

    Args:
        content: of the file.
        source: its name, for errors.
        folder: the folder that relative paths in it may start from.

    Raises:
        DefinitionError: the definition is wrong.
    """
    param, lines = _parse(content, NetParameter(), "net", source)
    return _net_definition(param, source=source, lines=lines, folder=folder)


def read_solver(path: str | Path) -> SolverDefinition:
    """Reads a solver definition; an old solver_type becomes today's type.

    Raises:
        DefinitionError: the file cannot be read or the definition is wrong.
    """
    path = Path(path)
    return solver_of(read_content(path), source=str(path), folder=path.absolute().parent)


def solver_of(
    content: bytes, *, source: str, folder: Path, nets: Mapping[str, NetDefinition] | None = None
) -> SolverDefinition:
    """The solver definition in the content of a file; see `read_solver`.

    Args:
        content: of the file.
        source: its name, for errors.
        folder: the folder that relative paths in it may start from.
        nets: see `SolverDefinition`.

    Raises:
        DefinitionError: the definition is wrong.
    """
    param, lines = _parse(content, SolverParameter(), "solver", source)
    try:
        param = upgrade_solver(param)
    except UpgradeError as error:
        raise DefinitionError(error.message, source=source) from error
    return SolverDefinition(param=param, source=source, folder=folder, lines=tuple(lines), nets=nets or {})


def _parse(content: bytes, message: M, kind: str, source: str) -> tuple[M, list[Setting]]:
    """A message from its text or its binary form, and the line of each setting of a text."""
    binary = parse_binary(content, type(message)())
    if binary is not None:
        return binary, []
    text = decode(content, source=source)
    parse(text, message, source=source)
    if not message.ListFields():
        raise DefinitionError(f"the file is empty: it holds no {kind}", source=source)
    return message, list(settings(text))


def _net_definition(
    param: NetParameter, *, source: str, lines: Iterable[Setting], folder: Path
) -> NetDefinition:
    """The net brought to today's grammar, each of its layers with the line that it came from."""
    found = list(lines)
    layer_lines = tuple(line for path, line in found if path in (("layer",), ("layers",)))
    for index, sentence in stray_settings(param):
        place = f":{layer_lines[index]}" if layer_lines else ""
        LOGGER.warning("%s%s: %s", source, place, sentence)
    try:
        upgraded = upgrade_net(param)
    except UpgradeError as error:
        line = None if error.layer is None or not layer_lines else layer_lines[error.layer]
        raise DefinitionError(error.message, source=source, line=line) from error
    if is_v0(param) and layer_lines:
        layer_lines = tuple(layer_lines[index] for index in kept_layers(param))
    if layer_lines and len(upgraded.layer) > len(layer_lines):
        # The net's inputs have become a layer of their own.
        layer_lines = (next(line for path, line in found if path == ("input",)), *layer_lines)
    return NetDefinition(param=upgraded, source=source, layer_lines=layer_lines, folder=folder)


def _inner(lines: Iterable[Setting], name: str, index: int) -> list[Setting]:
    """The settings inside the block `name` that is number `index`, with paths that start in it."""
    inside: list[Setting] = []
    count = -1
    for path, line in lines:
        if path == (name,):
            count += 1
        elif path[0] == name and count == index:
            inside.append(Setting(path[1:], line))
    return inside


def _merged(phase: Phase, *states: NetState) -> NetState:
    """The phase, then what each state sets, as Caffe's Solver::InitTrainNet merges them."""
    merged = NetState(phase=phase)
    for state in states:
        merged.MergeFrom(state)
    return merged
