"""Shares of the stream: together they are what one process reads, batch by batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.caffe.data.batches.numbered import Share, part_path, source_for
from poseidon.caffe.proto.caffe_pb2 import TEST, TRAIN
from poseidon.errors import DataError
from tests.support.databases import worker_share

workers = st.integers(1, 6)
batches = st.integers(1, 5)


def batch_of(share: Share, number: int, size: int) -> list[int]:
    return [share.record(n) for n in range(number * size, (number + 1) * size)]


@given(count=workers, batch=batches, number=st.integers(0, 40))
def test_training_batches_together_are_the_batch_of_one_process(
    count: int, batch: int, number: int
) -> None:
    shares = [worker_share(TRAIN, rank, count, batch) for rank in range(count)]
    together = sorted(record for share in shares for record in batch_of(share, number, batch))
    assert together == list(range(number * count * batch, (number + 1) * count * batch))


@given(count=workers, batch=batches, number=st.integers(0, 40))
def test_test_batches_are_dealt_whole(count: int, batch: int, number: int) -> None:
    reader = worker_share(TEST, number % count, count, batch)
    assert batch_of(reader, number // count, batch) == list(
        range(number * batch, (number + 1) * batch)
    )


@given(
    clients=st.integers(1, 4),
    per_client=st.integers(1, 3),
    batch=batches,
    number=st.integers(0, 20),
)
def test_parts_dealt_round_robin_hold_the_same_batches(
    clients: int, per_client: int, batch: int, number: int
) -> None:
    """Record r of part k is record r * clients + k of the whole, whose number the share knows."""
    count = clients * per_client
    shares = [
        worker_share(TRAIN, rank, count, batch, clients=clients, shared=False)
        for rank in range(count)
    ]
    local = range(number * batch, (number + 1) * batch)
    together = sorted(share.record(n) * clients + share.client for share in shares for n in local)
    assert together == list(range(number * count * batch, (number + 1) * count * batch))
    assert together == sorted(
        int(n) for share in shares for n in share.job_records(local.start, batch)
    )


@pytest.mark.parametrize(
    "wrong", [{"first": 1}, {"first": -1}, {"step": 0}, {"block": 0}, {"client": 1}]
)
def test_what_is_no_share(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="invalid share"):
        Share(**wrong)


@pytest.mark.parametrize(
    ("existing", "shared_file_system", "client", "clients", "expected"),
    [
        (["db"], True, 1, 2, "db"),
        (["db", "db_0", "db_1"], True, 1, 2, "db"),
        (["db", "db_0", "db_1"], False, 0, 2, "db_0"),
        (["db_1"], False, 1, 2, "db_1"),
        (["db"], False, 0, 1, "db"),
        (["db", "db_0", "db_1"], False, 0, 1, "db"),
        (["db_0"], False, 0, 1, "db_0"),
        ([], False, 0, 1, "db"),
        ([], True, 0, 2, "db"),
    ],
)
def test_the_source_of_a_client(
    tmp_path: Path,
    existing: list[str],
    shared_file_system: bool,
    client: int,
    clients: int,
    expected: str,
) -> None:
    for name in existing:
        (tmp_path / name).mkdir()
    found = source_for(
        tmp_path / "db", shared_file_system=shared_file_system, client=client, clients=clients
    )
    assert found == tmp_path / expected


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            "db/data.mdb",
            ": write shared_file_system: true if all clients can read {}, or divide it with: ",
        ),
        (
            "other/x",
            ", nor does {}: make it first; then write shared_file_system: true if all clients can "
            "read it, "
            "or divide it with: ",
        ),
    ],
)
def test_the_error_for_a_missing_part_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / made).parent.mkdir()
    (tmp_path / made).write_text("")
    source = tmp_path / "db"
    with pytest.raises(DataError) as caught:
        source_for(source, shared_file_system=False, client=1, clients=3)
    assert str(caught.value) == (
        f"client 1 of 3 reads {source}_1 (shared_file_system is false), which does not "
        f"exist{says.format(source)}"
        "poseidon partition_data --num_partitions=3 db"
    )


def test_parts_for_more_clients_are_refused(tmp_path: Path) -> None:
    for part in range(3):
        part_path(tmp_path / "db", part).mkdir()
    with pytest.raises(
        DataError, match=r"db was divided for 3 clients, but this job has 2: remove its parts"
    ):
        source_for(tmp_path / "db", shared_file_system=False, client=0, clients=2)
