"""examples/resnet50/resnet50_trainer.py: its console, its log file, checkpoints, and mistakes in
its flags.
"""

from __future__ import annotations

import logging
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import workspace
from poseidon.caffe2.experiment_util import read_log
from poseidon.caffe2.images.pictures import make_two_class

Trainer = Callable[..., int]
SMALL = {
    "num_labels": 2,
    "batch_size": 4,
    "epoch_size": 8,
    "num_epochs": 1,
    "image_size": 32,
    "image_scale": 36,
    "num_layers": 18,
    "base_learning_rate": 0.004,
}
THOROUGH = pytest.mark.thorough
GRAY = {"num_channels": 1, "image_mean_per_channel": 100.0}
LOG_NAME = r"resnet18_gpu1_b4_L2_lr0\.00_v2_\d{8}_\d{6}\.log"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training and a test set in Caffe2's format, and one in Caffe's."""
    folder = tmp_path_factory.mktemp("data")
    for name, form, count, first in (
        ("train", "caffe2", 10, 0),
        ("val", "caffe2", 4, 10),
        ("datums", "caffe", 4, 0),
    ):
        make_two_class(folder / name, "lmdb", form, count, seed=0, first=first)
    return folder


@pytest.fixture
def trainer(
    repository: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Trainer:
    """Run the trainer with small sizes in a folder of its own; returns its exit code."""
    monkeypatch.chdir(tmp_path)
    script = runpy.run_path(str(repository / "examples" / "resnet50" / "resnet50_trainer.py"))
    caplog.set_level(logging.INFO)

    def run(*switches: str, **flags: Any) -> int:
        workspace.ResetWorkspace()
        options = {**SMALL, "train_data": data / "train", "file_store_path": tmp_path, **flags}
        given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        try:
            script["main"]([*given, *switches])
        except SystemExit as error:
            return int(error.code or 0)
        return 0

    return run


def console(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the trainer has logged so far."""
    lines = [record.getMessage() for record in caplog.records if record.name == "resnet50_trainer"]
    caplog.clear()
    return lines


def test_the_console_and_the_log_are_those_of_caffe2(
    trainer: Trainer, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert trainer(test_data=data / "val", num_epochs=2) == 0
    lines = console(caplog)
    rate, number = r"\(\d+\.\d\d images/sec\)", r"\d+\.\d+(e-\d+)?"
    expected = [r"Running on GPUs: \[0\]", "Using epoch size: 8", "----- Create test net ----"]
    for epoch in range(2):
        expected.append(f"Starting epoch {epoch}/2")
        for iteration in (1, 2):
            expected.append(rf"Finished iteration {iteration}/2 of epoch {epoch} {rate}")
            expected.append(f"Training loss: {number}, accuracy: {number}")
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)
    (path,) = tmp_path.glob("*.log")
    assert re.fullmatch(LOG_NAME, path.name)
    assert path.read_text().startswith("# Namespace(")
    rows = read_log(path)
    assert ",".join(rows[0]) == (
        "time_spent,cumulative_time_spent,input_count,cumulative_input_count,cumulative_batch_count,inputs_per_sec,"
        "accuracy,epoch,learning_rate,loss,test_accuracy"
    )
    assert [row["cumulative_input_count"] for row in rows] == ["8", "16"]
    assert [row["cumulative_batch_count"] for row in rows] == ["2", "4"]
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert all(0 <= float(row["test_accuracy"]) <= 1 for row in rows)
    assert [path.name for path in tmp_path.glob("*.mdl")] == ["resnet50_model_2.mdl"]


