"""The documentation site: it is built without a warning, its references are whole, and it
fetches nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType

import pytest

import poseidon
from poseidon.caffe.layers.registry import known_types
from poseidon.cli.main import COMMANDS
from tests.support.needs import find
from tests.support.polling import until
from website.blocks import sources

ROOT = Path(__file__).parents[2]


def hooks() -> ModuleType:
    """The module of the hooks, which MkDocs loads by its path."""
    spec = importlib.util.spec_from_file_location("pages", ROOT / "website" / "pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    # --quiet would hide warnings from --strict
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    command += ["--config-file", str(ROOT / "website" / "mkdocs.yml"), "--site-dir", str(folder)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.timeout(360)
@pytest.mark.processes
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    loaded = re.compile(
        r'<(?:script|img)[^>]+src="?(https?:)?//|<link[^>]+rel="?(?:stylesheet|preload)"?[^>]+href="?https?:'
    )
    assert [page.name for page in pages if loaded.search(page.read_text(encoding="utf-8"))] == []
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert any(entry["location"].startswith("local_steps.html") for entry in index["docs"])


@pytest.mark.timeout(360)
@pytest.mark.processes
@pytest.mark.needs("browser")
def test_the_search_finds_flags(site: Path) -> None:
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = find("chromium") or ""
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--window-size=1280,900",
    ):
        options.add_argument(argument)
    service = importlib.import_module("selenium.webdriver.chrome.service").Service(
        find("chromedriver")
    )
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        browser = webdriver.Chrome(options=options, service=service)
        try:
            browser.get(f"http://127.0.0.1:{server.server_port}/")
            field = browser.find_element("css selector", "input.md-search__input")
            field.click()
            field.send_keys("--compress")
            found = ".md-search-result__item a[href*='compression.html']"
            until(
                lambda: bool(browser.find_elements("css selector", found)),
                "a page about --compress",
                60.0,
            )
        finally:
            browser.quit()
            server.shutdown()


@pytest.mark.timeout(360)
@pytest.mark.processes
def test_references_name_everything(site: Path) -> None:
    commands = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    assert all(f"usage: poseidon {name} " in commands for name in COMMANDS)
    layers = (site / "reference" / "layers.html").read_text(encoding="utf-8")
    assert all(f"#{kind.lower()}" in layers for kind in known_types())
    python = (site / "reference" / "python.html").read_text(encoding="utf-8")
    assert all(
        f'id="{name.lower()}"' in python for name in poseidon.__all__ if name != "__version__"
    )


def test_links_follow_pages_and_fail_where_nothing_is() -> None:
    linked, pages = hooks().linked, sources()
    text = "[a](../README.md#install) [b](../examples/resnet50) [c](../setup.py) [d](https://x.y) ![e](trace_iteration.svg)"
    assert linked(text, "caffe2.md", "docs/caffe2.md", pages) == (
        "[a](index.md#install) [b](examples/resnet50/README.md) c (`setup.py`) [d](https://x.y) "
        "![e](trace_iteration.svg)"
    )
    with pytest.raises(ValueError, match=r"docs/caffe2.md: the link to absent.md leads nowhere"):
        linked("[a](absent.md)", "caffe2.md", "docs/caffe2.md", pages)
