"""Lists of records: their text files, R-CNN's window files, and the order of reading.

Law: stream record r is record r mod n of epoch r div n. With `shuffle` each epoch has its own
permutation, drawn from the seed and the epoch, so that all workers of a job and a resumed job use
the same one.

Labels in the text files of a user: lists of images, windows and annotations.

Law: a label is a whole number of 32 bits with a sign, as in a Datum.

R-CNN's window files: images with labelled windows.

Law: every line is checked, and an error names the line. The format, for each image:

    # <index>
    <path>
    <channels> <height> <width> <number of windows>
    <class> <overlap> <x1> <y1> <x2> <y2>       one a window

Any whitespace may stand between the numbers, as between words of C++'s streams.

Source: caffe's WindowDataLayer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from poseidon.base.foreign_files import read_definition
from poseidon.base.text_files import text_of
from poseidon.caffe.data.batches.prefetch import draw
from poseidon.errors import DataError

# Separates these numbers from the numbers of crops, mirrors and skips, which start at -1.
SALT = 1 << 62
LARGEST_LIST = 4 << 30
Indices = npt.NDArray[np.int64]


def read_lines(source: Path, what: str) -> list[str]:
    """Read the lines of a text file; names of files in it may have any encoding.

    Args:
        what: its description for the error, such as `window file`.

    Raises:
        DataError: the file cannot be read or is not text.
    """
    return read_text(source, what).removesuffix("\n").split("\n")


def read_text(source: Path, what: str) -> str:
    """Read a text file; see `read_lines`."""
    try:
        text = text_of(read_definition(source, most_bytes=LARGEST_LIST))
    except OSError as error:
        raise DataError(f"cannot read the {what} {source}: {error.strerror}") from error
    if text is None:
        raise DataError(f"cannot read the {what} {source}: it is not text")
    return text


def read_list_lines(source: Path, what: str = "list") -> list[tuple[int, str]]:
    """Read the lines of a list that are not blank, each with its number from 1.

    Raises:
        DataError: the file cannot be read, is not text, or has no such line.
    """
    lines = [(at, line) for at, line in enumerate(read_lines(source, what), 1) if line.strip()]
    if not lines:
        raise DataError(f"the {what} {source} is empty")
    return lines


def permutation(seed: int, number: int, count: int) -> Indices:
    """Return permutation `number` of 0 .. count - 1."""
    # Each permutation has its own seed, so that no two use the same keys at shifted indices.
    own = int(draw(seed, np.array([SALT + number]), 1)[0, 0])
    keys = draw(seed ^ own << 32, np.arange(count, dtype=np.int64), 1)[:, 0]
    return np.argsort(keys, kind="stable")


class RecordOrder:
    """The map from stream records to the records of a list, which may consist of groups (files).

    Args:
        sizes: the number of records of each group, all >= 1.
        shuffle: permute the groups, and the records in each group, in each epoch.
    """

    def __init__(self, sizes: Sequence[int], *, shuffle: bool, seed: int) -> None:
        self._sizes = list(sizes)
        self._starts = np.concatenate(([0], np.cumsum(self._sizes)))
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = -1
        self._order: Indices | None = None

    def __len__(self) -> int:
        return int(self._starts[-1])

    def record(self, stream: int) -> int:
        """Return the index over all groups of stream record `stream` >= 0."""
        number, within = divmod(stream, len(self))
        if not self._shuffle:
            return within
        if number != self._epoch or self._order is None:
            self._order = self._epoch_order(number)
            self._epoch = number
        return int(self._order[within])

    def _epoch_order(self, number: int) -> Indices:
        groups = permutation(self._seed, number, len(self._sizes))
        # Each group has its own permutation in each epoch.
        return np.concatenate(
            [
                self._starts[group]
                + permutation(
                    self._seed, 1 + number * len(self._sizes) + int(group), self._sizes[group]
                )
                for group in groups
            ]
        )

    def group(self, record: int) -> tuple[int, int]:
        """Return the group of a record, and its index in the group."""
        group = int(np.searchsorted(self._starts, record, side="right")) - 1
        return group, record - int(self._starts[group])


_INTEGER = re.compile(r"[+-]?[0-9]+")
LEAST, MOST = -(1 << 31), (1 << 31) - 1
_MOST_DIGITS = 4000  # Python converts no longer text


def is_integer(text: str) -> bool:
    """Return whether a text is a whole number of any size."""
    return _INTEGER.fullmatch(text) is not None


def read_label(text: str, where: str) -> int | None:
    """Return a text as a label; None if it is not a whole number.

    Args:
        text: of the label alone.
        where: file and line, for the error.

    Raises:
        DataError: it does not fit into 32 bits.
    """
    return checked_label(int(text[:_MOST_DIGITS]), where) if is_integer(text) else None


def checked_label(label: int, where: str) -> int:
    """Return a label that fits into 32 bits.

    Args:
        where: file and line, for the error.

    Raises:
        DataError: it does not fit.
    """
    if not LEAST <= label <= MOST:
        raise DataError(f"{where}: the label {label} is out of range, expected {LEAST} to {MOST}")
    return label


SIZES, COLUMNS = 4, 6  # channels, height, width and the number of windows; of a window


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
    for path, rows, _, _ in _blocks(source, lines):
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
        lines: the lines of the file, with or without blank ones.

    Raises:
        DataError: the file does not have this format.
    """
    kept = [line for line in lines if line.strip()]
    return [
        (path, "".join(f"{line}\n" for line in kept[start:end]))
        for path, _, start, end in _blocks(source, kept)
    ]


