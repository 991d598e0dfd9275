"""A bare mistake is told before the code of a command is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import contextlib, io, json, sys
from poseidon.cli.main import main

told = {}
for line in sys.stdin.read().splitlines():
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            code = main(line.split())
        except SystemExit as end:
            code = end.code
    heavy = {"torch", "paramiko", "cv2", "matplotlib"} & set(sys.modules)
    told[line] = f"{code}{' imports ' + ' '.join(sorted(heavy)) if heavy else ''}: {said.getvalue()}"
print(json.dumps(told))
"""
MISTAKES = {
    "train": (2, "--solver is missing"),
    "train --solver=none": (1, "none: there is no such file"),
    "train --solver=train.py": (
        2,
        "train.py is a Python script, not a solver; run it",
    ),
    "train --solver=net --bogus": (2, "unknown flag --bogus"),
    "train --solver=net --hostfile=none": (
        1,
        "none: there is no such machinefile; expected a file",
    ),
    "train --solver=net --weights=net,none": (1, "--weights: there is no file none"),
    "train --solver=net --snapshot=none": (1, "--snapshot: there is no file none, nor a folder"),
    "train --solver=net --threads=0": (2, "--threads=0: expected 1 or more"),
    "run": (2, "SCRIPT is missing"),
    "run none.py": (2, "there is no script none.py"),
    "run --snapshot=none net": (1, "--snapshot: there is no file none, nor a folder"),
    "worker run script.py": (2, "--key_file is missing: make one with"),
    "test -model=none -weights=net": (1, "none: there is no such file"),
    "test -model=net": (2, "-weights is missing: name a trained model"),
    "test -model=net -weights=none": (1, "--weights: there is no file none"),
    "time -model=none": (1, "none: there is no such file"),
    "time -model=net -iterations=0": (2, "-iterations is 0; it must be at least 1"),
    "extract_features": (2, "--model is missing; or give the arguments of Caffe's tool"),
    "extract_features net net fc7 f 0 lmdb": (2, "NUM_MINI_BATCHES is '0'; expected 1 or more"),
    "extract_features none net fc7 f 1 lmdb": (1, "WEIGHTS: there is no file none"),
    "plan": (2, "expected one of --solver, --net and --module, found none of them"),
    "plan --net=none --hosts=2 --rate=100": (1, "none: there is no such file"),
    "draw_net none net.png": (1, "none: there is no such file"),
    "export none net.onnx": (1, "none: there is no such net; expected the net definition, whose"),
    "import none weights.pth out": (1, "none: there is no such file"),
    "plot none -o curves.png": (1, "there is no log none, nor a job of that id or folder"),
    "parse_log none": (1, "there is no log none, nor a job of that id or folder"),
    "stats none": (1, "'none' is neither a running job"),
    "logs none": (1, "'none' is neither a running job"),
    "kill": (2, "give a job's id, a machinefile, or --all"),
    "kill none": (1, "'none' is neither a running job nor a machinefile"),
    "ps --hostfile=none": (1, "none: there is no such machinefile"),
    "doctor --hostfile=none": (1, "none: there is no such machinefile"),
    "dashboard none": (1, "none: there is no such folder; expected folders of jobs"),
    "make_db": (2, "give PICTURES and DB_NAME"),
    "make_db none db": (1, "none: there is no such file or folder; expected a folder with a sub"),
    "convert_imageset ./ none db": (1, "none: there is no such file"),
    "convert_annoset ./ none db": (1, "none: there is no such file"),
    "convert_voc none out": (1, "none: there is no such folder; expected folder of VOC2007"),
    "convert_mnist net": (1, "net: there is no such folder; expected folder of the four .gz files"),
    "convert_cifar none out lmdb": (1, "none: there is no such file or folder; expected archive"),
    "prepare_cifar10 --data=none": (1, "none: there is no such file or folder; expected CIFAR-10"),
    "partition_data none": (1, "the database none does not exist"),
    "partition_data net --hostfile=none": (1, "none: there is no such machinefile"),
    "compute_image_mean none": (1, "the database none does not exist"),
    "upgrade_net_proto_text none out": (1, "none: there is no such file"),
    "download_model_binary none": (1, "none: there is no such folder"),
}


def test_a_bare_mistake_imports_no_torch(tmp_path: Path) -> None:
    """It takes seconds; `net` is a file that exists."""
    (tmp_path / "net").write_text("", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="\n".join(MISTAKES),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=300,
        env={"PATH": "", "HOME": str(tmp_path), "POSEIDON_HOME": str(tmp_path / "home")},
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    expected = {
        line: f"{code}: poseidon {line.split()[0]}: {sentence}"
        for line, (code, sentence) in MISTAKES.items()
    }
    begun = {line: told[line][: len(sentence)] for line, sentence in expected.items()}
    assert begun == expected
    assert [line for line, said in told.items() if said.count("\n") != 1] == []
