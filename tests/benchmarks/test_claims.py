"""Claims: each figure of README is one, the page is made of the stored results, and one that fails
ends the command with status 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import claims, scale
from benchmarks.claim_checks import page
from benchmarks.claim_checks.claims import CLAIMS, MEASUREMENTS, SENTENCES
from benchmarks.claim_checks.definitions import (
    Claim,
    ClaimError,
    Result,
    Sentence,
    Speedup,
)
from benchmarks.cluster import parse
from benchmarks.testbed.worker_settings import PoseidonSettings

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = {name: result.published for name, result in page.read_results(page.RESULTS).items()}
NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*\w)|(?<![\w.])\d+(?:\.\d+)?(?= times\b| %)")
"""A figure: a decimal number, `N times` or a percentage."""
OTHERS = ("Python 3.10 to 3.14",)
"""What looks like figures and is none."""
CODE = re.compile(r"^```.*?^```|<!--.*?-->|`[^`]*`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)

SPEEDUP = Claim(
    name="fast",
    what="ours beside DDP",
    by=Speedup(measurement="net", rate_mbit=100.0, ours="default"),
    tolerance=0.25,
)
ROW = Sentence(page="page.md", template="| DDP | {fast} |")


def plain(text: str) -> str:
    """The text on one line, without code."""
    return " ".join(CODE.sub("", text).split())


def facts(ours: float, ddp: float, rate: float = 100.0) -> list[Mapping[str, Any]]:
    name = PoseidonSettings.parse("default").name
    return [
        {"job": f"{name} in clear", "rate_mbit": rate, "median_s": ours},
        {"job": "DDP", "rate_mbit": rate, "median_s": ddp},
    ]


@pytest.mark.parametrize("sentence", SENTENCES, ids=lambda sentence: sentence.template[:40])
def test_a_page_has_the_published_figures(sentence: Sentence) -> None:
    text = (ROOT / sentence.page).read_text(encoding="utf-8")
    assert " ".join(sentence.text(PUBLISHED).split()) in " ".join(text.split())


def test_each_figure_of_readme_is_in_a_sentence_of_claims() -> None:
    """Each decimal number of README's text and tables, each `N times` and each percentage."""
    rest = plain((ROOT / "README.md").read_text(encoding="utf-8"))
    for sentence in SENTENCES:
        if sentence.page == "README.md":
            rest = rest.replace(plain(sentence.text(PUBLISHED)), "", 1)
    for words in OTHERS:
        rest = rest.replace(words, "", 1)
    assert NUMBER.findall(rest) == []


def test_each_claim_is_named_once_and_measured_by_a_command_that_is_understood() -> None:
    names = [claim.name for claim in CLAIMS]
    assert len(set(names)) == len(names)
    assert sorted(name for sentence in SENTENCES for name in sentence.names) == sorted(names)
    used = {claim.by.measurement for claim in CLAIMS if isinstance(claim.by, Speedup)}
    assert used == {each.name for each in MEASUREMENTS}
    parsers = {"cluster.py": parse, "scale.py": scale.parse}
    for each in MEASUREMENTS:
        parsers[each.script](each.words.split())


def test_the_page_of_docs_is_made_of_the_stored_results() -> None:
    made = page.page(CLAIMS, MEASUREMENTS, page.read_results(page.RESULTS))
    assert page.PAGE.read_text(encoding="utf-8") == made


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One claim, published as 2.00, with a page of its own."""
    measurement = replace(MEASUREMENTS[0], name="net", words="speed --net alexnet")
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(claims, "PAGE", tmp_path / "claims.md")
    monkeypatch.setattr(claims, "RESULTS", tmp_path / "claims.json")
    monkeypatch.setattr(claims, "CLAIMS", (SPEEDUP,))
    monkeypatch.setattr(claims, "SENTENCES", (ROW,))
    monkeypatch.setattr(claims, "MEASUREMENTS", (measurement,))
    page.write_results(
        {"fast": Result(published="2.00", ours_s=1.0, other_s=2.2)}, tmp_path / "claims.json"
    )
    (tmp_path / "page.md").write_text("# Speed\n\n| DDP | 2.00 |\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("seconds", "status", "cells"),
    [
        ((1.0, 2.1), 0, "| 2.10 | yes | 1.000 | 2.100 |"),
        ((1.0, 1.0), 1, "| 1.00 | no | 1.000 | 1.000 |"),
        (None, 1, "| not measured | no |  |  |"),
    ],
)
def test_a_claim_that_fails_or_is_not_measured_fails_the_command(
    seconds: tuple[float, float] | None,
    status: int,
    cells: str,
    own: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(measurement: object, limit_s: float) -> list[Mapping[str, Any]]:
        if seconds is None:
            raise ClaimError("no time is left")
        return facts(*seconds)

    monkeypatch.setattr(claims, "run", run)
    assert claims.main([]) == status
    written = (own / "claims.md").read_text(encoding="utf-8")
    assert f"| ours beside DDP | 2.00 | 1.60 to 2.50 {cells}" in written
    said = capsys.readouterr()
    assert "cluster.py speed --net alexnet" in said.out
    assert ("these claims do not hold: fast" in said.err) == bool(status)


def test_publishing_writes_the_last_figure_into_the_page(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = Result(published="2.00", ours_s=1.0, other_s=12.34)
    page.write_results({"fast": measured}, own / "claims.json")
    assert claims.main(["--publish"]) == 0
    assert (own / "page.md").read_text(encoding="utf-8") == "# Speed\n\n| DDP | 12.3 |\n"
    assert page.read_results(own / "claims.json")["fast"].published == "12.3"
    kept = page.publish((ROW,), {"fast": replace(measured, published="12.3", other_s=1.0)}, [])
    assert kept["fast"].published == "12.3"
    (own / "page.md").write_text("", encoding="utf-8")
    page.write_results({"fast": replace(measured, published="1.00")}, own / "claims.json")
    assert claims.main(["--publish"]) == 1
    assert "page.md does not have once, on one line: | DDP | 1.00 |" in capsys.readouterr().err
