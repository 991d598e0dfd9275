"""The examples' definitions say what their READMEs promise."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from poseidon.caffe.data.prepare.cifar10 import BUILT_IN, Cifar10Request, PreparedCifar10
from poseidon.caffe.layers.registry import layer_class
from poseidon.caffe.net.net_plan import plan_net
from poseidon.caffe.proto.definition import read_net, read_solver
from poseidon.caffe.solver.settings import solver_settings
from poseidon.caffe.tools.preflight import check_nets
from poseidon.cli.main import parse_arguments
from poseidon.cluster.machinefile import read_machinefile
from poseidon.exchange.options import ExchangeKind
from ps_server import Consistency
from tests.support.training import write_definitions
from tests.support.training_processes import machinefile, poseidon_here


@dataclass(slots=True, kw_only=True)
class TrainCifar10:
    """The script's `main`, and what it would have done."""

    main: Callable[[Sequence[str]], int]
    requests: list[Cifar10Request] = field(default_factory=list)
    commands: list[Sequence[str]] = field(default_factory=list)

    def train(self, words: Sequence[str]) -> int:
        """In place of `poseidon train`."""
        self.commands.append(words)
        return 0


def test_the_net_for_feature_extraction_is_caffenet(repository: Path) -> None:
    definition = read_net(repository / "examples" / "feature_extraction" / "imagenet_val.prototxt")
    data = definition.param.layer[0]
    assert (data.type, list(data.top)) == ("ImageData", ["data", "label"])
    assert data.image_data_param.shared_file_system
    data.type = "Input"  # the plan needs no pictures
    plan = plan_net(definition, layer_class)
    assert {"fc7", "prob"} <= plan.names.keys()
    outputs = {
        layer.name: layer.inner_product_param.num_output
        for layer in definition.param.layer
        if "fc" in layer.name
    }
    assert outputs == {"fc6": 4096, "fc7": 4096, "fc8": 1000}


def test_surgery_leaves_the_scores_as_they_were(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(repository / "examples" / "net_surgery" / "convolve.py"))["main"]
    main([])
    places, difference = re.fullmatch(
        r"(\dx\d) places, greatest difference (\S+)\n", capsys.readouterr().out
    ).groups()  # type: ignore[union-attr]
    assert places == "3x5"
    assert float(difference) < 1e-5


