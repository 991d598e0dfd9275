"""Mean average precision: by hand, against SSD's loops, over workers, in a solver; detections of
several workers in files.
"""

from __future__ import annotations

import logging
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from poseidon.caffe.proto.caffe_pb2 import TEST
from poseidon.caffe.solver.detection import DetectionTally, average_precision
from poseidon.caffe.tools.solo import NetRequest, open_net, score
from poseidon.errors import DataError, UsageError
from poseidon.observe.metrics.glog_lines import GlogSink
from poseidon.pycaffe import SGDSolver
from tests.support.training import Job, run


def precision(scores: list[float], right: list[int], positives: int, version: str) -> float:
    hits = np.array(right, float)
    return average_precision(np.array(scores), hits, 1 - hits, positives, version)


@pytest.mark.parametrize(
    ("version", "expected"),
    # Precisions 1, 1/2, 2/3 at recalls 1/2, 1/2, 1.
    [
        ("11point", (6 * 1 + 5 * 2 / 3) / 11),
        ("MaxIntegral", 0.5 + 0.5 * 2 / 3),
        ("Integral", 0.5 + 0.5 * 2 / 3),
    ],
)
def test_worked_out_by_hand(version: str, expected: float) -> None:
    assert precision([0.5, 0.9, 0.7], [1, 1, 0], 2, version) == pytest.approx(expected)
    assert precision([], [], 2, version) == 0
    assert precision([0.5], [0], 0, version) == 0


@pytest.mark.parametrize(
    ("version", "expected"),
    [("11point", 0.3811189), ("MaxIntegral", 0.4086539), ("Integral", 0.3417256)],
)
def test_values_of_ssds_own_loops(version: str, expected: float) -> None:
    """As its ComputeAP in bbox_util.cpp gave them."""
    scores = [1, 7, 15, 23, 26, 20, 16, 25, 17, 24, 11, 2, 21, 12, 10, 3, 4, 5, 8, 0, 9, 14, 18]
    right = [int(hit) for hit in "110100110111000101101100010"]
    found = precision([*map(float, scores), 22, 13, 6, 19], right, 20, version)
    assert found == pytest.approx(expected, rel=1e-6)


def rows(*found: tuple[float, ...]) -> torch.Tensor:
    """A batch with two objects of class 1 and one of class 2."""
    head = [(-1, 1, 2, -1, -1), (-1, 2, 1, -1, -1), (-1, 3, 0, -1, -1)]
    return torch.tensor([*head, *found], dtype=torch.float32)[None, None]


BATCHES = [
    rows((0, 1, 0.9, 1, 0), (0, 1, 0.8, 0, 1), (0, 2, 0.5, 1, 0)),
    rows((0, 1, 0.9, 0, 1), (1, 1, 0.7, 0, 0), (1, -1, -1, 0, 1)),
]


def test_a_set_of_batches() -> None:
    tally = DetectionTally()
    for number, batch in enumerate(BATCHES):
        tally.add(number, {"eval": batch})
    (score,), (classes,) = tally.scores(["eval"], "Integral")
    # Of four objects of class 1 one was found, first among equals; of two of class 2 one. Class 3
    # has no object.
    assert classes == ((1, pytest.approx(0.25)), (2, pytest.approx(0.5)))
    assert score.value == pytest.approx((0.25 + 0.5 + 0) / 3)


def test_workers_have_the_scores_of_one_process() -> None:
    whole = DetectionTally()
    parts = [DetectionTally(), DetectionTally()]
    for number, batch in enumerate([*BATCHES, *BATCHES[::-1]]):
        outputs = {"a": batch, "b": BATCHES[0]}
        whole.add(number, outputs)
        parts[number % 2].add(number, outputs)
    merged = DetectionTally()
    merged.unpack([parts[1].pack(), parts[0].pack(), DetectionTally().pack()])
    assert merged.scores(["a", "b"], "11point") == whole.scores(["a", "b"], "11point")


def test_other_outputs_are_refused() -> None:
    with pytest.raises(DataError, match="output 'loss' has shape scalar"):
        DetectionTally().add(0, {"loss": torch.zeros(())})


# Every number is 1, so that the only detection is of class 1, overlaps with nothing and is wrong.
ONES = "data_filler { type: 'constant' value: 1 }"
TEST_NET = f"""
layer {{ name: "x" type: "DummyData" top: "found" top: "gt"
  dummy_data_param {{ shape {{ dim: 1 dim: 1 dim: 1 dim: 7 }} shape {{ dim: 1 dim: 1 dim: 2 dim: 8 }} {ONES} }} }}
layer {{ name: "detection_eval" type: "DetectionEvaluate" bottom: "found" bottom: "gt" top: "detection_eval"
  detection_evaluate_param {{ num_classes: 3 }} }}
"""
TRAIN_NET = f"""
layer {{ name: "x" type: "DummyData" top: "x" dummy_data_param {{ shape {{ dim: 2 dim: 3 }} {ONES} }} }}
layer {{ name: "ip" type: "InnerProduct" bottom: "x" top: "ip" inner_product_param {{ num_output: 3 }} }}
layer {{ name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "x" top: "loss" }}
"""
SOLVER = """
train_net: "train.prototxt" test_net: "test.prototxt" test_iter: 2 test_interval: 1 base_lr: 0.1 lr_policy: "fixed" max_iter: 1
eval_type: "detection" show_per_class_result: true snapshot_after_train: false
"""


