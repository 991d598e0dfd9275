"""Drawings that a browser zooms: self-contained, well-formed, and in a real browser they move."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from poseidon.pycaffe.zoom import page, zoomable
from tests.support import needs
from tests.support.needs import find

SVG = b"""<?xml version="1.0" encoding="UTF-8" standalone="no"?>
<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN"
 "http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd">
<svg width="400pt" height="200pt"
 viewBox="0.00 0.00 400.00 200.00" xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">
<g id="graph0"><polygon fill="white" points="0,0 400,0 400,200 0,200"/><text x="10" y="50">conv1 &amp; pool</text></g>
</svg>
"""
SPACE = "{http://www.w3.org/2000/svg}"


def test_the_drawing_is_well_formed_and_fetches_nothing() -> None:
    root = ElementTree.fromstring(zoomable(SVG, 'A "net" & more'))
    assert (root.tag, root.get("viewBox")) == (f"{SPACE}svg", "0.00 0.00 400.00 200.00")
    assert (root.get("aria-label") or "").startswith('A "net" & more. Zoom: wheel')
    (script,) = root.iter(f"{SPACE}script")
    assert script.attrib == {}
    assert "addEventListener" in (script.text or "")
    for content in (zoomable(SVG, "net"), page(SVG, "net")):
        assert b"src=" not in content
        assert b"@import" not in content
        assert b"fetch(" not in content


def test_the_page_has_a_title_and_buttons() -> None:
    text = page(SVG, "<net>").decode()
    assert text.startswith("<!doctype html>")
    assert "<title>&lt;net&gt;</title>" in text
    assert text.count('<button type="button" data-key=') == 3
    assert "<?xml" not in text


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield a headless Chromium."""
    needs.require("browser")
    webdriver = pytest.importorskip("selenium.webdriver")
    service = pytest.importorskip("selenium.webdriver.chrome.service")
    options = webdriver.ChromeOptions()
    options.binary_location = find("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1000,800"):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    driver = webdriver.Chrome(options=options, service=service.Service(find("chromedriver")))
    yield driver
    driver.quit()


@pytest.mark.needs("browser")
@pytest.mark.parametrize("kind", ["svg", "html"])
def test_keys_wheel_and_pointer_move_the_drawing(browser: Any, tmp_path: Path, kind: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

    target = tmp_path / f"net.{kind}"
    target.write_bytes(zoomable(SVG, "net") if kind == "svg" else page(SVG, "net"))
    browser.get(target.as_uri())
    svg = browser.find_element("css selector", "svg")

    def view() -> list[float]:
        shown = browser.execute_script("return arguments[0].getAttribute('viewBox')", svg)
        return [float(number) for number in shown.split()]

    def press(keys: str) -> list[float]:
        ActionChains(browser).send_keys(keys).perform()
        return view()

    assert svg.size["width"] > 900, "it fills the window"
    x, y, width, height = press("+")
    assert (width, height) == pytest.approx((400 / 1.4, 200 / 1.4))
    assert (x + width / 2, y + height / 2) == pytest.approx((200, 100)), "around the centre"
    assert press("\ue014")[0] == pytest.approx(x + 0.15 * width)  # arrow right
    assert press("\ue015")[1] == pytest.approx(y + 0.15 * height)  # arrow down
    assert press("0") == [0, 0, 400, 200]
    ActionChains(browser).scroll_from_origin(ScrollOrigin.from_element(svg, 100, 0), 0, -200).perform()
    assert view()[2] < 400
    press("0")
    ActionChains(browser).drag_and_drop_by_offset(svg, 100, 0).perform()
    assert view()[0] < 0
    assert view()[2] == 400
    if kind == "html":
        browser.find_element("css selector", "button[data-key='0']").click()
        assert view() == [0, 0, 400, 200]
    assert press("-----------------------------------------")[2] == pytest.approx(800), "it does not get lost"
