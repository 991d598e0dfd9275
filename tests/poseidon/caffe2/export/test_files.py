"""Files of Caffe2 nets, as the command reads and writes them."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import safetensors.numpy
import torch
from google.protobuf import text_format

from poseidon.caffe2 import brew, core, model_helper, workspace
from poseidon.caffe2.export.files import read_predictor
from poseidon.caffe2.export.net import export_predictor
from poseidon.caffe2.predictor import mobile_exporter, predictor_exporter
from poseidon.cli.main import main
from poseidon.errors import DefinitionError, SnapshotError, UsageError

ROOT = Path(__file__).parents[4]
X = np.random.RandomState(1).randn(3, 2, 6, 6).astype(np.float32)
NAMES = {"conv_w", "conv_b", "fc_w", "fc_b"}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a net in all of Caffe2's forms, and what it computes of `X`."""
    model = model_helper.ModelHelper(name="small")
    x = brew.relu(model, brew.conv(model, "data", "conv", 2, 4, 3), "conv")
    brew.softmax(model, brew.fc(model, x, "fc", 64, 3), "softmax")
    workspace.RunNetOnce(model.param_init_net)
    workspace.FeedBlob("data", X)
    workspace.RunNetOnce(model.net)
    np.save(tmp_path / "softmax.npy", workspace.FetchBlob("softmax"))
    init, predict = mobile_exporter.Export(workspace, model.net, model.GetAllParams())
    for name, net in (("init_net", init), ("predict_net", predict)):
        (tmp_path / f"{name}.pb").write_bytes(net.SerializeToString())
        (tmp_path / f"{name}.pbtxt").write_text(text_format.MessageToString(net), "utf-8-sig")
    meta = predictor_exporter.PredictorExportMeta(
        predict_net=model.net,
        parameters=model.GetAllParams(),
        inputs=["data"],
        outputs=["softmax"],
        shapes={"data": (1, 2, 6, 6), "softmax": (1, 3)},
    )
    predictor_exporter.save_to_db("minidb", str(tmp_path / "model.minidb"), meta)
    workspace.ResetWorkspace()
    return tmp_path


def command(folder: Path, *words: str) -> list[str]:
    return ["export", *(word if word.startswith("--") else str(folder / word) for word in words)]


@pytest.mark.parametrize(
    "words",
    [
        ("predict_net.pb", "init_net.pb", "out.onnx", "--input=data:1,2,6,6"),
        ("predict_net.pbtxt", "init_net.pbtxt", "out.onnx", "--input=data:2,2,6,6"),
        ("model.minidb", "out.onnx"),
        ("model.minidb", "out.onnx", "--input=data:4,2,6,6"),
    ],
)
def test_onnx(files: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(files, *words)) == 0
    assert "opset 18; inputs: data Nx2x6x6; outputs: softmax Nx3." in capsys.readouterr().out
    (found,) = onnxruntime.InferenceSession(str(files / "out.onnx")).run(["softmax"], {"data": X})
    np.testing.assert_allclose(found, np.load(files / "softmax.npy"), atol=1e-6)


@pytest.mark.timeout(240)  # the first trace of a process imports a large part of torch
def test_pt2_and_value_info(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "value_info.json").write_text('{"data": [1, [1, 2, 6, 6]]}')
    assert main(command(files, "predict_net.pb", "init_net.pb", "out.pt2")) == 0
    assert "inputs: data Nx2x6x6; outputs: softmax." in capsys.readouterr().out
    (found,) = torch.export.load(files / "out.pt2").module()(torch.from_numpy(X))
    np.testing.assert_allclose(found.numpy(), np.load(files / "softmax.npy"), atol=1e-6)


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_weights(files: Path, suffix: str) -> None:
    out = files / f"w.{suffix}"
    assert main(command(files, "model.minidb", out.name)) == 0
    found = (
        torch.load(out, weights_only=True) if suffix == "pth" else safetensors.numpy.load_file(out)
    )
    assert set(found) == NAMES
    assert tuple(found["fc_w"].shape) == (3, 64)


def test_the_commands_of_the_page(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is docs/export.md; the pictures are smaller."""
    monkeypatch.chdir(files)
    lines = (ROOT / "docs/export.md").read_text(encoding="utf-8").splitlines()
    found = [
        line
        for line in lines
        if line.startswith(("poseidon export predict_net", "poseidon export model."))
    ]
    assert len(found) == 2
    for line in found:
        words = shlex.split(line.replace("1,3,224,224", "1,2,6,6"), comments=True)
        (files / words[-1 if words[-1].endswith("onnx") else -2]).unlink(missing_ok=True)
        assert main(words[1:]) == 0
        assert (files / "net.onnx").exists()


def test_refusals(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predict, init = files / "predict_net.pb", files / "init_net.pb"
    assert main(command(files, predict.name, init.name, "out.onnx")) == 2
    said = capsys.readouterr().err
    assert "are not known: add --input=data:N,C,H,W or a value_info.json beside it" in said
    cases: list[tuple[tuple[Path, Path | None], str]] = [
        ((init, predict), "fills parameters: name the predict net"),
        (
            (predict, None),
            "the parameters of .*predict_net.pb are missing: name its init net",
        ),
        (
            (files / "net.prototxt", None),
            "the weights of .*net.prototxt are missing: name a .caffemodel",
        ),
    ]
    for paths, text in cases:
        with pytest.raises(UsageError, match=text):
            read_predictor(*paths, {"data": (1, 2, 6, 6)})
    with pytest.raises(UsageError, match="has no input 'picture'; it has data"):
        read_predictor(predict, init, {"picture": (1,)})
    for name, content, text in (
        ("odd.pb", b"\xff\xff", "is not a net of Caffe2"),
        ("odd.pbtxt", b"layer {", "is not a net of Caffe2"),
        ("empty.pb", b"", "it has no operators"),
        ("absent.pb", None, "cannot read"),
    ):
        if content is not None:
            (files / name).write_bytes(content)
        with pytest.raises(SnapshotError, match=text):
            read_predictor(files / name, init, {})
    with pytest.raises(SnapshotError, match=r"absent.minidb: there is no such file$"):
        read_predictor(files / "absent.minidb", None, {})
    (files / "odd.minidb").write_bytes(b"nothing")
    with pytest.raises(SnapshotError, match=r"odd.minidb is not a predictor of Caffe2"):
        read_predictor(files / "odd.minidb", None, {})
    (files / "value_info.json").write_text('{"data": 3}')
    with pytest.raises(SnapshotError, match="is not readable as shapes of inputs"):
        read_predictor(predict, init, {})
    wrong = core.Net("wrong")
    wrong.FC(["data", "absent_w", "absent_b"], "y")
    (files / "wrong.pb").write_bytes(wrong.Proto().SerializeToString())
    (files / "value_info.json").unlink()
    with pytest.raises(DefinitionError, match="its outputs need absent_w, absent_b"):
        export_predictor(read_predictor(files / "wrong.pb", init, {"data": (1, 4)}))
