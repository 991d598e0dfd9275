from __future__ import annotations

import pytest

from poseidon.observe.metrics.job_statistics import (
    GpuReading,
    JobStatistics,
    TensorStatistics,
    WorkerStatistics,
    decode_statistics,
    encode_statistics,
    parsed,
)
from poseidon.observe.metrics.statistics_tables import (
    job_tables,
    rejections,
    shard_table,
    tensor_rows,
    tensor_table,
)
from ps_server.statistics import ShardStatistics


def tensor(name: str, scale: int, **numbers: float | None) -> TensorStatistics:
    return TensorStatistics(
        name=name,
        scheme="ps",
        bytes_out=1000 * scale,
        bytes_in=1200 * scale,
        **{"waited_s": 0.01 * scale, "hidden_s": 0.03 * scale, **numbers},  # type: ignore[arg-type]
    )


TWO = [
    WorkerStatistics(
        iterations=10, tensors=(tensor("conv.0", 10), tensor("fc.0", 400)), other_bytes_out=5
    ),
    WorkerStatistics(
        iterations=20, tensors=(tensor("conv.0", 40), tensor("fc.0", 800)), other_bytes_in=6
    ),
]


def test_rows_are_means_per_iteration() -> None:
    conv, fc = tensor_rows(TWO)
    assert (conv.name, conv.bytes_out, conv.bytes_in) == ("conv.0", 1500, 1800)
    assert conv.waited_s == pytest.approx(0.015)
    assert conv.hidden_s == pytest.approx(0.045)
    assert fc.bytes_out == 40_000


def test_workers_that_do_not_send_for_themselves_count_for_times_alone() -> None:
    follower = WorkerStatistics(
        iterations=10, tensors=(TensorStatistics(name="conv.0", scheme="ps", waited_s=0.3),)
    )
    (row,) = tensor_rows(
        [WorkerStatistics(iterations=10, tensors=(tensor("conv.0", 10),)), follower]
    )
    assert row.bytes_out == 1000
    assert row.waited_s == pytest.approx(0.02)
    assert row.hidden_s == pytest.approx(0.03)


def test_what_codecs_hold_back_is_a_mean_over_clients() -> None:
    lossy = [
        WorkerStatistics(
            iterations=10, tensors=(tensor("conv.0", 1), tensor("fc.0", 4, held_back=number))
        )
        for number in (1.0, 2.0, None)
    ]
    lines = job_tables(JobStatistics(job="j", workers=dict(enumerate(lossy))))
    at = lines.index("held back by codecs, L2 norm, the mean over clients:")
    assert lines[at + 1 : at + 3] == ["tensor  held back", "fc.0          1.5"]
    assert not any(
        "held back" in line
        for line in job_tables(JobStatistics(job="j", workers=dict(enumerate(TWO))))
    )


def test_the_table() -> None:
    assert tensor_table(tensor_rows(TWO)) == [
        "tensor  scheme  bytes out  bytes in  waited ms  hidden ms  hidden",
        "conv.0  ps          1,500     1,800      15.00      45.00    75 %",
        "fc.0    ps         40,000    48,000     400.00    1200.00    75 %",
        "total              41,500    49,800     415.00    1245.00    75 %",
    ]


def test_what_is_not_known_is_a_dash() -> None:
    worker = WorkerStatistics(iterations=1, tensors=(TensorStatistics(name="a", scheme="local"),))
    assert tensor_table(tensor_rows([worker]))[1].split() == [
        "a",
        "local",
        "-",
        "-",
        "0.00",
        "-",
        "-",
    ]


@pytest.mark.parametrize(
    "workers", [[], [WorkerStatistics(iterations=0, tensors=(tensor("a", 1),))]]
)
def test_before_the_first_iteration(workers: list[WorkerStatistics]) -> None:
    assert tensor_table(tensor_rows(workers)) == ["no iteration has ended yet"]


def test_shards_are_compared_with_their_mean() -> None:
    shards = [
        (
            0,
            ShardStatistics(
                bytes_in=300, bytes_out=300, updates=4, busy_s=1.25, queue=2, longest_queue=9
            ),
        ),
        (1, ShardStatistics(bytes_in=100, bytes_out=100, memory_bytes=123456, peak_bytes=10**8)),
    ]
    assert shard_table(shards) == [
        "shard  bytes in  bytes out  of mean  updates  busy s  queue  longest   values         peak",
        "    0       300        300    1.500        4     1.2      2        9        0            0",
        "    1       100        100    0.500        0     0.0      0        0  123,456  100,000,000",
    ]
    assert shard_table([]) == []
    assert "-" in shard_table([(0, ShardStatistics())])[1].split()


def test_rejections_are_listed() -> None:
    shards = [(0, ShardStatistics()), (1, ShardStatistics(refused=3, dropped=1))]
    assert rejections(shards) == ["shard 1 refused 3 connections and dropped 1 message"]
    assert job_tables(JobStatistics(job="j", shards=dict(shards)))[-1] == rejections(shards)[0]


def test_a_whole_job() -> None:
    job = JobStatistics(
        job="lenet-1", workers=dict(enumerate(TWO)), shards={0: ShardStatistics(bytes_in=1)}
    )
    lines = job_tables(job)
    assert lines[0] == "job lenet-1: 2 workers, 20 iterations, 1 shard"
    assert "other traffic: 11 bytes in all, for joining, clocks, collections and snapshots" in lines
    assert lines[-2].startswith("shard")
    assert job_tables(JobStatistics(job="lenet-1"))[-1] == "no iteration has ended yet"


def test_gpus_have_a_table_of_their_own() -> None:
    whole = GpuReading(memory_bytes=3 << 29, total_bytes=8 << 30, busy=0.746, temperature_c=61.0)
    job = JobStatistics(job="j", gpus={0: whole, 3: GpuReading(memory_bytes=1)})
    assert decode_statistics(encode_statistics(job)) == job
    text = "\n".join(job_tables(job))
    assert "1.5 of 8.0 GiB" in text and "75 %" in text and "61 °C" in text
    assert "GPUs:" not in "\n".join(job_tables(JobStatistics(job="j")))
    for invalid in ({"busy": "x"}, {"memory_bytes": -1}, None, [1]):
        assert parsed(GpuReading, invalid) is None
