"""The code uses the terms of docs/glossary.md: words that a term has replaced do not come back in names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

REPLACED = {
    **dict.fromkeys(("tell", "tells", "told", "say", "says", "said"), "send, report, notify, log or print"),
    **dict.fromkeys(("hear", "hears", "heard"), "receive"),
    **dict.fromkeys(("meeting", "meetings", "attendance"), "rendezvous or collection"),
    **dict.fromkeys(("wish", "wishes"), "request"),
    **dict.fromkeys(("neighbour", "neighbours"), "shared memory"),
    **dict.fromkeys(("sibling", "siblings"), "leader, follower or local group"),
    "doorkeeper": "authenticator",
    "foretold": "predicted",
    "patience": "timeout",
    "pulse": "heartbeat or watchdog",
}
"""Each word with the term in its place."""


def names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module defines: functions, classes, arguments, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def words(name: str) -> list[str]:
    """Return the words of a name: `_tellAll_ranks` -> tell, all, ranks."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def replaced(source: str) -> set[str]:
    """Return the names of a module that have a replaced word, each with the term in its place."""
    return {
        f"{name}: {REPLACED[word]}"
        for name in names(ast.parse(source))
        for word in words(name)
        if word in REPLACED
    }


def test_a_replaced_word_is_found_in_any_name() -> None:
    source = "class FarPulse:\n    def tell_all(self, siblings):\n        self._heard, x = 1, 'told'\n"
    assert {found.split(":")[0] for found in replaced(source)} == {
        "FarPulse",
        "tell_all",
        "siblings",
        "_heard",
    }


def test_names_have_the_terms_of_the_glossary() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {found}"
        for package in ("poseidon", "ps_server")
        for path in sorted((ROOT / package).rglob("*.py"))
        if not path.name.endswith("_pb2.py")
        for found in sorted(replaced(path.read_text(encoding="utf-8")))
    ]
    assert not wrong, "\n".join(wrong)
