"""What of a module is kept together, and what may travel as factors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from poseidon.errors import UsageError
from poseidon.torch.factor_rows import rows_by_batch_size, rows_by_example
from poseidon.torch.options import Buffers
from poseidon.torch.tensors import looked_up, module_tensors


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.twice = nn.Linear(3, 3)
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)
        self.last = nn.Linear(3, 2, bias=False)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("table", torch.zeros(2))
        self.drop = nn.Dropout()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        x = self.drop(self.twice(self.twice(x)))
        x = self.attention(x, x, x)[0]
        result: Tensor = self.last(x[:, 0]) * scale
        return result


def test_order_is_that_of_the_layers() -> None:
    found = module_tensors(Mixed(), Buffers.AVERAGE)
    assert list(found.exchanged) == [
        "first.weight",
        "first.bias",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "twice.weight",
        "twice.bias",
        "attention.in_proj_weight",
        "attention.in_proj_bias",
        "attention.out_proj.weight",
        "attention.out_proj.bias",
        "last.weight",
    ]
    assert set(found.rest) == {"table", "norm.num_batches_tracked", "frozen.weight", "frozen.bias"}
    assert "norm.running_mean" not in found.trained
    assert "norm.running_mean" in module_tensors(Mixed(), Buffers.OWN).rest


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_traced_layer_has_running_statistics() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()
    traced = torch.jit.trace(module, torch.ones(2, 3))
    found = module_tensors(traced, Buffers.AVERAGE)
    assert set(found.exchanged) - set(found.trained) == {"1.running_mean", "1.running_var"}


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_layer_is_refused() -> None:
    module = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(UsageError, match=r"layers of torch\.jit\.script, which take no hooks"):
        module_tensors(module, Buffers.AVERAGE)


def test_shared_parameters_are_one() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    assert list(module_tensors(module, Buffers.AVERAGE).exchanged) == [
        "0.weight",
        "0.bias",
        "1.bias",
    ]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.ReLU(), "ReLU has no parameter that requires a gradient"),
        (nn.Linear(2, 2).requires_grad_(False), "no parameter that requires a gradient"),
        (nn.Linear(2, 2).double(), "'weight' is torch.float64"),
        (
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")),
            r"'1\.weight' is on torch's meta device and has no values; call module\.to_empty",
        ),
    ],
)
def test_what_cannot_be_trained_together(module: nn.Module, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        module_tensors(module, Buffers.AVERAGE)


def test_rows_of_layers_that_run_once() -> None:
    module = Mixed()
    weights = {weight: name for name, weight in module.named_parameters()}
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    seed = torch.random.get_rng_state()
    x = torch.ones(5, 7, 4)
    for example in (x, (x,), {"x": x, "scale": 2.0}):
        rows = {
            weights[weight]: count for weight, count in rows_by_example(module, example).items()
        }
        assert rows == {"first.weight": 35, "last.weight": 5}
    assert torch.equal(torch.random.get_rng_state(), seed)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(child.training for child in module.modules())


def test_rows_by_batch_size_leave_out_what_is_only_read() -> None:
    module = Mixed()
    weights = {weight: name for name, weight in module.named_parameters()}
    rows = {weights[weight]: count for weight, count in rows_by_batch_size(module, 6).items()}
    assert rows == dict.fromkeys(
        ("first.weight", "twice.weight", "last.weight", "frozen.weight"), 6
    )


@pytest.mark.parametrize(
    "beside",
    [
        nn.functional.linear,
        lambda x, weight: x @ weight.T,
        lambda x, weight: torch.cat([x, weight]),
        lambda x, weight: torch.addmm(input=x, mat1=x, mat2=weight),
    ],
)
def test_rows_leave_out_a_weight_that_is_used_beside_its_layer(
    beside: Callable[[Tensor, Tensor], Tensor],
) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            assert self.second.weight.shape == (4, 4)  # to look at its shape is no use of it
            return beside(self.second(self.first(x)), self.first.weight)

    module = Tied()
    assert rows_by_example(module, torch.ones(3, 4)) == {module.second.weight: 3}


def test_embeddings_whose_weight_no_other_module_uses_are_looked_up() -> None:
    words, tied, bag = nn.Embedding(9, 2), nn.Embedding(9, 2), nn.EmbeddingBag(9, 2)
    head = nn.Linear(2, 9, bias=False)
    head.weight = tied.weight
    assert looked_up(nn.ModuleList([words, tied, bag, head, words])) == {words.weight, bag.weight}
