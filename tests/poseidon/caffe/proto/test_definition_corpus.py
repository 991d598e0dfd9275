"""Real definitions of every grammar, from many projects: all are read, save those with foreign
layers.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from poseidon.caffe.proto.definition import read_net, read_solver
from poseidon.caffe.proto.tokens import settings
from poseidon.errors import DefinitionError

# Parts of paths, and why no reader of Caffe's schema can take these files.
FOREIGN = {
    r"pl8787__exp_caffe/.*cifar10_quick_(train|test)_co\.prototxt": (
        "type in V1LayerParameter: unknown value 'COLINEAR_CONVOLUTION'"  # that project's own layer
    )
}
FOREIGN_FILES = 10
SOLVER_FIELDS = {"base_lr", "net", "train_net", "max_iter"}


def is_solver(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    return any(len(names) == 1 and names[0] in SOLVER_FIELDS for names, _ in settings(text))


def test_every_file_is_read_or_fails_for_a_stated_reason(shared: Path) -> None:
    corpus = shared / "data" / "prototxt-corpus"
    solvers = nets = foreign = 0
    for path in sorted(corpus.rglob("*.prototxt")):
        name = str(path.relative_to(corpus))
        reason = next(
            (words for pattern, words in FOREIGN.items() if re.fullmatch(pattern, name)), None
        )
        if reason is not None:
            with pytest.raises(DefinitionError, match=re.escape(reason)):
                read_net(path)
            foreign += 1
        elif is_solver(path):
            assert read_solver(path).param.base_lr > 0, name
            solvers += 1
        else:
            definition = read_net(path)
            assert len(definition.param.layer) == len(definition.layer_lines) > 0, name
            assert not definition.param.layers and not definition.param.input, name
            nets += 1
    assert foreign == FOREIGN_FILES
    assert solvers + nets + foreign == 207
    assert min(solvers, nets) > 50
