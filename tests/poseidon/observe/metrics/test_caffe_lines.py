"""Lines of `caffe test` and `caffe time`, to the letter."""

from __future__ import annotations

from poseidon.observe.metrics import caffe_lines as lines
from poseidon.observe.metrics.record import Output


def test_scores() -> None:
    accuracy = Output(name="accuracy", value=0.7491, loss_weight=0)
    loss = Output(name="loss", value=0.748170001, loss_weight=2)
    assert lines.running(100).text == "Running for 100 iterations."
    assert lines.batch_line(7, accuracy).text == "Batch 7, accuracy = 0.7491"
    assert lines.batch_line(7, loss).text == "Batch 7, loss = 0.74817"
    assert [line.text for line in lines.score_lines(1.49634, (accuracy, loss))] == [
        "Loss: 1.49634",
        "accuracy = 0.7491",
        "loss = 0.74817 (* 2 = 1.49634 loss)",
    ]


def test_devices() -> None:
    assert [line.text for line in lines.using("cpu")] == ["Use CPU."]
    assert [line.text for line in lines.using("cuda:1", gpu_name="K20")] == [
        "Use GPU with device ID 1",
        "GPU device name: K20",
    ]


def test_times() -> None:
    conv = lines.LayerTime(name="conv1", forward_ms=24.5, backward_ms=0.0123456789)
    inner = lines.LayerTime(name="inception_3a/1x1", forward_ms=1, backward_ms=0)
    times = lines.NetTime(
        layers=(conv, inner), forward_ms=30, backward_ms=12.5, total_ms=85, iterations=2
    )
    assert [line.text for line in lines.benchmark_ends(times)] == [
        "Average time per layer: ",
        "     conv1\tforward: 24.5 ms.",
        "     conv1\tbackward: 0.0123457 ms.",
        "inception_3a/1x1\tforward: 1 ms.",
        "inception_3a/1x1\tbackward: 0 ms.",
        "Average Forward pass: 30 ms.",
        "Average Backward pass: 12.5 ms.",
        "Average Forward-Backward: 42.5 ms.",
        "Total Time: 85 ms.",
        "*** Benchmark ends ***",
    ]
