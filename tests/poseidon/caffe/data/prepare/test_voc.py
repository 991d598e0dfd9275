"""convert_voc: databases of a folder in the form of PASCAL VOC."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from poseidon.caffe.data.batches.lists import read_windows
from poseidon.caffe.data.cursor import open_cursor
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import Decoding, decode_annotated, labels_of, read_label_map
from poseidon.caffe.data.prepare.voc import CLASSES
from poseidon.cli.main import main

XML = """<annotation><size><width>8</width><height>6</height></size><object><name>{}</name>
<bndbox><xmin>2</xmin><ymin>3</ymin><xmax>4</xmax><ymax>6</ymax></bndbox></object></annotation>"""


def year(
    folder: Path, parts: dict[str, list[str]], *, name: str = "dog", suffix: str = ".jpg"
) -> Path:
    """Write a year whose images each have an object `name`."""
    for part in ("ImageSets/Main", "Annotations", "JPEGImages"):
        (folder / part).mkdir(parents=True)
    for part, images in parts.items():
        (folder / "ImageSets" / "Main" / f"{part}.txt").write_text(
            "".join(f"{image}\n" for image in images)
        )
        for image in images:
            cv2.imwrite(f"{folder}/JPEGImages/{image}{suffix}", np.zeros((6, 8, 3), np.uint8))
            (folder / "Annotations" / f"{image}.xml").write_text(XML.format(name))
    return folder


def records(path: Path) -> dict[str, tuple[int, ...]]:
    """The labels of each record, by its key without the number."""
    cursor = open_cursor(path, Backend.LMDB)
    found = {}
    for number in range(len(cursor)):
        cursor.seek(number)
        image = decode_annotated(bytes(cursor.value()), Decoding.AS_STORED)
        assert image.objects is not None
        found[cursor.key().decode()[9:]] = tuple(item.label for item in image.objects)
        assert image.objects[0].box == pytest.approx((0.25, 0.5, 0.5, 1))
    cursor.close()
    return found


def test_two_years_make_the_databases_of_ssd(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = tmp_path / "VOCdevkit", tmp_path / "VOC0712"
    year(root / "VOC2007", {"trainval": ["000001", "000003"], "test": ["000002"]})
    year(root / "VOC2012", {"trainval": ["2008_1"]})
    assert main(["convert_voc", str(root), str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"The label map is {out}/labelmap_voc.prototxt",
        f"{out}/VOC0712_trainval_lmdb: 3 images",
        f"{out}/VOC0712_test_lmdb: 1 images",
    ]
    names = [f"VOC2007/JPEGImages/{n}.jpg" for n in ("000001", "000003")] + [
        "VOC2012/JPEGImages/2008_1.jpg"
    ]
    assert records(out / "VOC0712_trainval_lmdb") == dict.fromkeys(names, (12,))
    assert records(out / "VOC0712_test_lmdb") == {"VOC2007/JPEGImages/000002.jpg": (12,)}
    assert (out / "test_name_size.txt").read_text() == "000002 6 8\n"
    assert (
        out / "test.txt"
    ).read_text() == "VOC2007/JPEGImages/000002.jpg VOC2007/Annotations/000002.xml\n"
    header = ["# 0", f"{root}/VOC2007/JPEGImages/000002.jpg", "3", "6", "8", "1"]
    assert (out / "test_windows.txt").read_text().splitlines() == [*header, "12 1 1 2 3 5"]
    found = read_windows(out / "trainval_windows.txt", "", fg_threshold=1, bg_threshold=0)
    assert len(found.foreground) == 3
    labels = labels_of(read_label_map(out / "labelmap_voc.prototxt"))
    assert labels == {"none_of_the_above": 0, **{name: n for n, name in enumerate(CLASSES, 1)}}


def test_one_folder_with_names_of_its_own(tmp_path: Path) -> None:
    root = year(
        tmp_path / "signs", {"train": ["a", "b"], "val": ["c"]}, name='a "stop" sign', suffix=".png"
    )
    assert main(["convert_voc", str(root), str(tmp_path / "out"), "--parts=val"]) == 0
    assert records(tmp_path / "out" / "signs_val_lmdb") == {"signs/JPEGImages/c.png": (1,)}
    found = labels_of(read_label_map(tmp_path / "out" / "labelmap_voc.prototxt"))
    assert found == {"none_of_the_above": 0, 'a "stop" sign': 1}
    assert main(["convert_voc", str(root), str(tmp_path / "both")]) == 0
    assert sorted(path.name for path in (tmp_path / "both").glob("*_lmdb")) == [
        "signs_train_lmdb",
        "signs_val_lmdb",
    ]


def test_window_files_leave_out_difficult_objects(tmp_path: Path) -> None:
    root = year(tmp_path / "VOC2007", {"test": ["a"]})
    text = XML.format("dog").replace("</name>", "</name><difficult>1</difficult>")
    (root / "Annotations" / "a.xml").write_text(text)
    assert main(["convert_voc", str(root), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "test_windows.txt").read_text().splitlines()[5:] == ["0"]


def test_a_given_label_map(tmp_path: Path) -> None:
    root = year(tmp_path / "VOC2007", {"test": ["a"]})
    (tmp_path / "map").write_text('item { name: "dog" label: 5 }')
    flags = [f"--label_map_file={tmp_path}/map", "--backend=lmdb"]
    assert main(["convert_voc", str(root), str(tmp_path / "out"), *flags]) == 0
    assert records(tmp_path / "out" / "VOC07_test_lmdb") == {"VOC2007/JPEGImages/a.jpg": (5,)}
    assert not (tmp_path / "out" / "labelmap_voc.prototxt").exists()


@pytest.mark.parametrize(
    ("flags", "spoil", "message"),
    [
        ([], "ImageSets/Main", "has no ImageSets/Main, and no folder"),
        (["--parts=test,val"], "", "has val.txt"),
        ([], "JPEGImages/a.jpg", "test.txt:1: there is no image"),
        ([], "Annotations/a.xml", "a.xml cannot be read"),
        (["--label_map_file=none"], "", "none: there is no such file"),
    ],
)
def test_convert_voc_names_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], spoil: str, message: str
) -> None:
    root = year(tmp_path / "VOC2007", {"test": ["a"]})
    if spoil:
        (root / spoil).rename(tmp_path / "elsewhere")
    assert main(["convert_voc", str(root), str(tmp_path / "out"), *flags]) == 1
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*_lmdb"))
