"""The document of a feature extraction: there and back, and what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.caffe.tools.extraction import Extraction
from poseidon.engine.document import read_document
from poseidon.errors import UsageError

WHOLE = Extraction(
    model="/net.prototxt",
    weights=("/a", "/b"),
    blobs=("fc7", "fc8"),
    databases=("/f7", "/f8"),
    job="j",
    rank=5,
    workers=6,
    hosts=(1, 3, 2),
)


def test_round_trip() -> None:
    assert read_document(Extraction, WHOLE.to_json()) == WHOLE


def test_names() -> None:
    assert WHOLE.paths() == (Path("/f7_2_1"), Path("/f8_2_1"))
    alone = Extraction(model="m", weights=(), blobs=("a",), databases=("features",))
    assert alone.paths() == (Path("features"),)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "is not JSON"),
        (b"[]", "is not a Extraction"),
        (b'{"nodel": "x"}', "fields that this version does not know"),
        (b'{"model": 3}', "Extraction has 3 as its model"),
        (b'{"model": "m"}', "Extraction has no"),
        (
            WHOLE.to_json().replace(b'["/f7", "/f8"]', b'["/f7"]'),
            "2 blobs are to be extracted into 1 databases",
        ),
        (WHOLE.to_json().replace(b'"fc8"', b'"fc7"'), "the blob fc7 is named twice"),
        (WHOLE.to_json().replace(b'"/f8"', b'"/f7"'), "the database /f7 is named twice"),
        (WHOLE.to_json().replace(b'"batches": 0', b'"batches": -1'), "num_mini_batches is -1"),
        (WHOLE.to_json().replace(b'"leveldb"', b'"hdf5"'), "unknown backend 'hdf5'"),
    ],
)
def test_mistakes(line: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_document(Extraction, line)