@pytest.mark.parametrize(
    "name",
    [
        "feature_extraction/make_pictures.py",
        "feature_extraction/nearest.py",
        "hdf5_classification/make_data.py",
        "lstm/make_data.py",
        "net_surgery/convolve.py",
        "ssd/make_data.py",
    ],
)
def test_a_script_says_what_it_takes_and_what_it_cannot_write(
    name: str, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = repository / "examples" / name
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(script), "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(script), run_name="__main__")
    (tmp_path / "file").touch()
    monkeypatch.setattr("sys.argv", [str(script), "file/folder"])
    with pytest.raises(SystemExit, match=rf"^{script.name}: (?!\[Errno).*"):
        runpy.run_path(str(script), run_name="__main__")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def prepared(
    requests: list[Cifar10Request], origin: str = ""
) -> Callable[[Cifar10Request], PreparedCifar10]:
    """Return what stands for `prepare_and_print`: it notes the request alone."""
    found = PreparedCifar10(
        train=Path("train"), test=Path("test"), mean=Path("mean"), origin=origin
    )

    def prepare(request: Cifar10Request) -> PreparedCifar10:
        requests.append(request)
        return found

    return prepare


@pytest.mark.parametrize(
    ("drawn", "words", "line", "settings"),
    [
        ("", [], "4000 iterations, about 7 min on two processors; tested at iterations 0", ()),
        (
            BUILT_IN,
            ["--max_iter", "900"],
            "900 iterations, about 2 min on two processors; tested at iterations 0, 100, 200, ...",
            ("max_iter=900", "test_interval=100", "test_iter=20"),
        ),
        (BUILT_IN, ["--test_interval=50"], "tested at iterations 0, 50,", ("test_interval=50",)),
        ("", ["--max_iter=60"], "tested at the start and the end", ("max_iter=60",)),
    ],
)
def test_cifar10_says_how_long_it_trains_and_tests_drawn_pictures_early(
    train_cifar10: TrainCifar10,
    capsys: pytest.CaptureFixture[str],
    drawn: str,
    words: list[str],
    line: str,
    settings: tuple[str, ...],
) -> None:
    train_cifar10.main.__globals__["prepare_and_print"] = prepared([], drawn)
    train_cifar10.main(words)
    assert line in capsys.readouterr().err
    assert parse_arguments(train_cifar10.commands[0]).settings == settings


@pytest.fixture
def train_cifar10(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainCifar10]:
    """The example's `main`, which prepares nothing and trains nothing."""
    script = runpy.run_path(str(repository / "examples" / "cifar10" / "train_cifar10.py"))
    heard = TrainCifar10(main=script["main"])
    globals_: dict[str, Any] = script["main"].__globals__
    globals_["prepare_and_print"] = prepared(heard.requests)
    globals_["poseidon"] = heard.train
    yield heard


@pytest.mark.parametrize(
    "words", [("--clients=3", "--test_iter=1"), ("--max_iter", "1", "--hostfil=x")]
)
def test_cifar10_refuses_a_word_before_it_prepares_data(
    train_cifar10: TrainCifar10,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
) -> None:
    with pytest.raises(SystemExit) as ended:
        train_cifar10.main([*words, f"--output={tmp_path / 'out'}"])
    assert ended.value.code == 2
    assert "poseidon train: unknown flag --" in capsys.readouterr().err
    assert not train_cifar10.requests
    assert not (tmp_path / "out").exists()


def test_cifar10_refuses_a_solver_before_it_prepares_data(
    train_cifar10: TrainCifar10, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    solver = tmp_path / "solver.prototxt"
    for words in ("there is no such file", "there is no net definition 'n.prototxt'"):
        assert train_cifar10.main([f"--solver={solver}", f"--output={tmp_path / 'out'}"]) == 1
        assert words in capsys.readouterr().err
        solver.write_text(
            "net: 'n.prototxt' base_lr: 1 lr_policy: 'fixed' max_iter: 1", encoding="utf-8"
        )
    assert not train_cifar10.requests


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--set=lr=1",), "--set lr=1: unknown field 'lr' in SolverParameter"),
        (("--backend=leveldb", "--set", "net=n.prototxt"), "--set net=n.prototxt: net"),
    ],
)
def test_cifar10_refuses_a_setting_before_it_prepares_data(
    train_cifar10: TrainCifar10,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    says: str,
) -> None:
    assert train_cifar10.main(words) == 1
    assert f"train_cifar10.py: {says}" in capsys.readouterr().err
    assert not train_cifar10.requests


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_cifar10_trains_another_solver_with_its_own_sources(
    train_cifar10: TrainCifar10, tmp_path: Path, backend: str
) -> None:
    """As `poseidon train` would: its net, its data and its snapshots are where the solver means
    them.
    """
    (tmp_path / "mine" / "data").mkdir(parents=True)
    solver = write_definitions(tmp_path / "mine", batch=4, extra='snapshot_prefix: "snap"')
    words = [
        f"--solver={solver}",
        "--max_iter=7",
        "--set",
        "base_lr=0.5",
        f"--output={tmp_path / 'out'}",
        f"--backend={backend}",
    ]
    assert train_cifar10.main(words) == 0
    (command,) = train_cifar10.commands
    flags = parse_arguments(command)
    assert flags.settings == ("max_iter=7", "base_lr=0.5")
    derived = read_solver(flags.solver)
    assert (Path(flags.solver) == solver) == (backend == "lmdb")
    assert derived.net_definition() == read_solver(solver).net_definition()
    assert derived.net_definition().folder == solver.parent
    assert derived.snapshot_prefix() == solver.parent / "snap"


@pytest.mark.parametrize("clients", [1, 2])
def test_cifar10_reads_its_databases_as_leveldb(
    repository: Path, train_cifar10: TrainCifar10, tmp_path: Path, clients: int
) -> None:
    words = [f"--clients={clients}", "--backend=leveldb", f"--output={tmp_path}"]
    assert train_cifar10.main(words) == 0
    (request,) = train_cifar10.requests
    derived = read_solver(tmp_path / "cifar10_quick_solver.prototxt")
    layers = [layer for layer in derived.net_definition().param.layer if layer.type == "Data"]
    folder = repository / "examples" / "cifar10"
    assert [layer.data_param.source for layer in layers] == [
        str(folder / "cifar10_train_leveldb"),
        str(folder / "cifar10_test_leveldb"),
    ]
    assert {layer.transform_param.mean_file for layer in layers} == {
        str(request.folder / "mean.binaryproto")
    }
    assert {layer.data_param.shared_file_system for layer in layers} == {clients == 1}
    assert derived.snapshot_prefix(tmp_path) == tmp_path / "cifar10_quick"