Row = tuple[int, int, float, tuple[int, int, int, int]]


def _blocks(source: Path, lines: Sequence[str]) -> Iterator[tuple[str, list[Row], int, int]]:
    """Yield the path of each image, its windows with their lines, and the range of its lines."""
    start = 0
    while start < len(lines):
        if not lines[start].strip():
            start += 1
            continue
        if not lines[start].startswith("#") or start + 1 == len(lines):
            raise DataError(
                f"{source}:{start + 1}: expected '# <index>' and, on the next line, a path"
            )
        following = range(start + 2, len(lines))
        end = next((at for at in following if lines[at].startswith("#")), len(lines))
        words = [(at + 1, word) for at in range(start + 2, end) for word in lines[at].split()]
        yield lines[start + 1].strip(), _rows(source, start + 2, words), start, end
        start = end


def _rows(source: Path, number: int, words: Sequence[tuple[int, str]]) -> list[Row]:
    """Return the windows in the words after the path, which is line `number`."""
    if len(words) < SIZES:
        raise DataError(f"{source}:{number}: expected three sizes and a count after this path")
    at, text = words[SIZES - 1]
    if not (text.isdecimal() and is_integer(text)):
        raise DataError(f"{source}:{at}: expected the number of windows, found '{text[:80]}'")
    rest = words[SIZES:]
    if len(rest) != COLUMNS * int(text[:_MOST_DIGITS]):
        raise DataError(
            f"{source}:{at}: expected {text[:80]} windows of {COLUMNS} numbers, found "
            f"{len(rest)} numbers"
        )
    return [
        _row(source, rest[first][0], [word for _, word in rest[first : first + COLUMNS]])
        for first in range(0, len(rest), COLUMNS)
    ]


def _row(source: Path, number: int, words: Sequence[str]) -> Row:
    try:
        label, overlap, x1, y1, x2, y2 = map(float, words)
        whole = checked_label(int(label), f"{source}:{number}")
        return number, whole, overlap, (int(x1), int(y1), int(x2), int(y2))
    except (ValueError, OverflowError):  # not numbers, or infinite
        raise DataError(
            f"{source}:{number}: expected class, overlap and four corners, found "
            f"'{' '.join(words)[:80]}'"
        ) from None