def test_a_restart_continues_the_log_and_the_loss_curve(
    trainer: Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert trainer(num_epochs=2) == 0
    whole = [line for line in console(caplog) if line.startswith("Training loss")]
    weights = workspace.FetchBlob("gpu_0/conv1_w")
    (path,) = tmp_path.glob("*.log")
    losses = [row["loss"] for row in read_log(path)]
    path.unlink()
    assert trainer() == 0
    first = [line for line in console(caplog) if line.startswith("Training loss")]
    assert trainer(num_epochs=2, load_model_path=tmp_path / "resnet50_model_1.mdl") == 0
    lines = console(caplog)
    assert "Reset epoch to 1" in lines
    assert f"Loading path: {tmp_path / 'resnet50_model_1.mdl'}" in lines
    assert "Starting epoch 1/2" in lines
    assert first + [line for line in lines if line.startswith("Training loss")] == whole
    np.testing.assert_array_equal(workspace.FetchBlob("gpu_0/conv1_w"), weights)
    (path,) = tmp_path.glob("*.log")
    rows = read_log(path)
    assert [row["loss"] for row in rows] == losses
    assert [row["cumulative_input_count"] for row in rows] == ["8", "16"]
    assert [row["input_count"] for row in rows] == ["8", "8"]


def test_a_restart_continues_the_log_of_its_own_shard(trainer: Trainer, tmp_path: Path) -> None:
    assert trainer(epoch_size=4) == 0
    (own,) = tmp_path.glob("*.log")
    other = tmp_path / own.name.replace("_v2_", "_v2_shard1_")
    other.write_text(own.read_text())
    saved = tmp_path / "resnet50_model_1.mdl"
    assert trainer(epoch_size=4, num_epochs=2, load_model_path=saved) == 0
    assert [len(read_log(path)) for path in (own, other)] == [2, 1]


@pytest.mark.parametrize(
    ("switches", "flags", "prefix"),
    [
        ([], {"gpus": "0,1"}, "gpu_1"),
        (["--use_cpu"], {"num_gpus": 2}, "cpu_1"),
        pytest.param(["--enable_tensor_core"], {"dtype": "float16"}, "gpu_0", marks=THOROUGH),
        pytest.param([], {"model": "shufflenet", "image_size": 36}, "gpu_0", marks=THOROUGH),
        pytest.param([], {"train_data": "null"}, "gpu_0", marks=THOROUGH),
        pytest.param([], {**GRAY, "image_std_per_channel": 50.0}, "gpu_0", marks=THOROUGH),
        pytest.param(
            [], {"resnext_num_groups": 2, "resnext_width_per_group": 8}, "gpu_0", marks=THOROUGH
        ),
    ],
)
def test_devices_inputs_and_models(
    trainer: Trainer, switches: list[str], flags: dict[str, Any], prefix: str
) -> None:
    assert trainer(*switches, epoch_size=4, **flags) == 0
    side = flags.get("image_size", 32)
    batch = 4 // (2 if prefix.endswith("1") else 1)
    assert workspace.FetchBlob(f"{prefix}/data").shape == (
        batch,
        flags.get("num_channels", 3),
        side,
        side,
    )
    if prefix.endswith("1"):
        first = prefix.replace("1", "0")
        for name in ("conv1_w", "comp_3_conv_2_w", "last_out_L2_b"):
            np.testing.assert_array_equal(
                workspace.FetchBlob(f"{first}/{name}"), workspace.FetchBlob(f"{prefix}/{name}")
            )


def test_the_format_of_the_records_is_seen(trainer: Trainer, data: Path) -> None:
    assert trainer(train_data=data / "datums", epoch_size=4) == 0
    assert np.abs(workspace.FetchBlob("gpu_0/data")).max() > 0.1
    assert sorted(set(workspace.FetchBlob("gpu_0/label").tolist())) == [0, 1]


@pytest.mark.parametrize(
    ("switches", "flags", "code", "message"),
    [
        ([], {"num_gpus": 3}, 2, "3 GPUs cannot share a batch of 4 evenly"),
        ([], {"epoch_size": 3}, 2, "--epoch_size=3 is less than one batch of all shards, 4 images"),
        ([], {"image_size": 40}, 2, "--image_size=40: expected at most --image_scale=36"),
        ([], {"num_channels": 2}, 2, "--num_channels=2: expected 3 (color) or 1 (gray)"),
        ([], {"num_layers": 19}, 2, "--num_layers=19: expected one of [18, 34, 50, 101, 152, 200]"),
        ([], {"gpus": "0;1"}, 2, "--gpus=0;1: expected whole numbers with commas, such as 0,1"),
        ([], {"image_mean_per_channel": 1.0}, 2, "--image_mean_per_channel: expected 3 numbers"),
        ([], {"num_shards": 2, "shard_id": 2}, 2, "--shard_id=2: expected 0 to 1"),
        ([], {"num_shards": 2}, 2, "--run_id is missing"),
        ([], {"shard_batch_sizes": "4,4"}, 2, "--shard_batch_sizes=4,4"),
        (["--model_parallel"], {}, 2, "--model_parallel is not supported"),
        ([], {"train_data": "nothing"}, 1, "The database nothing does not exist"),
        ([], {"db_type": "leveldb"}, 1, "The database "),
        ([], {"file_store_path": "no/folder"}, 2, "--file_store_path=no/folder"),
        ([], {"file_store_path": "/proc"}, 2, "--file_store_path=/proc"),
        ([], {"num_labels": 1}, 1, "the label 1 is not one of 0 to 0"),
        ([], {"load_model_path": "nothing_3.mdl"}, 1, "Cannot open the minidb nothing_3.mdl"),
    ],
)
def test_a_mistake_is_one_sentence(
    trainer: Trainer,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    switches: list[str],
    flags: dict[str, Any],
    code: int,
    message: str,
) -> None:
    assert trainer(*switches, **flags) == code
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"resnet50_trainer.py: {message}"), line
    assert "traceback" not in caplog.text


