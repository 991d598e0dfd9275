"""How tensors are divided among the workers of a host."""

from __future__ import annotations

import pytest
import torch

from poseidon.exchange.base import Trained
from poseidon.exchange.host.pieces import LEAST_ELEMENTS, FlatPiece, cut
from ps_server import NewtonSchulz, Rule, RuleKind
from ps_server.codecs.base import SEGMENT_ELEMENTS


def tensor(*shape: int, name: str = "w", **fields: object) -> Trained:
    return Trained(name=name, tensor=torch.empty(shape), **fields)  # type: ignore[arg-type]


def sizes(pieces: tuple[FlatPiece, ...], planes: int) -> list[int]:
    return [sum(piece.size for piece in pieces if piece.plane == plane) for plane in range(planes)]


@pytest.mark.parametrize("planes", [1, 2, 3, 8])
def test_the_pieces_are_the_tensors(planes: int) -> None:
    tensors = [tensor(700, 900), tensor(7), tensor(2_000_003), tensor(LEAST_ELEMENTS * 2)]
    pieces = cut(tensors, planes)
    for index, trained in enumerate(tensors):
        own = [piece for piece in pieces if piece.index == index]
        assert [piece.start for piece in own] == [0, *(piece.stop for piece in own[:-1])]
        assert own[-1].stop == trained.tensor.numel()
        assert all(piece.start % SEGMENT_ELEMENTS == 0 for piece in own)
        assert len(own) == max(1, min(planes, trained.tensor.numel() // LEAST_ELEMENTS))
    assert {piece.plane for piece in pieces} == set(range(planes))


def test_the_planes_have_about_as_many_elements() -> None:
    tensors = [tensor(1_000_000), tensor(40_000), tensor(90_000), tensor(50_000), tensor(60_000)]
    found = sizes(cut(tensors, 4), 4)
    assert max(found) <= 1.1 * sum(found) / 4


def test_one_plane_has_all_tensors_whole() -> None:
    tensors = [tensor(1_000_000), tensor(3)]
    assert cut(tensors, 1) == (
        FlatPiece(0, 0, 1_000_000, is_whole=True, plane=0),
        FlatPiece(1, 0, 3, is_whole=True, plane=0),
    )


def test_what_is_needed_whole_is_not_cut() -> None:
    large = 4 * LEAST_ELEMENTS
    muon = Rule(kind=RuleKind.MUON, matrix=NewtonSchulz(columns=4))
    tensors = [tensor(large), tensor(large, statistics=True), tensor(large, rule=muon)]
    assert all(piece.is_whole for piece in cut(tensors, 4, whole={0}))


def test_a_table_of_rows_is_cut_between_rows() -> None:
    table = tensor(5000, 300, looked_up=True)
    pieces = cut([table], 2)
    assert [piece.start % 300 for piece in pieces] == [0, 0]
    assert [piece.of(table).tensor.shape[1] for piece in pieces] == [300, 300]


def test_small_tensors_share_a_plane_because_they_share_messages() -> None:
    tensors = [tensor(100 + index) for index in range(40)]
    assert len({piece.plane for piece in cut(tensors, 4)}) == 1
    other = [tensor(100, rule=Rule(momentum=0.1 * (index % 2))) for index in range(40)]
    assert len({piece.plane for piece in cut(other, 4)}) == 2


@pytest.mark.parametrize("served", range(4))
def test_the_tensor_that_requests_travel_with_belongs_to_plane_0(served: int) -> None:
    tensors = [tensor(5), tensor(1_000_000), tensor(30_000), tensor(9_000)]
    pieces = cut(tensors, 3, served=served)
    assert 0 in {piece.plane for piece in pieces if piece.index == served}


def test_a_piece_is_a_view_with_a_name_of_its_own() -> None:
    whole = Trained(name="fc", tensor=torch.zeros(2, LEAST_ELEMENTS), factor_rows=5)
    first, second = cut([whole], 2)
    second.of(whole).tensor.fill_(1.0)
    assert whole.tensor.view(-1)[: first.size].sum() == 0.0
    assert whole.tensor.sum() == second.size
    assert first.of(whole).name == f"fc[0:{first.stop}]"
    assert first.of(whole).factor_rows == 0
