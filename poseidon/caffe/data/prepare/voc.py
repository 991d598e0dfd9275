"""Databases and window files of a folder in the form of PASCAL VOC, as SSD's
create_list.sh and create_data.sh make them.

Law: a year is a folder with `ImageSets/Main`, `Annotations` and `JPEGImages`. A part, such as
trainval, has the images that `ImageSets/Main/<part>.txt` of all years names. Parts for training are
shuffled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from poseidon.caffe.data.batches.lists import read_lines
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import label_map_text, labels_of, read_label_map
from poseidon.caffe.data.prepare.annoset import (
    AnnotationFormat,
    Annotations,
    convert_annoset,
    read_marked,
)
from poseidon.caffe.data.prepare.imageset import Conversion
from poseidon.caffe.data.staging import Report, silent
from poseidon.errors import DataError

CLASSES = (
    *(
        "aeroplane",
        "bicycle",
        "bird",
        "boat",
        "bottle",
        "bus",
        "car",
        "cat",
        "chair",
        "cow",
        "diningtable",
    ),
    *("dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
SETS = Path("ImageSets", "Main")
# The parts that are made where none are named: the first group of which a part is there.
USUAL = (("trainval", "test"), ("train", "val"))
SUFFIXES = (".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG")


@dataclass(frozen=True, slots=True, kw_only=True)
class VocRequest:
    """What to make.

    Attributes:
        root: a folder of years, such as VOCdevkit, or a year.
        folder: the folder for the files, which is created.
        parts: the parts; empty: trainval and test, or else train and val.
        label_map: a file with the label of each name; None: VOC's labels, or, where the annotations
            have different names, these in alphabetical order.
    """

    root: Path
    folder: Path
    backend: Backend = Backend.LMDB
    parts: tuple[str, ...] = ()
    label_map: Path | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class VocPart:
    """A part that was made: its database and the number of its images."""

    database: Path
    images: int


def convert_voc(request: VocRequest, *, report: Report = silent) -> tuple[Path, list[VocPart]]:
    """Make a list, a name_size_file, a window file and a database of each part, and a label map.
    Return the label map and the parts.

    The files are `<part>.txt`, `<part>_name_size.txt`, `<part>_windows.txt`,
    `<set>_<part>_<backend>` and `labelmap_voc.prototxt`; <set> is VOC0712 for the years VOC2007 and
    VOC2012, as in SSD's definitions.

    Args:
        report: called with the number of records written, for a progress bar.

    Raises:
        DataError: a folder, a part, an image or an annotation is missing, or a database exists.
    """
    base, years = _years(request.root)
    lists = {part: _lines(base, years, part) for part in _parts(base, years, request.parts)}
    request.folder.mkdir(parents=True, exist_ok=True)
    label_map = request.label_map or _write_label_map(request.folder, base, lists.values())
    annotations = Annotations(form=AnnotationFormat.XML, label_map=label_map)
    labels = labels_of(read_label_map(label_map))
    made = []
    for part, lines in lists.items():
        source = request.folder / f"{part}.txt"
        text = "".join(f"{line}\n" for line in lines)
        source.write_text(text, encoding="utf-8", errors="surrogateescape")
        database = request.folder / f"{_set_name(years)}_{part}_{request.backend.name.lower()}"
        conversion = Conversion(encoded=True, shuffle=part.startswith("train"), seed=request.seed)
        sizes = request.folder / f"{part}_name_size.txt"
        images = convert_annoset(
            f"{base}/",
            source,
            database,
            request.backend,
            conversion,
            annotations,
            name_size_file=sizes,
            report=report,
        )
        windows = request.folder / f"{part}_windows.txt"
        windows.write_text(
            _windows(base, lines, labels), encoding="utf-8", errors="surrogateescape"
        )
        made.append(VocPart(database, images))
    return label_map, made


def _years(root: Path) -> tuple[Path, list[str]]:
    """Return the folder of the years, and their names."""
    if (root / SETS).is_dir():
        whole = root.resolve()
        return whole.parent, [whole.name]
    years = (
        sorted(path.name for path in root.iterdir() if (path / SETS).is_dir())
        if root.is_dir()
        else []
    )
    if not years:
        raise DataError(
            f"{root} has no {SETS}, and no folder in it has: expected a folder of PASCAL VOC, "
            "such as VOCdevkit with VOC2007"
        )
    return root, years


def _parts(base: Path, years: Sequence[str], wanted: tuple[str, ...]) -> tuple[str, ...]:
    for group in (wanted,) if wanted else USUAL:
        found = tuple(
            part
            for part in group
            if any((base / year / SETS / f"{part}.txt").is_file() for year in years)
        )
        missing = [part for part in group if part not in found]
        if found and not (wanted and missing):
            return found
    names = ", ".join(f"{part}.txt" for part in (missing if wanted else ("trainval", "train")))
    raise DataError(f"no {SETS} of {', '.join(years)} in {base} has {names}")


def _lines(base: Path, years: Sequence[str], part: str) -> list[str]:
    """Return a part's list: an image and its annotation a line, as paths below `base`."""
    lines = []
    for year in years:
        source = base / year / SETS / f"{part}.txt"
        if not source.is_file():
            continue
        for number, line in enumerate(read_lines(source, "image set"), 1):
            name = next(iter(line.split()), "")
            if name:
                stem = Path(year, "JPEGImages", name)
                image = next((s for s in SUFFIXES if Path(f"{base / stem}{s}").is_file()), None)
                if image is None:
                    raise DataError(
                        f"{source}:{number}: there is no image {base / stem}.jpg or .png"
                    )
                lines.append(f"{stem}{image} {Path(year, 'Annotations', name)}.xml")
    if not lines:
        raise DataError(f"the part '{part}' of {base} has no images")
    return lines


def _windows(base: Path, lines: Iterable[str], labels: Mapping[str, int]) -> str:
    """Return the text of a window file: the objects that are not difficult, in
    pixels from 0, as py-faster-rcnn counts them.
    """
    text = []
    for number, line in enumerate(lines):
        image, annotation = (base / name for name in line.split())
        found = read_marked(annotation, AnnotationFormat.XML)
        if found.size is None:
            raise DataError(f"the annotation {annotation} has no size with height and width")
        kept = [marked for marked in found.marked if not marked.difficult]
        text += [f"# {number}", f"{image.resolve()}", "3", *map(str, found.size), f"{len(kept)}"]
        for marked in kept:
            corners = (str(max(int(value) - 1, 0)) for value in marked.corners)
            text.append(f"{labels[str(marked.label)]} 1 {' '.join(corners)}")
    return "".join(f"{row}\n" for row in text)


def _write_label_map(folder: Path, base: Path, lists: Iterable[list[str]]) -> Path:
    """Write the label map of VOC's classes, or of other names in the annotations."""
    names: set[str] = set()
    for lines in lists:
        for line in lines:
            found = read_marked(base / line.split()[1], AnnotationFormat.XML)
            names |= {str(marked.label) for marked in found.marked}
    path = folder / "labelmap_voc.prototxt"
    classes = CLASSES if names <= set(CLASSES) else sorted(names)
    path.write_text(label_map_text(classes), encoding="utf-8")
    return path


def _set_name(years: Sequence[str]) -> str:
    """Return VOC0712 for VOC2007 and VOC2012; for other folders their names."""
    if all(len(year) == 7 and year.startswith("VOC") and year[3:].isdecimal() for year in years):
        return "VOC" + "".join(year[5:] for year in years)
    return "_".join(years)
