"""What a script finds in its process: the variables of torchrun, and optimizers without the compiler."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from poseidon.engine.document import ScriptDocument
from poseidon.exchange.membership import Membership
from poseidon.torch.script_process import free_address, torchrun_variables
from ps_server.network import Network

ROOT = Path(__file__).parents[3]


def test_a_worker_has_all_variables_of_torchrun() -> None:
    document = ScriptDocument(
        job="job-1",
        output="out",
        script="train.py",
        member=Membership(network=Network(rank=5, size=6), hosts=(3, 1, 2)),
        restarts=1,
        max_restarts=3,
    )
    assert torchrun_variables(document, "[fd00::1]:15000") == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_NAME": "default",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "fd00::1",
        "MASTER_PORT": "15000",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "job-1",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "ACCELERATE_USE_CPU": "true",
    }


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_script_can_listen_at_the_address(host: str) -> None:
    address, _, port = free_address(host).rpartition(":")
    assert address == host
    with socket.socket() as own:
        own.bind(("127.0.0.1", int(port)))


COMPILER_PROGRAM = """
import sys
import torch
from poseidon.engine import process
from poseidon.torch import script
from poseidon.torch.script_process import COMPILER, import_compiler_late

imported = {"cv2", "h5py", "lmdb", "matplotlib", "sympy", "poseidon.caffe.layers", COMPILER} & {*sys.modules}
assert not imported, imported

def trained(kind, step=lambda optimizer, loss: optimizer.step()):
    torch.manual_seed(3)
    model = torch.nn.Linear(3, 3, bias=kind.__name__ != "Muon")
    optimizer = kind(model.parameters())
    for _ in range(4):
        def loss():
            optimizer.zero_grad()
            value = (model(torch.ones(2, 3)) ** 2).sum()
            value.backward()
            return value
        loss()
        assert torch.is_grad_enabled()
        step(optimizer, loss)
        optimizer.load_state_dict(optimizer.state_dict())
    return [value.detach().clone() for value in model.parameters()]

kinds = [getattr(torch.optim, name) for name in sys.argv[1].split(",")]
import_compiler_late()
import_compiler_late()
late = [trained(kind) for kind in kinds]
assert COMPILER not in sys.modules
late_closure = [trained(kind, lambda optimizer, loss: optimizer.step(loss)) for kind in kinds]
assert COMPILER not in sys.modules
import torch._dynamo
assert torch.equal(torch.compile(torch.neg, backend="eager")(torch.ones(2)), -torch.ones(2))
torchs = [trained(kind) for kind in kinds]
torchs_closure = [trained(kind, lambda optimizer, loss: optimizer.step(loss)) for kind in kinds]
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = model.weight.detach().clone()

@torch.compile(backend="eager")
def step():
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()

step()
assert torch.allclose(model.weight, before - 0.2)
for values, others in ((late, torchs), (late_closure, torchs_closure)):
    for kind, value, other in zip(kinds, values, others):
        assert all(map(torch.equal, value, other)), kind
"""
KINDS = "Adafactor,Adadelta,Adagrad,Adam,AdamW,Adamax,ASGD,Muon,NAdam,RAdam,RMSprop,Rprop,SGD"


@pytest.mark.timeout(600)
def test_a_script_imports_no_compiler_and_its_optimizers_compute_the_same_with_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILER_PROGRAM, KINDS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
