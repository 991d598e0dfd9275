"""Hooks of MkDocs: pages from outside docs/, references made from the code, and links between
all of them.

Law: a link whose target is on the site leads there; one to another file of the repository becomes
text. A link whose target does not exist ends the build.
"""

from __future__ import annotations

import inspect
import os
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import poseidon
from poseidon.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from website import blocks, prototxt

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_SCHEME = re.compile(r"[a-z]+:")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/, the references, and the script of the search."""
    script = (ROOT / "website" / "search.js").read_text(encoding="utf-8")
    files.append(File.generated(config, "search.js", content=script))
    for page, source in blocks.sources().items():
        if files.get_file_from_path(page) is None:
            content = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=content))
    for page, content in references().items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links lead to pages of the site."""
    pages = blocks.sources()
    here = page.file.src_uri
    source = pages.get(here)
    return markdown if source is None else linked(markdown, here, source, pages)


def linked(markdown: str, page: str, source: str, pages: dict[str, str]) -> str:
    """Return a page whose links lead to pages of the site.

    Args:
        markdown: of the page.
        page: its path on the site.
        source: its path in the repository.
        pages: see `blocks.sources`.

    Raises:
        ValueError: a target does not exist.
    """
    page_of = {path: name for name, path in pages.items()}

    def replace(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        path, hash_sign, anchor = target.partition("#")
        if not path or _SCHEME.match(target):
            return match.group()
        aim = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (ROOT / aim).exists():
            raise ValueError(f"{source}: the link to {target} leads nowhere")
        found = page_of.get(aim) or page_of.get(f"{aim}/README.md")
        if found is None:
            return text if text.startswith("`") else f"{text} (`{aim}`)"
        there = posixpath.relpath(found, posixpath.dirname(page) or ".")
        return f"{picture}[{text}]({there}{hash_sign}{anchor})"

    return _LINK.sub(replace, markdown)


def references() -> dict[str, str]:
    """Return the pages that are made from the code."""
    return {
        "reference/commands.md": "\n".join(_commands()),
        "reference/python.md": "\n".join(_python()),
        blocks.PAGE: blocks.report(
            found for page in blocks.shell_pages() for found in blocks.blocks(page)
        ),
        **prototxt.pages(),
    }


def _commands() -> Iterator[str]:
    yield "# Commands\n\nFlags take one dash or two.\n"
    os.environ.setdefault("COLUMNS", "80")
    for name, command in COMMANDS.items():
        yield f"## poseidon {name}\n\n```text\n{command.parser().help().rstrip()}\n```\n"


def _python() -> Iterator[str]:
    yield "# Python\n\nThe names of the package `poseidon`. `poseidon.pycaffe` and `poseidon.caffe2` have pages of their own.\n"
    for name in sorted(poseidon.__all__, key=str.lower):
        member = getattr(poseidon, name)
        if name == "__version__":
            continue
        yield f"## {name}\n\n```python\n{_signature(name, member)}\n```\n\n```text\n{inspect.getdoc(member) or ''}\n```\n"
        for part, method in _methods(member):
            yield f"### {name}.{part}\n\n```text\n{inspect.getdoc(method) or ''}\n```\n"


def _methods(member: Any) -> Iterator[tuple[str, Any]]:
    if inspect.isclass(member) and not issubclass(member, BaseException):
        for part, method in vars(member).items():
            if not part.startswith("_") and (
                inspect.isfunction(method) or isinstance(method, property)
            ):
                yield part, method


def _signature(name: str, member: Any) -> str:
    try:
        return f"{name}{inspect.signature(member)}".replace("'", "")
    except (TypeError, ValueError):
        return name
