"""The results of the claims as a file, as the page docs/claims.md, and as lines of a terminal.

Law: the page is a function of the claims and of the stored results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.claim_checks.definitions import (
    Claim,
    ClaimError,
    Elsewhere,
    Measurement,
    Result,
    Sentence,
    Speedup,
)
from benchmarks.testbed.tables import aligned

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "claims.json"
PAGE = ROOT / "docs" / "claims.md"
TOP = """# Claims

This page compares each figure of the [README](../README.md) with a new measurement. One command
measures the figures and writes this page, so do not edit it:

<!-- not run: it needs root and minutes -->

    sudo make claims

The command takes at most 15 minutes on two processors that do nothing else. It ends with status 1
if a claim fails. The claims are in `benchmarks/claim_checks/claims.py`. A figure is the speed of
Poseidon's job in multiples of the other job's, by the median seconds of an iteration; rounds of
both take turns. Figures that differ more from run to run have wider bands.
"""
MIDDLE = """
These commands measure the claims. The load is the number of processes that wanted a processor when
a command began: 0 on a quiet machine.
"""
ELSEWHERE = """
## Not measured here

The stored result of each is compared with the figure.
"""


def write_results(results: Mapping[str, Result], path: Path) -> None:
    """Write what is stored of each claim, by name."""
    plain = {name: asdict(results[name]) for name in sorted(results)}
    path.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


def read_results(path: Path) -> dict[str, Result]:
    """Read a file of `write_results`."""
    plain = json.loads(path.read_text(encoding="utf-8"))
    return {name: Result(**fields) for name, fields in plain.items()}


def figure(number: float) -> str:
    """Return a speed-up as pages show it: 12.3, 1.23."""
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def publish(
    sentences: Sequence[Sentence], results: Mapping[str, Result], names: Sequence[str]
) -> dict[str, Result]:
    """Write the last figures of some claims into the pages. Return the results with them as
    published.

    Raises:
        ClaimError: a page does not have a sentence on one line.
    """
    new = {
        name: replace(result, published=figure(result.now))
        if name in names and result.now is not None
        else result
        for name, result in results.items()
    }
    before, after = _published(results), _published(new)
    contents: dict[str, str] = {}
    for sentence in sentences:
        old, text = sentence.text(before), sentence.text(after)
        if old == text:
            continue
        page = sentence.page
        content = contents.get(page) or (ROOT / page).read_text(encoding="utf-8")
        if content.count(old) != 1:
            raise ClaimError(f"{page} does not have once, on one line: {old}")
        contents[page] = content.replace(old, text)
    for page, content in contents.items():
        (ROOT / page).write_text(content, encoding="utf-8")
    return new


def page(
    claims: Sequence[Claim], measurements: Sequence[Measurement], results: Mapping[str, Result]
) -> str:
    """Return the page of docs."""
    here = [claim for claim in claims if isinstance(claim.by, Speedup)]
    lines = [
        TOP,
        "| claim | published | band | now | holds | ours, s | other, s |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {' | '.join((*_cells(claim, results), *_seconds(results[claim.name])))} |"
            for claim in here
        ),
        MIDDLE,
        "| command | load |",
        "|---|---|",
        *(f"| `{each.command}` | {_load(each, here, results)} |" for each in measurements),
        ELSEWHERE,
        "| claim | published | stored | result | why not here | command |",
        "|---|---|---|---|---|---|",
        *(
            f"| {claim.what} | {results[claim.name].published} | {_stored(claim.by):g} "
            f"| [{Path(claim.by.file).name}](../{claim.by.file}) | {claim.by.reason} "
            f"| `{claim.by.command}` |"
            for claim in claims
            if isinstance(claim.by, Elsewhere)
        ),
    ]
    return "\n".join(lines) + "\n"


def terminal(
    claims: Sequence[Claim], measurements: Sequence[Measurement], results: Mapping[str, Result]
) -> list[str]:
    """Return the table for a terminal."""
    commands = {each.name: each.command for each in measurements}
    rows = [("claim", "published", "band", "now", "holds", "command")]
    for claim in claims:
        by = claim.by
        command = commands[by.measurement] if isinstance(by, Speedup) else by.command
        rows.append((*_cells(claim, results), command))
    return aligned(rows)


def failed(claims: Sequence[Claim], results: Mapping[str, Result]) -> list[str]:
    """Return the names of the claims that do not hold, or were not measured."""
    return [claim.name for claim in claims if not _holds(claim, results)]


def _published(results: Mapping[str, Result]) -> dict[str, str]:
    return {name: result.published for name, result in results.items()}


def _now(claim: Claim, results: Mapping[str, Result]) -> float | None:
    if isinstance(claim.by, Elsewhere):
        return _stored(claim.by)
    return results[claim.name].now


def _stored(how: Elsewhere) -> float:
    return how.stored((ROOT / how.file).read_text(encoding="utf-8"))


def _holds(claim: Claim, results: Mapping[str, Result]) -> bool:
    now = _now(claim, results)
    return now is not None and claim.holds(results[claim.name].published, now)


def _cells(claim: Claim, results: Mapping[str, Result]) -> tuple[str, str, str, str, str]:
    published, now = results[claim.name].published, _now(claim, results)
    return (
        claim.what,
        published,
        " to ".join(map(figure, claim.band(published))),
        "not measured" if now is None else figure(now),
        "yes" if _holds(claim, results) else "no",
    )


def _seconds(result: Result) -> tuple[str, str]:
    if result.ours_s is None or result.other_s is None:
        return "", ""
    return f"{result.ours_s:.3f}", f"{result.other_s:.3f}"


def _load(each: Measurement, claims: Sequence[Claim], results: Mapping[str, Result]) -> str:
    loads = [
        results[claim.name].load
        for claim in claims
        if isinstance(claim.by, Speedup)
        and claim.by.measurement == each.name
        and results[claim.name].now is not None
    ]
    return f"{loads[0]:.1f}" if loads else "not measured"
