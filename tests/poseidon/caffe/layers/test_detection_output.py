"""DetectionOutput: by hand, against loops, against OpenCV's importer, and what it refuses."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from poseidon.caffe.layers.detection_output import DetectionOutput
from poseidon.caffe.layers.saved_results import pack_batches, unpack_batches
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TEST
from poseidon.errors import DataError, PoseidonError
from tests.support.nets import build, inputs, layer

PRIORS, CLASSES = 30, 4
ARGUMENTS = ("DetectionOutput", "loc conf prior", "found")


def case(seed: int, images: int = 1, columns: int = 1) -> dict[str, torch.Tensor]:
    random = np.random.default_rng(seed)
    centers, half = random.uniform(0.1, 0.9, (PRIORS, 2)), random.uniform(0.1, 0.3, (PRIORS, 2))
    priors = np.concatenate([centers - half, centers + half], 1)
    conf = random.normal(0, 1.5, (images, PRIORS, CLASSES))
    conf = np.exp(conf) / np.exp(conf).sum(-1, keepdims=True)
    arrays = {
        "loc": random.normal(0, 1, (images, PRIORS * columns * 4)),
        "conf": conf.reshape(images, -1),
        "prior": np.stack([priors.ravel(), np.tile([0.1, 0.1, 0.2, 0.2], PRIORS)])[None],
    }
    return {name: torch.from_numpy(array.astype(np.float32)) for name, array in arrays.items()}


def net(body: str, given: dict[str, torch.Tensor]) -> Net:
    shapes = {name: tuple(value.shape) for name, value in given.items()}
    return build(
        inputs(**shapes) + layer(*ARGUMENTS, f"detection_output_param {{ {body} }}"), phase=TEST
    )


def rows(body: str, given: dict[str, torch.Tensor]) -> np.ndarray:  # type: ignore[type-arg]
    return net(body, given)(given)["found"].numpy().reshape(-1, 7)


SETTINGS = """
code_type: CENTER_SIZE nms_param { nms_threshold: 0.45 top_k: 20 } keep_top_k: 12 confidence_threshold: 0.05
code_type: CORNER nms_param { nms_threshold: 0.3 top_k: 400 } keep_top_k: 200 confidence_threshold: 0.2
code_type: CORNER ALONE nms_param { nms_threshold: 0.6 top_k: 10 } keep_top_k: 40 confidence_threshold: 0.1
code_type: CENTER_SIZE ALONE nms_param { nms_threshold: 0.5 top_k: 15 } keep_top_k: 5 confidence_threshold: 0.01
background_label_id: 2 code_type: CENTER_SIZE nms_param { nms_threshold: 0.45 top_k: 20 } keep_top_k: 12
""".replace("ALONE", "variance_encoded_in_target: true")


@pytest.mark.parametrize("body", SETTINGS.strip().splitlines())
def test_equal_to_opencv(body: str) -> None:
    body = f"num_classes: {CLASSES} share_location: true {body}"
    if "background_label_id" not in body:
        body += " background_label_id: 0"
    alone = "variance_encoded_in_target: true" in body
    for seed in range(5):
        given = case(seed)
        found, expected = rows(body, given), by_opencv(body, given, alone=alone)
        assert found.shape == expected.shape
        # Its rows have a different order, and so have boxes with equal scores.
        key = [array[np.lexsort((array[:, 2], array[:, 1]))] for array in (found, expected)]
        np.testing.assert_allclose(*key, atol=1e-5)
        assert (np.diff(found[:, 1]) >= 0).all()


def by_opencv(body: str, given: dict[str, torch.Tensor], *, alone: bool) -> np.ndarray:  # type: ignore[type-arg]
    """The detections of OpenCV's importer, which wants the prior boxes alone if variances are in
    the target.
    """
    values = {name: value.numpy() for name, value in given.items()}
    values["prior"] = values["prior"][:, :1] if alone else values["prior"]
    text = "".join(
        f'input: "{name}" input_shape {{ {" ".join(f"dim: {n}" for n in value.shape)} }} '
        for name, value in values.items()
    )
    text += layer(*ARGUMENTS, f"detection_output_param {{ {body} }}")
    net = cv2.dnn.readNetFromCaffe(np.frombuffer(text.encode(), np.uint8))
    for name, value in values.items():
        net.setInput(value, name)
    found = net.forward().reshape(-1, 7)
    return found[found[:, 2] > 0]  # it fills up to keep_top_k rows


@pytest.mark.parametrize("kind", ["CORNER", "CENTER_SIZE", "CORNER_SIZE"])
def test_locations_of_each_class_and_several_images(kind: str) -> None:
    """Each class of each image alone, as a layer with shared locations gives it."""
    given = case(7, images=3, columns=CLASSES)
    body = f"num_classes: {CLASSES} code_type: {kind} nms_param {{ nms_threshold: 0.4 }} confidence_threshold: 0.1"
    found = rows(f"{body} share_location: false", given)
    parts = []
    for image in range(3):
        for label in range(1, CLASSES):
            own = given["loc"].view(3, PRIORS, CLASSES, 4)[image, :, label].reshape(1, -1)
            conf = torch.zeros(1, PRIORS, CLASSES)
            conf[..., label] = given["conf"].view(3, PRIORS, CLASSES)[image, :, label]
            part = rows(body, {"loc": own, "conf": conf.view(1, -1), "prior": given["prior"]})
            part = part[part[:, 1] == label]
            part[:, 0] = image
            parts.append(part)
    np.testing.assert_allclose(found, np.concatenate(parts), rtol=1e-6)


HAND = {
    "loc": torch.zeros(1, 12),
    "conf": torch.tensor([[0.1, 0.9, 0.2, 0.8, 0.7, 0.3]]),
    "prior": torch.tensor([[[0, 0, 0.5, 1, 0.1, 0, 0.6, 1, 0.5, 0, 1, 1], [0.1] * 12]]),
}


def test_worked_out_by_hand() -> None:
    """The second box overlaps with the first by 0.4 / 0.6, the third touches the first only."""
    found = rows("num_classes: 2 nms_param { nms_threshold: 0.5 }", HAND)
    expected = [[0, 1, 0.9, 0, 0, 0.5, 1], [0, 1, 0.3, 0.5, 0, 1, 1]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    body = "num_classes: 2 background_label_id: -1 nms_param { nms_threshold: 0.5 } keep_top_k: 2"
    assert rows(body, HAND)[:, 1:3].tolist() == pytest.approx(np.array([[0, 0.7], [1, 0.9]]))


def test_without_detections_there_is_a_row_for_each_image() -> None:
    given = {
        name: value if name == "prior" else torch.cat([value, value])
        for name, value in HAND.items()
    }
    found = rows("num_classes: 2 confidence_threshold: 0.95", given)
    assert found.tolist() == [[0, *[-1] * 6], [1, *[-1] * 6]]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "labels").write_text(
        'item { name: "none" label: 0 } item { name: "3" label: 1 display_name: "cat" } item { '
        'name: "dog" label: 2 }'
    )
    (tmp_path / "sizes").write_text("000001 100 200\nb 50 50\n")
    return tmp_path


def saving(files: Path, body: str, rest: str = "") -> str:
    return (
        "num_classes: 2 nms_param { nms_threshold: 0.5 } save_output_param { "
        f'output_directory: "{files}/out" output_name_prefix: "p_" label_map_file: '
        f'"{files}/labels" '
        f'name_size_file: "{files}/sizes" {body} }} {rest}'
    )


VOC = ["000001 0.9 0 0 100 100", "000001 0.3 100 0 200 100", "b 0.9 0 0 25 50", "b 0.3 25 0 50 50"]


def test_results_in_the_format_of_voc(files: Path) -> None:
    made = net(saving(files, 'output_format: "VOC"'), HAND)
    made(HAND)
    assert not list((files / "out").iterdir())
    made(HAND)
    lines = (files / "out" / "p_3.txt").read_text().splitlines()
    assert lines == VOC
    assert [path.name for path in (files / "out").iterdir()] == ["p_3.txt"]
    made.close()
    assert (files / "out" / "p_3.txt").read_text().splitlines() == lines


def test_results_in_the_format_of_coco(files: Path) -> None:
    made = net(saving(files, 'output_format: "COCO" num_test_image: 1'), HAND)
    made(HAND)
    text = (files / "out" / "p_.json").read_text()
    assert json.loads(text) == [
        {"image_id": 1, "category_id": 3, "bbox": [0, 0, 100, 100], "score": 0.899999976},
        {"image_id": 1, "category_id": 3, "bbox": [100, 0, 100, 100], "score": 0.300000012},
    ]


def test_results_in_the_format_of_ilsvrc(files: Path) -> None:
    resize = "resize_param { resize_mode: FIT_LARGE_SIZE_AND_PAD height: 10 width: 10 }"
    made = net(saving(files, f'output_format: "ILSVRC" {resize}'), HAND)
    made(HAND)
    made.close()
    # The image of 100 x 200 takes the rows from 0.25 to 0.75.
    lines = (files / "out" / "p_.txt").read_text().splitlines()
    assert lines == ["000001 1 0.9 0 0 100 100", "000001 1 0.3 100 0 200 100"]


def test_results_need_a_folder_a_label_map_and_sizes(files: Path) -> None:
    body = f'num_classes: 2 save_output_param {{ output_directory: "{files}/out" output_format: "VOC" }}'
    net(body, HAND)(HAND)
    assert not (files / "out").exists()


def test_each_of_several_workers_keeps_its_detections_and_the_first_reads_the_files(
    files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shapes = {name: tuple(value.shape) for name, value in HAND.items()}
    text = inputs(**shapes) + layer(
        *ARGUMENTS,
        "detection_output_param "
        f"{{ {saving(files, 'output_format: {}'.format(repr('VOC')), 'visualize: true')} }}",
    )

    def compiled(rank: int) -> Net:
        return build(text, phase=TEST, workers=2, rank=rank)

    first = compiled(0)
    (files / "labels").unlink()  # other hosts may lack it
    with caplog.at_level(logging.WARNING):
        second = compiled(1)
    assert "visualize has no effect" in caplog.text
    found = []
    for made in (first, second):
        made(HAND)
        (output,) = (one for _, one in made.layer_modules if isinstance(one, DetectionOutput))
        assert output.kept is not None
        found.append((output, output.kept))
    (writer, one), (other, two) = found
    assert writer.results is not None and other.results is None
    assert not list((files / "out").iterdir())
    assert [len(rows) for rows in unpack_batches(pack_batches(two))[0]] == [2]
    writer.save(one[0])
    writer.save(unpack_batches(pack_batches(two))[0])
    assert (files / "out" / "p_3.txt").read_text().splitlines() == VOC


def test_batches_as_bytes() -> None:
    rows = np.arange(21, dtype=np.float32).reshape(3, 7)
    none = np.zeros((0, 7), np.float32)
    for batches in ([], [[none]], [[rows, none], [rows[:1]]], [[], [rows]]):
        back = unpack_batches(pack_batches(batches))
        assert [[found.tolist() for found in batch] for batch in back] == [
            [found.tolist() for found in batch] for batch in batches
        ]


@pytest.mark.parametrize(
    ("file", "content", "body", "message"),
    [
        ("sizes", "a 1\n", "", "sizes:1: 'a 1' is not a name, a height and a width"),
        ("sizes", "a 1 b\n", "", "sizes:1: 'a 1 b' is not a name"),
        ("sizes", "\n", "", "is empty"),
        ("labels", "item { nam: 1 }", "", "nam"),
        ("labels", "", "", "has no item"),
        ("other", "", "num_test_image: 3", "num_test_image is 3, but name_size_file has 2 images"),
        ("other", "", 'output_format: "XML"', "output_format is 'XML', expected VOC, COCO, ILSVRC"),
    ],
)
def test_files_that_are_refused(
    files: Path, file: str, content: str, body: str, message: str
) -> None:
    (files / file).write_text(content)
    with pytest.raises(PoseidonError, match=message):
        net(saving(files, f'output_format: "VOC" {body}' if "XML" not in body else body), HAND)


LEFT, RIGHT = (0.0, 0.0, 0.4, 1.0), (0.6, 0.0, 1.0, 1.0)
NEAR_LEFT = (0.05, 0.0, 0.4, 1.0)  # overlap 0.875 with LEFT
# image, label, score, box
FOUND = [
    (0, 1, 0.5, *LEFT),
    (0, 1, 0.9, *NEAR_LEFT),
    (0, 1, 0.7, *RIGHT),
    (0, 2, 0.6, *RIGHT),
    (1, 2, 0.8, *RIGHT),
    (2, 1, 0.4, *LEFT),
]
# image, label, instance, box, difficult
OBJECTS = [(0, 1, 0, *LEFT, 0), (0, 2, 0, *RIGHT, 1), (1, 1, 0, *LEFT, 0)]


def rows_of_detection_evaluate(
    body: str = "",
    found: list[tuple[float, ...]] = FOUND,
    objects: list[tuple[float, ...]] = OBJECTS,
) -> list[list[float]]:
    body = body if "num_classes" in body else f"num_classes: 3 {body}"
    given = {"found": torch.tensor(found)[None, None], "gt": torch.tensor(objects)[None, None]}
    shapes = {name: tuple(value.shape) for name, value in given.items()}
    text = inputs(**shapes) + layer(
        "DetectionEvaluate", "found gt", "eval", f"detection_evaluate_param {{ {body} }}"
    )
    return [[round(x, 5) for x in row] for row in build(text)(given)["eval"][0, 0].tolist()]


def test_worked_out_by_hand_of_detection_evaluate() -> None:
    assert rows_of_detection_evaluate() == [
        [-1, 1, 2, -1, -1],
        [-1, 2, 1, -1, -1],
        [0, 1, 0.9, 1, 0],  # the object's best detection
        [0, 1, 0.7, 0, 1],  # no object of this class there
        [0, 1, 0.5, 0, 1],  # the object is taken
        [0, 2, 0.6, 1, 0],
        [1, 2, 0.8, 0, 1],  # no object of this class
        [2, 1, 0.4, 0, 1],  # no object in this image
    ]


def test_difficult_objects_may_be_left_out() -> None:
    found = rows_of_detection_evaluate("evaluate_difficult_gt: false")
    assert found[1] == [-1, 2, 0, -1, -1]
    assert found[5] == [0, 2, 0.6, 0, 0]


def test_the_threshold() -> None:
    assert rows_of_detection_evaluate("overlap_threshold: 0.9")[2:5] == [
        [0, 1, 0.9, 0, 1],
        [0, 1, 0.7, 0, 1],
        [0, 1, 0.5, 1, 0],
    ]


def test_images_without_detections_or_objects() -> None:
    nothing = rows_of_detection_evaluate(found=[(0, -1, -1, -1, -1, -1, -1)], objects=[(-1.0,) * 8])
    assert nothing == [[-1, 1, 0, -1, -1], [-1, 2, 0, -1, -1], [0, -1, -1, 0, 1]]


def test_boxes_may_be_compared_in_pixels(tmp_path: Path) -> None:
    """In pixels the last column counts: of 10 columns, 0 .. 4 and 0.5 .. 4 overlap by 4.5 / 5,
    not by 0.875.
    """
    (tmp_path / "sizes").write_text("a 10 10\nb 10 10\nc 10 10\n")
    body = f'overlap_threshold: 0.89 name_size_file: "{tmp_path}/sizes"'
    assert rows_of_detection_evaluate("overlap_threshold: 0.89")[2] == [0, 1, 0.9, 0, 1]
    assert rows_of_detection_evaluate(body)[2] == [0, 1, 0.9, 1, 0]
    # Where images were fitted into a square, boxes refer to the part that has the image.
    resized = body + " resize_param { resize_mode: FIT_LARGE_SIZE_AND_PAD height: 10 width: 10 }"
    assert rows_of_detection_evaluate(resized)[2] == [0, 1, 0.9, 1, 0]


def test_the_background_is_no_label() -> None:
    with pytest.raises(DataError, match="a detection has label 1, which is background_label_id"):
        rows_of_detection_evaluate("background_label_id: 1", objects=[(0, 2, 0, *LEFT, 0)])
    with pytest.raises(DataError, match="an object has label 1, which is background_label_id"):
        rows_of_detection_evaluate("background_label_id: 1")


def test_boxes_in_units_of_a_scale(tmp_path: Path) -> None:
    """FIT_SMALL_SIZE with height_scale and width_scale: boxes are in units of that many pixels,
    here of half the image.
    """
    (tmp_path / "sizes").write_text("a 20 20\n")
    scale = "resize_param { resize_mode: FIT_SMALL_SIZE height: 20 width: 20 height_scale: 10 width_scale: 10 }"
    body = f'overlap_threshold: 0.99 name_size_file: "{tmp_path}/sizes" {scale}'
    outside = (0, 1, 0.5, 0.0, 0.0, 2.0, 1.0)
    found = rows_of_detection_evaluate(body, [outside], [(0, 1, 0, 0.0, 0.0, 2.5, 1.0, 0)])
    assert found[2] == [0, 1, 0.5, 1, 0]
