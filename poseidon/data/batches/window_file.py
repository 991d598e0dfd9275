"""R-CNN's window files: pictures, and windows in them that overlap objects more or less.

Law: every line is checked, and a mistake is told with its line. The form, for each picture:

    # <index>
    <path>
    <channels>
    <height>
    <width>
    <number of windows>
    <class> <overlap> <x1> <y1> <x2> <y2>       one a window

Source: caffe's WindowDataLayer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from poseidon.errors import DataError

HEADER_LINES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A part of a picture, its corners included."""

    picture: int
    label: int
    corners: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFile:
    """What a window file says.

    Attributes:
        source: the file.
        pictures: paths.
        foreground: windows that overlap an object enough, with its class.
        background: windows that do not, with label 0.
    """

    source: Path
    pictures: tuple[Path, ...]
    foreground: tuple[Window, ...]
    background: tuple[Window, ...]


def read_windows(source: Path, root: str, *, fg_threshold: float, bg_threshold: float) -> WindowFile:
    """Read a window file.

    Args:
        source: the file.
        root: put before each path as it is.
        fg_threshold: windows that overlap an object at least so much are foreground.
        bg_threshold: others that overlap less than this are background; the rest is left out.

    Raises:
        DataError: the file cannot be read or is not of this form.
    """
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise DataError(f"cannot read the window file {source}: {why}") from error
    pictures: list[Path] = []
    foreground: list[Window] = []
    background: list[Window] = []
    for path, rows in _blocks(source, text.splitlines()):
        for number, label, overlap, corners in rows:
            if overlap >= fg_threshold:
                if label < 1:
                    raise DataError(
                        f"{source}:{number}: a foreground window has class {label}, expected at least 1"
                    )
                foreground.append(Window(picture=len(pictures), label=label, corners=corners))
            elif overlap < bg_threshold:
                background.append(Window(picture=len(pictures), label=0, corners=corners))
        pictures.append(Path(root + path))
    return WindowFile(
        source=source, pictures=tuple(pictures), foreground=tuple(foreground), background=tuple(background)
    )


def window_blocks(source: Path, lines: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pictures of a window file: each with its path and the text of its block.

    Args:
        source: the file, for messages.
        lines: those of the file; blank ones may be missing.

    Raises:
        DataError: it is not of this form.
    """
    kept = [line for line in lines if line.strip()]
    blocks = []
    at = 0
    for path, rows in _blocks(source, kept):
        end = at + HEADER_LINES + len(rows)
        blocks.append((path, "".join(f"{line}\n" for line in kept[at:end])))
        at = end
    return blocks


Row = tuple[int, int, float, tuple[int, int, int, int]]


def _blocks(source: Path, lines: Sequence[str]) -> Iterator[tuple[str, list[Row]]]:
    """Yield each picture's path and windows, with their lines."""
    at = 0
    while at < len(lines):
        if not lines[at].strip():
            at += 1
            continue
        if not lines[at].startswith("#") or at + HEADER_LINES > len(lines):
            raise DataError(
                f"{source}:{at + 1}: expected '# <index>', a path, three sizes and a count, one a line"
            )
        try:
            count = int(lines[at + HEADER_LINES - 1])
        except ValueError:
            raise DataError(f"{source}:{at + HEADER_LINES}: expected the number of windows") from None
        first = at + HEADER_LINES
        if count < 0 or first + count > len(lines):
            raise DataError(f"{source}:{first}: says {count} windows, which do not follow")
        rows = [_row(source, number + 1, lines[number]) for number in range(first, first + count)]
        yield lines[at + 1].strip(), rows
        at = first + count


def _row(source: Path, number: int, line: str) -> Row:
    try:
        label, overlap, x1, y1, x2, y2 = (float(word) for word in line.split())
        return number, int(label), overlap, (int(x1), int(y1), int(x2), int(y2))
    except (ValueError, OverflowError):  # not six, not numbers, or beyond all whole ones
        raise DataError(
            f"{source}:{number}: expected class, overlap and four corners, found '{line[:80]}'"
        ) from None