def test_the_first_checkpoint_makes_its_folder(trainer: Trainer, tmp_path: Path) -> None:
    assert trainer(file_store_path="checkpoints", train_data="nothing") == 1
    assert not (tmp_path / "checkpoints").exists()
    assert trainer(file_store_path="checkpoints", epoch_size=4) == 0
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["resnet50_model_1.mdl"]


def test_the_folder_is_checked_before_speeds_are_measured(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = runpy.run_path(str(repository / "examples" / "resnet50" / "resnet50_trainer.py"))
    measured: list[Any] = []
    script["main"].__globals__.update(
        from_flags=lambda *_: {}, measured_sizes=lambda *given: measured.append(given)
    )
    words = ["--train_data=null", "--file_store_path=no/folder", "--num_shards=2", "--run_id=1"]
    with pytest.raises(SystemExit):
        script["main"]([*words, "--shard_batch_sizes=auto"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(
        "resnet50_trainer.py: --file_store_path=no/folder: expected a folder in which"
    ), line
    assert measured == []


def test_a_checkpoint_of_another_network_is_refused(
    trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trainer(epoch_size=4) == 0
    path = tmp_path / "resnet50_model_1.mdl"
    expected = "the network of the flags expects"
    for flags, message in (
        ({"num_labels": 3}, f"it has no gpu_0/last_out_L3_w, {expected} the shape (3, 512)"),
        ({"num_channels": 1}, f"gpu_0/conv1_w has the shape (64, 3, 7, 7), {expected}"),
    ):
        assert trainer(load_model_path=path, num_epochs=2, **flags) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith(f"resnet50_trainer.py: --load_model_path={path}: {message}"), line


@pytest.mark.parametrize("written", [0, 1])
def test_an_interrupt_is_one_sentence(
    trainer: Trainer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    written: int,
) -> None:
    """It names the checkpoint that there is."""
    run = workspace.RunNet

    def interrupted(*arguments: Any) -> Any:
        if len(list(tmp_path.glob("*.mdl"))) == written:
            raise KeyboardInterrupt
        return run(*arguments)

    monkeypatch.setattr(workspace, "RunNet", interrupted)
    assert trainer(num_epochs=2) == 130
    line = capsys.readouterr().err.splitlines()[-1]
    path = tmp_path / "resnet50_model_1.mdl"
    newest = f"the last checkpoint is {path}" if written else "there is no checkpoint"
    assert line == f"resnet50_trainer.py: interrupted; {newest}"
    assert list(tmp_path.glob("*.mdl")) + list(tmp_path.glob("*.partial")) == [path] * written


def test_a_loss_that_explodes_ends_the_run(
    trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trainer(base_learning_rate=1e6, num_epochs=3) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "resnet50_trainer.py: Exploded gradients :("
    assert not list(tmp_path.glob("*.mdl"))
