"""The image, the compose file and the scripts of schedulers: linted, and their steps run without
a container runtime.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from poseidon.cluster.machinefile import read_machinefile
from tests.support.free_ports import free_ports
from tests.support.needs import find
from tests.support.polling import until
from tests.support.training_processes import environment

ROOT = Path(__file__).parents[1]
CONTAINERS = ROOT / "scripts" / "containers"
SCHEDULERS = ROOT / "scripts" / "schedulers"
SCRIPT = CONTAINERS / "ssh_server.sh"
NET = """
name: "small"
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { shape { dim: 4 dim: 3 } shape { dim: 4 } data_filler { type: "gaussian" std: 1 } data_filler { type: "constant" } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 2 weight_filler { type: "gaussian" std: 1 } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
SOLVER = 'net: "net.prototxt" base_lr: 0.1 lr_policy: "fixed" max_iter: 4 display: 1 snapshot_prefix: "snap" solver_mode: CPU'


def run(*words: object, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in words],
        capture_output=True, text=True, check=False, timeout=100, env={**os.environ, **more},
    )  # fmt: skip


@pytest.mark.needs("linters")
def test_scripts_and_manifests_are_clean() -> None:
    scripts = [SCRIPT, *SCHEDULERS.glob("*.sh"), *SCHEDULERS.glob("*.sbatch")]
    manifests = [*CONTAINERS.glob("*.yaml"), *SCHEDULERS.glob("*.yaml")]
    assert len(scripts) >= 4 and len(manifests) == 2
    for words in (
        ("shellcheck", *scripts),
        ("yamllint", "--strict", "-c", ROOT / ".yamllint", *manifests),
    ):
        done = run(find(words[0]), *words[1:])
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.needs("container linters")
@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("hadolint", [CONTAINERS / "Dockerfile"]),
        ("check-jsonschema", ["--builtin-schema=vendor.compose-spec", CONTAINERS / "compose.yaml"]),
        ("kubernetes-validate", ["--strict", SCHEDULERS / "kubernetes.yaml"]),
    ],
)  # fmt: skip
def test_schemas_of_containers_and_kubernetes(program: str, words: list[object]) -> None:
    done = run(program, *words)
    assert done.returncode == 0, done.stdout + done.stderr


def run_lines() -> list[str]:
    """Return the shell commands of the Dockerfile's RUN lines."""
    text = (CONTAINERS / "Dockerfile").read_text(encoding="utf-8")
    return re.findall(r"^RUN ((?:.*\\\n)*.*)$", text, flags=re.MULTILINE)


@pytest.mark.parametrize("index", ["https://index.example/cpu", ""])
def test_the_steps_of_the_image(tmp_path: Path, index: str) -> None:
    """In a shell whose programs note what they are asked for, as nothing may be installed here."""
    programs = ("apt-get", "install", "pip", "rm", "useradd", "usermod")
    for name in programs:
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/asked\n')
        path.chmod(0o755)
    for line in run_lines():
        done = run(
            "sh", "-eu", "-c", line, PATH=f"{tmp_path}:{os.environ['PATH']}", TORCH_INDEX=index
        )
        assert done.returncode == 0, done.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert "pip wheel --no-cache-dir --no-deps --wheel-dir=/wheels ." in asked
    torch = f"pip install --no-cache-dir torch>=2.11 --index-url={index}".removesuffix(
        " --index-url="
    )
    assert torch in asked
    assert asked.index(torch) < asked.index(
        "pip install --no-cache-dir /wheels/poseidon-*.whl[all]"
    )
    assert {line.split()[0] for line in asked} == set(programs)


def test_what_the_image_copies_is_there_and_the_clients_are_those_of_the_compose_file() -> None:
    dockerfile = (CONTAINERS / "Dockerfile").read_text(encoding="utf-8")
    copied = re.findall(r"^COPY (scripts/.*) /opt/poseidon/$", dockerfile, flags=re.MULTILINE)[
        0
    ].split()
    assert all((ROOT / path).is_file() for path in copied)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for path in (
        "poseidon",
        "ps_server",
        "prototxt",
        "examples",
        "machinefiles",
        "scripts",
        "setup.py",
        "README.md",
    ):
        assert (ROOT / path).exists() and path not in ignored
    hosts = [host.address for host in read_machinefile(CONTAINERS / "machinefile")]
    compose = (CONTAINERS / "compose.yaml").read_text(encoding="utf-8")
    assert re.findall(r"^  (client\d): \*client$", compose, flags=re.MULTILINE) == hosts
    assert f'command: [keys, /ssh, "2222", {", ".join(hosts)}]' in compose


def test_wrong_words_are_one_sentence(tmp_path: Path) -> None:
    for words in ((), ("keys", tmp_path), ("keys", tmp_path, 2222), ("start", tmp_path, 2222)):
        done = run(SCRIPT, *words)
        assert done.returncode == 2 and "expected: keys FOLDER PORT HOST" in done.stderr


@pytest.mark.thorough
@pytest.mark.needs("sshd")
@pytest.mark.processes
@pytest.mark.timeout(170)
def test_three_clients_train_over_the_servers_of_the_script(tmp_path: Path) -> None:
    """What `docker compose up` and `poseidon train` do, with three sshd on loopback in place of
    three containers.
    """
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    ports = free_ports(3)
    (tmp_path / "net.prototxt").write_text(NET)
    (tmp_path / "solver.prototxt").write_text(SOLVER)
    with ExitStack() as stack:
        for port in ports:
            keys = tmp_path / f"ssh{port}"
            keys.mkdir()
            for name in ("host", "client"):  # all containers have the keys of one volume
                for path in (tmp_path / f"ssh{ports[0]}").glob(f"{name}*"):
                    shutil.copy(path, keys)
            assert run(SCRIPT, "keys", keys, port, "127.0.0.1").returncode == 0
            words = [str(SCRIPT), "serve", str(keys), str(port), "-o", "ListenAddress=127.0.0.1"]
            server = stack.enter_context(
                subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            )
            stack.callback(server.kill)
            assert server.stderr is not None
            until(
                lambda stream=server.stderr: "listening" in stream.readline(),
                "sshd does not listen",
                60.0,
            )  # type: ignore[misc]
        known = [tmp_path / f"ssh{port}" / "known_hosts" for port in ports]
        config = tmp_path / f"ssh{ports[0]}" / "config"
        (tmp_path / f"ssh{ports[0]}" / "known_hosts").write_text(
            "".join(path.read_text() for path in known)
        )
        lines = [
            f"{number} 127.0.0.1 0 ssh_port={port} workdir={tmp_path}"
            for number, port in enumerate(ports)
        ]
        (tmp_path / "machinefile").write_text("\n".join(lines))
        done = subprocess.run(
            [
                *(sys.executable, "-m", "poseidon", "train", "--solver=solver.prototxt", "--hostfile=machinefile"),
                *(f"--ssh_config={config}", "--output=out", "--threads=1"),
            ],
            cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert "3 clients, 3 workers" in done.stderr
    assert (tmp_path / "snap_iter_4.caffemodel").is_file()
