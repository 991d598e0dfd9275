"""The names of codecs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ps_server import SpecError, register_codec
from ps_server.codecs import registry
from ps_server.codecs.base import Codec, Coder
from ps_server.codecs.registry import CodecPair, codec_of
from tests.ps_server.protocol.test_precision import lossy, train_lossy
from tests.support.steps_codec import Steps

CODECS = ["int8", "int4", "sign", "topk:0.25", "randomk:0.001", "steps:0.01"]


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Codecs that a test registers are forgotten after it."""
    with monkeypatch.context() as patched:
        patched.setattr(registry, "_CODECS", dict(registry._CODECS))
        register_codec(Steps)
        yield


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int2", "'int2' is not a codec; expected int8, int4, sign, topk:FRACTION"),
        ("topk", "'topk' is not a codec; expected topk:FRACTION"),
        ("topk:0", "topk:0 is not a codec"),
        ("topk:0.6", "topk:0.6 is not a codec"),
        ("topk:nan", "expected a fraction"),
        ("topk:much", "'topk:much' is not a codec; expected topk:FRACTION"),
        ("int8:3", "'int8:3' is not a codec; expected int8"),
        ("", "'' is not a codec"),
        ("steps:-1", "expected a step above 0"),
    ],
)
def test_what_is_no_codec_is_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        codec_of(text)
    assert message in str(refused.value)


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_is_its_text(name: str) -> None:
    assert str(codec_of(name)) == name


@pytest.mark.parametrize("name", ["steps", "None", "none", "a b", ""])
def test_a_name_is_new_and_legal(name: str) -> None:
    codec = type("Other", (Steps,), {"name": name})
    with pytest.raises(SpecError, match=r"rename one of them|not a name of a codec"):
        register_codec(codec)


@pytest.mark.parametrize("name", ["steps:0.001", "topk:0.1/steps:0.001", "steps:0.5/none"])
def test_a_codec_of_ones_own_trains_through_the_store(name: str) -> None:
    """All workers read the same values, in two runs; with fine steps they are near exact ones."""
    read, values, sizes = train_lossy(lossy(name))
    assert read[0] == read[1] == read[2] == train_lossy(lossy(name, shards=1))[0][0]
    exact, _, all_bytes = train_lossy(lossy("none/int8"))
    assert exact[0] != read[0]
    assert sizes[0] < 0.6 * all_bytes[0]
    assert len({value.tobytes() for value in values}) == len(values)


def test_a_store_names_a_codec_by_its_text() -> None:
    pair = CodecPair.parse("steps:0.25/int8")
    assert pair.gradients == Steps(0.25)
    assert (str(pair), CodecPair.parse(str(pair))) == ("steps:0.25/int8", pair)


def test_an_installed_package_brings_its_codec(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "exact_codec.py").write_text(
        "from ps_server import register_codec\n"
        "from tests.support.steps_codec import Steps\n"
        "@register_codec\n"
        "class Installed(Steps):\n"
        "    name = 'installed'\n"
    )
    (info := tmp_path / "exact_codec-1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: exact-codec\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ps_server.codecs]\ninstalled = exact_codec\n")
    with pytest.raises(SpecError, match="'installed:2' is not a codec"):
        codec_of("installed:2")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert str(codec_of("installed:2")) == "installed:2.0"
    monkeypatch.delitem(sys.modules, "exact_codec")


@pytest.mark.needs("native")
def test_a_compiled_codec_is_found_by_its_name() -> None:
    def is_compiled(codec: Codec) -> bool:
        return Coder(codec)._twin is not None

    assert [is_compiled(codec_of(name)) for name in CODECS] == [True] * 5 + [False]