@pytest.mark.parametrize("words", [("--backend=leveldb",), ("--clients=3",)])
def test_cifar10_into_no_folder_is_one_sentence(
    train_cifar10: TrainCifar10,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    assert train_cifar10.main([*words, f"--output={taken}"]) == 1
    assert not train_cifar10.requests
    assert capsys.readouterr().err == f"train_cifar10.py: {taken}: File exists\n"


@pytest.mark.parametrize(
    ("words", "device", "hostfile", "gpu"),
    [
        ([], [], "localserver", ""),
        (["0", "hosts"], [0, 1], "hosts", "0,1"),
        (["0", "hosts", "false", "--max_iter=3"], "0,1", "hosts", "0,1"),
        (["--max_iter=3"], [], "localserver", ""),
    ],
)
def test_run_local_takes_the_words_of_the_original(
    repository: Path, words: list[str], device: object, hostfile: str, gpu: str
) -> None:
    started: list[list[str]] = []
    main = runpy.run_path(str(repository / "examples" / "cifar10" / "run_local.py"))["main"]
    main.__globals__.update(device=device, poseidon=lambda words: started.append(words) or 0)
    assert main(["1", "hosts"]) == 0
    assert not started
    assert main(words) == 0
    flags = parse_arguments(started[0])
    assert (Path(flags.hostfile).name, flags.gpu, flags.svb) == (hostfile, gpu, None)
    # train, solver, net_outputs, hostfile
    assert len(started[0]) == 4 + bool(device) + ("--max_iter=3" in words)
    assert flags.settings == (("max_iter=3",) if "--max_iter=3" in started[0] else ())
    assert Path(flags.net_outputs).name == "cifar-netoutputs"


EDITS = {
    'svb = "auto"': "svb = True",
    "table_staleness = 0": "table_staleness = 2",
    "num_app_threads = 1": "num_app_threads = 3",
    "num_rows_per_table = 0": "num_rows_per_table = 7",
    "device = []": "device = [0, 1]",
    "num_comm_channels_per_client = 1": "num_comm_channels_per_client = 2",
    'consistency_model = "SSPPush"': 'consistency_model = "SSP"',
    '"cifar10_quick_solver.prototxt"': '"mine_solver.prototxt"',
}
"""What a reader of the wiki changes in run_local.py."""


@pytest.fixture
def edited(repository: Path, tmp_path: Path) -> Path:
    """The example in a folder of its own, with `EDITS`, three machines, and a solver of the
    user's.
    """
    folder = tmp_path / "examples" / "cifar10"
    folder.mkdir(parents=True)
    for name in ("run_local.py", "train_cifar10.py"):
        shutil.copy(repository / "examples" / "cifar10" / name, folder)
    text = (folder / "run_local.py").read_text(encoding="utf-8")
    for before, after in EDITS.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (folder / "run_local.py").write_text(text, encoding="utf-8")
    definitions = tmp_path / "prototxt" / "cifar10"
    definitions.mkdir(parents=True)
    write_definitions(definitions, batch=4, extra="max_iter: 9").rename(
        definitions / "mine_solver.prototxt"
    )
    (tmp_path / "machinefiles").mkdir()
    (tmp_path / "machinefiles" / "localserver").write_text(
        "".join(f"{n} 127.0.0.1 0\n" for n in range(3))
    )
    return folder


@pytest.mark.parametrize("script", ["run_local.py", "train_cifar10.py"])
@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ((), {}),
        (
            ("--workers=5", "--exchange=ps"),
            {"workers": 5, "exchange": ExchangeKind.SERVER, "svb": None},
        ),
    ],
)
def test_both_cifar10_scripts_train_with_what_is_edited_in_run_local(
    edited: Path, script: str, words: tuple[str, ...], changed: dict[str, object]
) -> None:
    started: list[list[str]] = []
    requests: list[Cifar10Request] = []
    main = runpy.run_path(str(edited / script))["main"]
    main.__globals__.update(
        prepare_and_print=prepared(requests), poseidon=lambda words: started.append(words) or 0
    )
    assert main(list(words)) == 0
    flags = vars(parse_arguments(started[0]))
    root = edited.parents[1]
    expected: dict[str, object] = {
        "solver": root / "prototxt" / "cifar10" / "mine_solver.prototxt",
        "gpu": "0,1",
        "workers": 3,
        "staleness": 2,
        "rows": 7,
        "svb": True,
        "shards": 2,
        "consistency": Consistency.SSP,
        "net_outputs": str(root / "output" / "cifar10" / "cifar-netoutputs"),
        "hostfile": str(root / "machinefiles" / "localserver"),
    }
    assert {name: flags[name] for name in {**expected, **changed}} == {**expected, **changed}
    assert [request.clients for request in requests] == (
        [3] if script == "train_cifar10.py" else []
    )


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--staleness=0", "staleness", 0),
        ("--devices=cpu", "gpu", ""),
        ("--devices=2", "gpu", "2"),
        ("--output={}/mine", "net_outputs", "{}/mine/cifar-netoutputs"),
        ("--clients=2", "hostfile", "{}/mine/machinefile"),
    ],
)
def test_a_flag_of_train_cifar10_replaces_what_is_edited(
    edited: Path, tmp_path: Path, words: str, name: str, value: object
) -> None:
    started: list[list[str]] = []
    main = runpy.run_path(str(edited / "train_cifar10.py"))["main"]
    main.__globals__.update(
        prepare_and_print=prepared([]), poseidon=lambda words: started.append(words) or 0
    )
    assert main([f"--output={tmp_path / 'mine'}", words.format(tmp_path)]) == 0
    expected = value.format(tmp_path) if isinstance(value, str) else value
    assert getattr(parse_arguments(started[0]), name) == expected


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ("svb = true", r"run_local.py: name 'true' is not defined"),
        ("svb = (", r"run_local.py:\d+: '\(' was never closed"),
    ],
)
def test_an_edit_that_is_no_python_is_one_sentence(
    edited: Path, capsys: pytest.CaptureFixture[str], edit: str, says: str
) -> None:
    script = edited / "run_local.py"
    script.write_text(
        script.read_text(encoding="utf-8").replace("svb = True", edit), encoding="utf-8"
    )
    main = runpy.run_path(str(edited / "train_cifar10.py"))["main"]
    assert main([]) == 2
    assert re.fullmatch(rf"train_cifar10.py: \S+{says}\n", capsys.readouterr().err)


