"""convert_annoset: records of each format of annotations, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from poseidon.caffe.data.batches.lists import MOST
from poseidon.caffe.data.cursor import open_cursor
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import AnnotatedImage, Decoding, decode_annotated
from poseidon.caffe.data.prepare.procedural import draw_scene, write_detection_set
from poseidon.caffe.proto.caffe_pb2 import AnnotatedDatum
from poseidon.cli.main import main, parse_arguments, run_command
from tests.support.databases import BACKENDS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_detection_set(tmp_path, 3, size=(40, 50))
    return tmp_path


def words(folder: Path, *flags: str, source: str = "one") -> list[str]:
    labels = f"--label_map_file={folder}/labelmap.prototxt"
    paths = (f"{folder}/", f"{folder}/{source}", f"{folder}/db")
    return ["convert_annoset", "--anno_type=detection", labels, *flags, *paths]


def convert(folder: Path, *flags: str, source: str = "list.txt") -> int:
    return run_command(parse_arguments(words(folder, *flags, source=source)))


def records(folder: Path, backend: Backend = Backend.LMDB) -> dict[str, bytes]:
    cursor = open_cursor(folder / "db", backend)
    found = {}
    for number in range(len(cursor)):
        cursor.seek(number)
        found[cursor.key().decode()] = bytes(cursor.value())
    cursor.close()
    return found


def images(folder: Path, backend: Backend = Backend.LMDB) -> list[AnnotatedImage]:
    return [
        decode_annotated(record, Decoding.AS_STORED) for record in records(folder, backend).values()
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_images_with_their_objects(
    folder: Path, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        convert(folder, f"--backend={backend.name.lower()}", f"--name_size_file={folder}/names")
        == 0
    )
    assert capsys.readouterr().out == "Processed 3 files.\n"
    assert list(records(folder, backend)) == [f"0000000{n}_images/00000{n}.png" for n in range(3)]
    for number, found in enumerate(images(folder, backend)):
        scene = draw_scene(number, size=(40, 50))
        assert np.array_equal(found.image, scene.image.transpose(2, 0, 1))
        assert found.objects is not None
        expected = sorted(
            (label, *(value / side for value, side in zip(box, (50, 40, 50, 40), strict=True)))
            for label, box in zip(scene.labels, scene.boxes.tolist(), strict=True)
        )
        assert np.allclose(sorted((item.label, *item.box) for item in found.objects), expected)
    assert (folder / "names").read_text() == "000000 40 50\n000001 40 50\n000002 40 50\n"


def test_encoded_images_keep_their_bytes(folder: Path) -> None:
    convert(folder, "--encoded")
    datum = AnnotatedDatum.FromString(next(iter(records(folder).values()))).datum
    assert datum.encoded and datum.data == (folder / "images" / "000000.png").read_bytes()


@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        (["--resize_width=20", "--resize_height=30"], (3, 30, 20)),
        (["--min_dim=80"], (3, 80, 100)),
        (["--max_dim=25"], (3, 20, 25)),
        (["--min_dim=80", "--max_dim=90"], (3, 72, 90)),
        (["--gray"], (1, 40, 50)),
    ],
)
def test_boxes_do_not_depend_on_the_size(
    folder: Path, flags: list[str], shape: tuple[int, ...]
) -> None:
    convert(folder, *flags)
    found = images(folder)[0]
    assert found.image.shape == shape
    assert found.objects is not None
    assert found.objects[0].box.xmin == pytest.approx(
        float(draw_scene(0, size=(40, 50)).boxes[0, 0]) / 50
    )


XML = """<annotation><size><width>100</width><height>50</height></size>
<object><name>disc</name><difficult>1</difficult><bndbox><ymin>10</ymin><xmin>20</xmin><xmax>40.5</xmax><ymax>30</ymax></bndbox></object>
<object><name>disc</name><bndbox><xmin>0</xmin><ymin>0</ymin><xmax>100</xmax><ymax>50</ymax></bndbox></object></annotation>"""
JSON = {
    "image": {"height": 50, "width": 100},
    "annotation": [
        {"category_id": "disc", "bbox": [20, 10, 20.5, 20], "iscrowd": 1},
        {"category_id": "disc", "bbox": [0, 0, 100, 50]},
    ],
}


@pytest.mark.parametrize(
    ("kind", "text", "label"),
    [
        ("xml", XML, 1),
        ("json", json.dumps(JSON), 1),
        ("txt", f"{MOST} 20 10 40.5 30\n\n{MOST} 0 0 100 50\n", MOST),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_formats(folder: Path, kind: str, text: str, label: int, encoding: str) -> None:
    cv2.imwrite(f"{folder}/p.png", np.zeros((50, 100, 3), np.uint8))
    (folder / f"p.{kind}").write_text(text, encoding=encoding)
    (folder / "one").write_text(f"p.png p.{kind}\n", encoding=encoding)
    map_text = (folder / "labelmap.prototxt").read_text()
    (folder / "labelmap.prototxt").write_text(map_text, encoding=encoding)
    convert(folder, f"--label_type={kind}", source="one")
    (found,) = images(folder)
    assert found.objects is not None
    first, second = found.objects
    assert (first.label, first.instance, first.difficult) == (label, 0, kind != "txt")
    assert first.box == pytest.approx((0.2, 0.2, 0.405, 0.6))
    assert (second.instance, second.difficult) == (1, False)
    assert second.box == pytest.approx((0, 0, 1, 1))


def test_an_annotation_in_the_encoding_that_it_declares(folder: Path) -> None:
    text = '<?xml version="1.0" encoding="ISO-8859-1"?>' + XML.replace(
        "<size>", "<folder>caf\u00e9</folder><size>"
    )
    (folder / "p.xml").write_text(text, encoding="latin-1")
    (folder / "one").write_text("images/000000.png p.xml\n")
    convert(folder, source="one")
    assert len(images(folder)) == 1


def test_classification(folder: Path) -> None:
    (folder / "labels").write_text("images/000000.png 4\nimages/000001.png 5\n")
    words = ["convert_annoset", f"{folder}/", f"{folder}/labels", f"{folder}/db"]
    assert run_command(parse_arguments(words)) == 0
    assert [(found.label, found.objects) for found in images(folder)] == [(4, None), (5, None)]


def test_a_shuffled_set_has_all_records(folder: Path) -> None:
    convert(folder, "--shuffle", "--seed=3", "--check_size", "--check_label")
    names = [key[9:] for key in records(folder)]
    assert sorted(names) == [f"images/00000{n}.png" for n in range(3)]


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("xml", "<annotation>", "it is not XML"),
        ("xml", XML.replace("disc", "dsc"), "'dsc' is not in the label map; did you mean 'disc'"),
        ("xml", XML.replace("<xmin>20</xmin>", ""), "the object 'disc' has no bndbox"),
        ("xml", XML.replace("20", "wide"), "'wide' is not a number"),
        ("xml", XML.replace("20", "1e30"), "is not a position in an image"),
        ("xml", XML.replace("40.5", "4"), "ends before it starts"),
        ("xml", XML.replace("<height>50", "<height>0"), "the size is 100 x 0"),
        ("xml", "<annotation><object/></annotation>", "an object has no name"),
        ("json", "[]", "it is not JSON with"),
        (
            "json",
            '{"image": {"height": 1, "width": 1}, "annotation": [{"bbox": [1]}]}',
            "it is not JSON with",
        ),
        ("xml", '<?xml version="1.0" encoding="nosuch"?><annotation/>', "it is not XML"),
        ("txt", "2147483648 1 2 3 4", "line 1: the label 2147483648 is out of range"),
        ("txt", "1 2 3", "line 1: '1 2 3' is not a label and four numbers"),
    ],
)
def test_annotations_that_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], kind: str, text: str, message: str
) -> None:
    (folder / f"p.{kind}").write_text(text)
    (folder / "one").write_text(f"images/000000.png p.{kind}\n")
    code = main(words(folder, f"--label_type={kind}"))
    assert code == 1
    assert message in capsys.readouterr().err
    assert not (folder / "db").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("images/000000.png", "one:1: 'images/000000.png' is not an image and its annotation"),
        ("", "is empty"),
        ("images/000000.png none.xml", "none.xml cannot be read"),
        ("none.png annotations/000000.xml", "none.png cannot be read"),
    ],
)
def test_lists_that_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    (folder / "one").write_text(f"{line}\n")
    assert main(words(folder)) == 1
    assert message in capsys.readouterr().err


def test_a_detection_set_needs_a_label_map(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without = [word for word in words(folder, source="list.txt") if "map" not in word]
    assert main(without) in (1, 2)
    assert "--label_map_file is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["{}/"], "such as: cats/1.jpg 0; a list of annotations needs --anno_type=detection"),
        (
            ["--anno_type=detection", "--label_map_file={}/labelmap.prototxt", "{}"],
            "; end the folder with a slash: {}/",
        ),
    ],
)
def test_what_is_often_forgotten_is_named(
    folder: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word.format(folder) for word in words]
    assert main(["convert_annoset", *given, f"{folder}/list.txt", f"{folder}/db"]) == 1
    assert says.format(folder) in capsys.readouterr().err
