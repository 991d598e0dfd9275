"""SVG drawings that a browser can zoom and pan, alone or as a page.

Law: the script is inside the file, and nothing is fetched. Without scripts the drawing is still.
"""

from __future__ import annotations

import html
import re

KEYS = "Zoom: wheel, double click, + and -. Move: drag, arrow keys. Fit: 0."
LOWER = 1.5
"""Points by which text is lower than dot places it, which leaves no space above it in a browser's fonts."""
_SCRIPT = """
(function () {
  const svg = document.currentScript.closest("svg");
  const page = document.body && document.body.dataset.zoom !== undefined;
  if (svg !== document.documentElement && !page) return;  // part of another document
  const full = svg.viewBox.baseVal, fit = [full.x, full.y, full.width, full.height];
  let view = fit.slice();
  const pointers = new Map();

  function show(next) {
    view = next;
    svg.setAttribute("viewBox", view.join(" "));
  }
  function place(x, y) {
    return new DOMPoint(x, y).matrixTransform(svg.getScreenCTM().inverse());
  }
  function zoom(factor, at) {
    const x = at ? at.x : view[0] + view[2] / 2, y = at ? at.y : view[1] + view[3] / 2;
    const least = fit[2] / 200 / view[2], most = fit[2] * 2 / view[2];
    const by = Math.min(Math.max(1 / factor, least), most);
    show([x - (x - view[0]) * by, y - (y - view[1]) * by, view[2] * by, view[3] * by]);
  }
  function move(x, y) { show([view[0] + x, view[1] + y, view[2], view[3]]); }
  const step = 0.15, keys = {
    "+": () => zoom(1.4), "=": () => zoom(1.4), "-": () => zoom(1 / 1.4), "_": () => zoom(1 / 1.4),
    "0": () => show(fit), "Home": () => show(fit),
    "ArrowLeft": () => move(-step * view[2], 0), "ArrowRight": () => move(step * view[2], 0),
    "ArrowUp": () => move(0, -step * view[3]), "ArrowDown": () => move(0, step * view[3]),
    "PageUp": () => move(0, -view[3]), "PageDown": () => move(0, view[3])
  };

  svg.setAttribute("width", "100%");
  svg.setAttribute("height", "100%");
  svg.style.touchAction = "none";
  svg.style.cursor = "grab";
  document.addEventListener("keydown", function (event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    keys[event.key]();
    event.preventDefault();
  });
  document.querySelectorAll("button[data-key]").forEach(function (button) {
    button.addEventListener("click", keys[button.dataset.key]);
  });
  svg.addEventListener("wheel", function (event) {
    const lines = event.deltaMode === 1 ? 16 : 1;
    zoom(Math.exp(-event.deltaY * lines * (event.ctrlKey ? 0.01 : 0.002)), place(event.clientX, event.clientY));
    event.preventDefault();
  }, {passive: false});
  svg.addEventListener("dblclick", event => zoom(2, place(event.clientX, event.clientY)));
  svg.addEventListener("pointerdown", function (event) {
    pointers.set(event.pointerId, event);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", function (event) {
    const before = pointers.get(event.pointerId);
    if (!before) return;
    const other = [...pointers.values()].find(each => each.pointerId !== event.pointerId);
    if (other) {  // two fingers
      const far = at => Math.hypot(at.clientX - other.clientX, at.clientY - other.clientY);
      zoom(far(event) / Math.max(far(before), 1), place(other.clientX, other.clientY));
    } else {
      const from = place(before.clientX, before.clientY), to = place(event.clientX, event.clientY);
      move(from.x - to.x, from.y - to.y);
    }
    pointers.set(event.pointerId, event);
  });
  ["pointerup", "pointercancel"].forEach(name => svg.addEventListener(name, event => pointers.delete(event.pointerId)));
})();
"""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
html, body {{ height: 100%; margin: 0; background: white; }}
body {{ display: flex; flex-direction: column; font: 14px sans-serif; }}
header {{ display: flex; flex-wrap: wrap; gap: 0.5em; align-items: center; padding: 0.4em 0.8em; background: #eee; color: #222; }}
h1 {{ font-size: 1.1em; margin: 0 0.5em 0 0; }}
button {{ font: inherit; min-width: 2.2em; min-height: 2.2em; }}
main {{ flex: 1; min-height: 0; }}
@media print {{ header {{ display: none; }} }}
</style>
</head>
<body data-zoom>
<header><h1>{title}</h1>
<button type="button" data-key="+" aria-label="Zoom in">+</button>
<button type="button" data-key="-" aria-label="Zoom out">&minus;</button>
<button type="button" data-key="0">Fit</button>
<span>{keys}</span></header>
<main>
{svg}
</main>
</body>
</html>
"""


def zoomable(svg: bytes, title: str) -> bytes:
    """Return an SVG document of Graphviz with a script that zooms and pans it.

    Args:
        svg: the document.
        title: what it shows, for screen readers.
    """
    label = html.escape(f"{title}. {KEYS}", quote=True)
    text = re.sub(r'<g id="[^"]*" class="node">.*?</g>', _centred, svg.decode("utf-8"), flags=re.DOTALL)
    text = text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    head, end, tail = text.rpartition("</svg>")
    return f"{head}<script><![CDATA[{_SCRIPT}]]></script>\n{end}{tail}".encode()


def _centred(node: re.Match[str]) -> str:
    """Return a node with its lines of text in the middle: dot places them by the widths of another font."""
    corners = re.search(r'<polygon [^>]*points="([^"]*)"', node[0])
    if corners is None:
        return node[0]
    places = [float(pair.partition(",")[0]) for pair in corners[1].split()]
    middle = (min(places) + max(places)) / 2

    def line(found: re.Match[str]) -> str:
        return f'text-anchor="middle" x="{middle:.2f}" y="{float(found[1]) + LOWER:.2f}"'

    return re.sub(r'text-anchor="start" x="[^"]*" y="([^"]*)"', line, node[0])


def page(svg: bytes, title: str) -> bytes:
    """Return an HTML page with an SVG document of Graphviz, buttons and keys to zoom and pan it.

    Args:
        svg: the document.
        title: of the page.
    """
    drawing = re.sub(r"\A.*?(?=<svg )", "", zoomable(svg, title).decode("utf-8"), flags=re.DOTALL)
    return _PAGE.format(title=html.escape(title), keys=html.escape(KEYS), svg=drawing).encode()
