"""The walk over a net's layers in a thread of the user's own, and the end of its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.databases import make_pictures
from tests.support.mkl import needs_mkl, threads_of_products

NET = """
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 96 dim: 128 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y"
  inner_product_param { num_output: 256 bias_term: false weight_filler { type: "constant" value: 1 } } }
"""
DATA = """
layer { name: "data" type: "Data" top: "data" top: "label"
  data_param { source: "db" backend: LMDB batch_size: 2 } }
"""
PROGRAM = """
import threading, torch
import poseidon.pycaffe as caffe
torch.set_num_threads(1)
net = caffe.Net({path!r}, caffe.TEST)
thread = threading.Thread(target=net.forward)
thread.start()
thread.join()
"""


@needs_mkl
def test_a_thread_of_the_users_computes_with_the_threads_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text(NET, encoding="utf-8")
    program = PROGRAM.format(path=str(tmp_path / "net.prototxt"))
    assert threads_of_products(program, {"OMP_NUM_THREADS": "4"}) == {1}


def test_a_script_that_ends_with_an_open_database_prints_nothing(tmp_path: Path) -> None:
    make_pictures(tmp_path / "db", 4, shape=(1, 6, 6))
    (tmp_path / "net.prototxt").write_text(DATA, encoding="utf-8")
    program = "import poseidon.pycaffe as caffe; net = caffe.Net('net.prototxt', caffe.TEST); net.forward()"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
