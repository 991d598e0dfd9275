"""What a script's worker imports; optimizers of torch in it without the compiler, then with it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import torch
from poseidon.engine import process
from poseidon.torch import script
from poseidon.torch.lazy_compiler import COMPILER, import_compiler_late

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


def test_a_script_imports_no_compiler_and_its_optimizers_compute_the_same_with_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, KINDS],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
