"""What the definitions of a job will have other hosts open and write, in words that these hosts can check.

Law: found by the fields' names, so that a layer of a user's own that has a `source` counts as well. Nothing is opened here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import Message

from poseidon.cluster.host_checks import NeededFile
from poseidon.data.batches.partition import part_path
from poseidon.net.compile import filter_phase
from poseidon.proto.definition import NetDefinition, SolverDefinition
from poseidon.proto.shipped import portable
from poseidon.snapshot.checksums import sums_path
from poseidon.snapshot.solverstate import weights_of

_PATHS = ("source", "mean_file")
_SHARED = "shared_file_system"


def needed_files(solver: SolverDefinition, *, client: int, clients: int) -> tuple[NeededFile, ...]:
    """The files of a solver and its nets that one machine opens.

    Args:
        solver: the definition.
        client: the machine, of the `clients` that work.
        clients: how many there are.
    """
    folder = portable(solver.folder)
    weights = [part.strip() for model in solver.param.weights for part in model.split(",")]
    found = [NeededFile(name=name, folder=folder) for name in weights if name]
    definition = solver.net_definition()
    nets = [(definition, solver.train_state(definition))]
    nets += [(test.definition, test.state) for test in solver.test_nets()]
    for net, state in nets:
        for layer in filter_phase(net, state).param.layer:
            found += _files_of(net, layer, client, clients)
    return tuple(dict.fromkeys(found))


def written_prefixes(solver: SolverDefinition) -> tuple[tuple[str, str], ...]:
    """The prefix of the snapshots, with the folder that it is written in; none where they go to the job's folder."""
    prefix = solver.param.snapshot_prefix
    return ((prefix, portable(solver.folder)),) if prefix else ()


def snapshot_files(state: Path) -> tuple[Path, ...]:
    """All files of the snapshot in `state`, which lie beside each other.

    Raises:
        SnapshotError: it cannot be read, or its weights are missing.
    """
    model = weights_of(state)
    sums = sums_path(state)
    return (*((sums,) if sums.exists() else ()), model, state)


def _files_of(net: NetDefinition, layer: Message, client: int, clients: int) -> Iterator[NeededFile]:
    folder = portable(net.folder)
    for _, value in layer.ListFields():
        if not isinstance(value, Message):
            continue
        divided = hasattr(value, _SHARED) and not getattr(value, _SHARED)
        for name in _PATHS:
            path = getattr(value, name, "")
            if not isinstance(path, str) or not path:
                continue
            instead: tuple[str, ...] = ()
            if divided and name == "source":
                part = part_path(Path(path), client).name
                instead = (Path(path).name, part) if clients == 1 else (part,)
            yield NeededFile(name=path, folder=folder, instead=instead)