CNN = ("--epochs=3", "--records=1024")
CNN_RESULT = r"epoch 3: loss \S+, accuracy (\S+)%"


@pytest.mark.parametrize("more", [(), ("--torch_optimizer",)])
def test_the_cnn_learns_alone(
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *CNN, *more])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with torch.random.fork_rng():
        torch.manual_seed(1)
        runpy.run_path(str(repository / "examples" / "torch_cnn" / "train.py"), run_name="__main__")
    found = re.search(CNN_RESULT, capsys.readouterr().out)
    assert found is not None
    assert float(found.group(1)) > 30.0


@pytest.mark.processes
@pytest.mark.thorough
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("script", "words", "result", "least"),
    [
        ("torch_cnn", CNN, CNN_RESULT, 30.0),
        ("torch_cnn", (*CNN, "--torch_optimizer"), CNN_RESULT, 30.0),
        ("transformer", ("--steps=60", "--width=32"), r"(\S+)% of the letters", 18.0),
    ],
)
def test_torch_modules_learn_on_two_clients(
    repository: Path, tmp_path: Path, script: str, words: tuple[str, ...], result: str, least: float
) -> None:
    path = repository / "examples" / script / "train.py"
    done = poseidon_here(tmp_path, "run", f"--hostfile={machinefile(tmp_path, 2, 1)}", path, *words)
    assert done.returncode == 0, done.stderr
    found = re.search(result, done.stdout)
    assert found is not None, done.stdout
    assert float(found.group(1)) > least


def test_googlenet_trains_on_each_gpu_or_cpu_of_two_clients(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr("poseidon.cli.main.main", lambda words: commands.append(words) or 0)
    folder = repository / "examples" / "googlenet"
    run_local = runpy.run_path(str(folder / "run_local.py"))["main"]
    assert run_local(["0", "hosts", "--staleness=1"]) == run_local(["1"]) == 0
    train = runpy.run_path(str(folder / "train_googlenet.py"))["main"]
    assert train(["--cpu", "--max_iter=2"], tmp_path) == 0
    on_gpus, on_cpus = map(parse_arguments, commands)
    assert (on_gpus.gpu, on_gpus.hostfile, on_gpus.staleness) == ("0,1", "hosts", 1)
    assert Path(on_gpus.solver) == repository / "prototxt" / "googlenet" / "solver.prototxt"
    assert (on_cpus.gpu, on_cpus.workers) == ("", 2)
    assert on_cpus.settings == ("solver_mode=CPU", "max_iter=2")
    check_nets(read_solver(on_cpus.solver), solver_settings(read_solver(on_cpus.solver)))
    assert len(read_machinefile(Path(on_cpus.hostfile))) == 2


@pytest.mark.skipif(not shutil.which("git"), reason="needs Git")
def test_git_ignores_what_examples_write(repository: Path) -> None:
    if not (repository / ".git").exists():
        pytest.skip("not a checkout of Git")
    command = (repository / "examples" / "ddp" / "README.md").read_text(encoding="utf-8")
    written = re.findall(r"--checkpoint=(\S+)", command)
    kinds = ("caffemodel", "solverstate", "solverstate.sha256", "caffemodel.h5", "solverstate.h5")
    written += [f"prototxt/ssd/shapes_ssd_iter_600.{kind}" for kind in kinds]
    written += ["models/caffenet/net.caffemodel", "lenet_conv.caffemodel"]
    for path in written:
        done = subprocess.run(("git", "check-ignore", path), cwd=repository, check=False)
        assert done.returncode == 0, path
