"""What the ImageNet nets of this folder share: data layers, loss and scores, and solvers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from poseidon.caffe.proto.caffe_pb2 import NetParameter
from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from prototxt.parts import database, fields, for_both_phases, header, named

MEAN = (104, 117, 123)
DATA = "examples/imagenet/ilsvrc12_{}_lmdb"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One net.

    Attributes:
        name: of the net.
        folder: below prototxt/.
        stem: how its files begin; empty: train_val, deploy and solver alone.
        about: first line of each header: what it is.
        paper: where it is from.
        expect: published accuracy.
        body: adds everything from `data` to the scores and returns the scores; its argument is
            whether the net is for training.
        heads: adds losses and scores; its argument is the scores' top; None: one softmax loss.
        crop: height and width of its images.
        batch: of one worker.
        mean: of the transformation; and its scale.
        solver: its settings, with comments.
    """

    name: str
    folder: str
    stem: str = ""
    about: str
    paper: str
    expect: str
    body: Callable[[NetSpec, bool], Any]
    heads: Callable[[NetSpec, Any], None] | None = None
    crop: int = 224
    batch: int = 32
    mean: tuple[float, ...] = MEAN
    scale: float = 1
    solver: Mapping[str, Any] = field(default_factory=dict)

    def file(self, kind: str) -> str:
        return f"{self.stem}_{kind}.prototxt" if self.stem else f"{kind}.prototxt"

    def header(self, *, deploy: bool = False) -> str:
        run = "" if deploy else self.file("solver")
        return header(self.about, self.paper, self.folder, run=run, expect=self.expect)

    def data(self, phase: str) -> Any:
        """Add a Data layer of one phase; return its tops."""
        transform: dict[str, Any] = {"crop_size": self.crop, "mean_value": list(self.mean)}
        if self.scale != 1:
            transform["scale"] = self.scale
        if phase == "TRAIN":
            transform["mirror"] = True
        source = DATA.format("train" if phase == "TRAIN" else "val")
        batch = self.batch if phase == "TRAIN" else 50
        return database(source, batch, phase, ntop=2, name="data", transform_param=transform)

    def train_val(self) -> NetParameter:
        test = NetSpec()
        test.data, test.label = self.data("TEST")
        n = NetSpec()
        n.data, n.label = self.data("TRAIN")
        (self.heads or softmax_loss)(n, self.body(n, True))
        return for_both_phases(self.name, n, test)

    def deploy(self) -> NetParameter:
        n = NetSpec()
        n.data = L.Input(shape={"dim": [1, 3, self.crop, self.crop]})
        n.prob = L.Softmax(self.body(n, False))
        return named(self.name, n)

    def solver_text(self) -> str:
        first = {"net": self.file("train_val"), "test_iter": 1000, "test_interval": 5000}
        last = "display: 20\nsnapshot: 10000\nsolver_mode: GPU\n"
        return self.header() + fields({**first, **self.solver}) + last

    def definitions(self) -> dict[str, str]:
        """Return the text of each file, by its name."""
        return {
            self.file("train_val"): self.header() + str(self.train_val()),
            self.file("deploy"): self.header(deploy=True) + str(self.deploy()),
            self.file("solver"): self.solver_text(),
        }


def softmax_loss(n: NetSpec, scores: Any) -> None:
    """One loss, and in tests the share of pictures whose class is the first, and among the first
    five.
    """
    n.loss = L.SoftmaxWithLoss(scores, n.label)
    n.accuracy = L.Accuracy(scores, n.label, include={"phase": "TEST"})
    n.accuracy_top5 = L.Accuracy(scores, n.label, top_k=5, include={"phase": "TEST"})