@pytest.fixture
def solver_file(tmp_path: Path) -> Path:
    for name, text in (("train", TRAIN_NET), ("test", TEST_NET), ("solver", SOLVER)):
        (tmp_path / f"{name}.prototxt").write_text(text)
    return tmp_path / "solver.prototxt"


LINES = ["class1: 0", "    Test net output #0: detection_eval = 0"]


def test_the_lines_of_a_job(solver_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = GlogSink(logging.getLogger("poseidon.solver"))
    with caplog.at_level(logging.INFO, "poseidon.solver"):
        found = run(solver_file, Job())
        for record in found.sink.tests:
            sink.on_test(record)
    assert [line for line in caplog.messages if line in LINES][-2:] == LINES


def test_the_lines_of_pycaffe(solver_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "poseidon.solver"):
        SGDSolver(str(solver_file)).solve()
    assert [line for line in caplog.messages if line in LINES] == LINES * 2


def test_the_lines_of_poseidon_test(solver_file: Path) -> None:
    said: list[str] = []
    net = open_net(NetRequest(model=solver_file.with_name("test.prototxt"), phase=TEST))
    assert [
        output.value for output in score(net, 2, lambda line: said.append(line.text)).outputs
    ] == [0]
    assert said == ["Loss: 0", "detection_eval = 0"]


def test_a_test_net_of_other_outputs_is_refused(solver_file: Path) -> None:
    solver_file.with_name("test.prototxt").write_text(TRAIN_NET)
    with pytest.raises(UsageError, match="test net #0: output 'loss' has shape scalar"):
        run(solver_file, Job())


SAVING_NET = """
layer {{ name: "d" type: "HDF5Data" top: "loc" top: "conf" hdf5_data_param {{ source: "list" batch_size: 2 shared_file_system: true }} }}
layer {{ name: "p" type: "DummyData" top: "prior" top: "out"
  dummy_data_param {{ shape {{ dim: 1 dim: 2 dim: 4 }} shape {{ dim: 1 }} data_filler {{ type: 'constant' value: 0.5 }} }} }}
layer {{ name: "found" type: "DetectionOutput" bottom: "loc" bottom: "conf" bottom: "prior" top: "found"
  detection_output_param {{ num_classes: 2 confidence_threshold: 0.3 save_output_param {{ output_directory: "{0}/out"
    output_name_prefix: "found" output_format: "ILSVRC" label_map_file: "map" name_size_file: "sizes" }} }} }}
layer {{ name: "s" type: "Silence" bottom: "found" }}
"""


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_save_the_detections_of_one_process(tmp_path: Path, workers: int) -> None:
    """Three passes of five batches, so that the batches of a worker change from pass to pass."""
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    corners = random.uniform(0, 0.4, (10, 4)) * [-1, -1, 1, 1]
    scores = np.repeat(random.permutation(10)[:, None] / 10, 2, 1)
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["loc"], file["conf"] = corners.astype(np.float32), scores.astype(np.float32)
    solver = SOLVER.replace('eval_type: "detection" show_per_class_result: true', "")
    for name, text in (
        ("list", str(tmp_path / "rows.h5")),
        ("map", 'item { name: "a" label: 1 }'),
        ("sizes", "".join(f"image{n} 100 200\n" for n in range(10))),
        ("train.prototxt", TRAIN_NET),
        ("test.prototxt", SAVING_NET.format(tmp_path)),
        (
            "solver.prototxt",
            solver.replace("test_iter: 2", "test_iter: 5").replace("max_iter: 1", "max_iter: 2"),
        ),
    ):
        (tmp_path / name).write_text(text)
    assert (
        len(
            run(
                tmp_path / "solver.prototxt", Job(workers=workers, shards=int(workers > 1))
            ).sink.tests
        )
        == 3
    )
    lines = [line.split() for line in (tmp_path / "out" / "found.txt").read_text().splitlines()]
    kept = [n for n in range(10) if scores[n, 0] > 0.3]
    assert [line[0] for line in lines] == [f"image{n}" for n in kept]
    assert [float(line[2]) for line in lines] == pytest.approx([scores[n, 0] for n in kept])
    assert [int(line[3]) for line in lines] == [
        int(round(100 + 100 * corners[n, 0], 2)) for n in kept
    ]
