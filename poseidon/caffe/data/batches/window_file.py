"""R-CNN's window files: images with labelled windows.

Law: every line is checked, and an error names the line. The format, for each image:

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

from poseidon.caffe.data.batches.lists import checked_label, read_lines
from poseidon.errors import DataError

HEADER_LINES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageWindow:
    """A rectangle in an image, including its corners."""

    image: int
    label: int
    corners: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFile:
    """The content of a window file.

    Attributes:
        source: the file.
        images: the paths of the images.
        foreground: the windows that overlap an object enough, labelled with its class.
        background: the windows that overlap objects little, with label 0.
    """

    source: Path
    images: tuple[Path, ...]
    foreground: tuple[ImageWindow, ...]
    background: tuple[ImageWindow, ...]


def read_windows(
    source: Path, root: str, *, fg_threshold: float, bg_threshold: float
) -> WindowFile:
    """Read a window file.

    Args:
        source: the file.
        root: the prefix of each path.
        fg_threshold: windows with at least this overlap are foreground.
        bg_threshold: other windows with less than this overlap are background. The rest is ignored.

    Raises:
        DataError: the file cannot be read or does not have this format.
    """
    lines = read_lines(source, "window file")
    images: list[Path] = []
    foreground: list[ImageWindow] = []
    background: list[ImageWindow] = []
    for path, rows in _blocks(source, lines):
        for number, label, overlap, corners in rows:
            if overlap >= fg_threshold:
                if label < 1:
                    raise DataError(
                        f"{source}:{number}: a foreground window has class {label}, expected at "
                        "least 1"
                    )
                foreground.append(ImageWindow(image=len(images), label=label, corners=corners))
            elif overlap < bg_threshold:
                background.append(ImageWindow(image=len(images), label=0, corners=corners))
        images.append(Path(root + path))
    return WindowFile(
        source=source,
        images=tuple(images),
        foreground=tuple(foreground),
        background=tuple(background),
    )


def window_blocks(source: Path, lines: Sequence[str]) -> list[tuple[str, str]]:
    """Split a window file into images, each with its path and the text of its block.

    Args:
        source: the file, for error messages.
        lines: the lines of the file, with or without blank ones.

    Raises:
        DataError: the file does not have this format.
    """
    kept = [line for line in lines if line.strip()]
    blocks = []
    index = 0
    for path, rows in _blocks(source, kept):
        end = index + HEADER_LINES + len(rows)
        blocks.append((path, "".join(f"{line}\n" for line in kept[index:end])))
        index = end
    return blocks


Row = tuple[int, int, float, tuple[int, int, int, int]]


def _blocks(source: Path, lines: Sequence[str]) -> Iterator[tuple[str, list[Row]]]:
    """Yield the path of each image and its windows with their lines."""
    index = 0
    while index < len(lines):
        if not lines[index].strip():
            index += 1
            continue
        if not lines[index].startswith("#") or index + HEADER_LINES > len(lines):
            raise DataError(
                f"{source}:{index + 1}: expected '# <index>', a path, three sizes and a count, "
                "one a line"
            )
        try:
            count = int(lines[index + HEADER_LINES - 1])
        except ValueError:
            raise DataError(
                f"{source}:{index + HEADER_LINES}: expected the number of windows"
            ) from None
        first = index + HEADER_LINES
        if count < 0 or first + count > len(lines):
            raise DataError(f"{source}:{first}: expected {count} windows after this line")
        rows = [_row(source, number + 1, lines[number]) for number in range(first, first + count)]
        yield lines[index + 1].strip(), rows
        index = first + count


def _row(source: Path, number: int, line: str) -> Row:
    try:
        label, overlap, x1, y1, x2, y2 = (float(word) for word in line.split())
        whole = checked_label(int(label), f"{source}:{number}")
        return number, whole, overlap, (int(x1), int(y1), int(x2), int(y2))
    except (ValueError, OverflowError):  # not six, not numbers, or infinite
        raise DataError(
            f"{source}:{number}: expected class, overlap and four corners, found '{line[:80]}'"
        ) from None
