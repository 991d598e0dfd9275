"""`import caffe` for code written for Caffe."""

from __future__ import annotations

import importlib
import sys

import pytest

import poseidon.pycaffe as caffe


def test_every_module_has_its_other_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "caffe"]:
        monkeypatch.delitem(sys.modules, name)
    caffe.install()
    assert importlib.import_module("caffe") is caffe
    assert importlib.import_module("caffe.io") is caffe.io
    assert importlib.import_module("caffe.proto.caffe_pb2") is caffe.proto.caffe_pb2
    for name in [name for name in sys.modules if name.split(".")[0] == "caffe"]:
        monkeypatch.delitem(sys.modules, name)
