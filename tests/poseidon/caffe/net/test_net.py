"""A compiled net: loss, outputs, sharing between nets, determinism, random state, memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch

import poseidon.caffe.net
from poseidon.caffe.layers import registry
from poseidon.caffe.layers.base import Layer, LayerContext, Shape
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TEST, TRAIN, NetState
from poseidon.engine.own_time import WAITED
from poseidon.errors import DefinitionError, JobError, SnapshotError
from tests.support.nets import build, definition, inputs, layer, noise

FILL = "weight_filler { type: 'xavier' } bias_filler { type: 'uniform' }"
IP = f"inner_product_param {{ num_output: 5 {FILL} }}"
DROP = layer("Dropout", "h", "h", name="drop")
CLASSIFIER = (
    inputs(x=(4, 6), l=(4,))
    + layer("InnerProduct", "x", "h", IP, name="ip")
    + layer("ReLU", "h", "h", name="relu")
    + DROP
    + layer("InnerProduct", "h", "y", IP, name="out")
    + layer("SoftmaxWithLoss", "y l", "loss", name="loss")
    + layer("Accuracy", "y l", "accuracy", "include { phase: TEST }", name="accuracy")
)
BATCH = {"x": noise(4, 6), "l": torch.tensor([0.0, 1, 2, 3])}


def gradients(net: Net) -> list[torch.Tensor]:
    net.zero_grad()
    net(BATCH)
    net.loss.backward()  # type: ignore[no-untyped-call]
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


def test_outputs_and_loss() -> None:
    train, test = build(CLASSIFIER), build(CLASSIFIER, phase=TEST)
    assert list(train(BATCH)) == ["loss"] and list(test(BATCH)) == ["accuracy", "loss"]
    assert torch.equal(train(BATCH)["loss"], train.loss) is True
    assert train.plan.loss_weights == {"loss": 1.0} and test.plan.loss_weights == {
        "accuracy": 0.0,
        "loss": 1.0,
    }


@pytest.mark.parametrize(("data", "reads"), [("Python", True), ("DummyData", False)])
def test_the_time_of_a_users_data_layer_counts_as_waiting_for_data(data: str, reads: bool) -> None:
    module = "python_param { module: 'tests.support.python_layers' layer: 'Counting' }"
    net = build(
        layer(data, "", "x l", module if reads else "dummy_data_param { shape { dim: 2 } }")
    )
    before_s = WAITED.waited_s
    net()
    assert (WAITED.waited_s > before_s) is reads


def test_a_net_without_losses_has_loss_zero() -> None:
    net = build(inputs(x=(2, 3)) + layer("ReLU", "x", "y"))
    net({"x": noise(2, 3)})
    assert float(net.loss) == 0


def test_first_weights_depend_on_the_seed_alone() -> None:
    ways: list[dict[str, int]] = [{}, {}, {"rank": 3}, {"seed": 2}]
    one, same, rank, other = (build(CLASSIFIER, **way) for way in ways)
    for a, b, c, d in zip(*(net.parameters() for net in (one, same, rank, other)), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c) and not torch.equal(a, d)
    blobs = [info.parameter.flatten()[:5] for info in one.parameters_info]
    assert len({tuple(blob.tolist()) for blob in blobs}) == len(blobs)


def test_two_runs_are_bit_identical_and_ranks_draw_differently() -> None:
    one, two, three = build(CLASSIFIER), build(CLASSIFIER), build(CLASSIFIER, rank=1)
    for _ in range(3):
        pairs = list(zip(gradients(one), gradients(two), gradients(three), strict=True))
        assert all(torch.equal(a, b) for a, b, _ in pairs)
        assert not all(torch.equal(a, c) for a, _, c in pairs)


def test_random_state_travels() -> None:
    one, two = build(CLASSIFIER), build(CLASSIFIER, seed=9)
    gradients(one)
    state = one.random_state()
    expected = one(BATCH)["loss"].detach()
    two.load_blobs([(name, blobs) for name, _, blobs in one.layer_blobs()])
    two.set_random_state(state)
    assert torch.equal(two(BATCH)["loss"].detach(), expected)
    for wrong in (b"", state[:-1], state * 2, b"\x01\x00\x00\x00a"):
        with pytest.raises(SnapshotError, match="this net has 1 random layers"):
            two.set_random_state(wrong)


def test_a_test_net_uses_the_train_nets_blobs() -> None:
    train = build(CLASSIFIER)
    test = build(CLASSIFIER, phase=TEST, seed=5, share_with=train)
    assert all(a is b for a, b in zip(train.parameters(), test.parameters(), strict=True))
    extra = build(
        CLASSIFIER + layer("InnerProduct", "y", "z", IP, name="more"), phase=TEST, share_with=train
    )
    assert len(list(extra.parameters())) == 6
    with pytest.raises(DefinitionError, match=r"layer 'ip' .*has blobs of shape 7x6, 7"):
        build(CLASSIFIER.replace("num_output: 5", "num_output: 7"), phase=TEST, share_with=train)


def test_force_backward_reaches_the_callers_inputs() -> None:
    net = build("force_backward: true " + CLASSIFIER, phase=TEST)
    net.keep_blobs = True
    net(BATCH)
    net.loss.backward()  # type: ignore[no-untyped-call]
    assert net.blobs["x"].grad is not None and BATCH["x"].grad is None


def test_blobs_are_kept_on_request_only() -> None:
    net = build(CLASSIFIER)
    net(BATCH)
    assert net.blobs == {}
    net.keep_blobs = True
    net(BATCH)
    assert set(net.blobs) == {"x", "l", "h", "y", "loss"}
    assert {name: tuple(blob.shape) for name, blob in net.blobs.items()} == net.blob_shapes


def test_blobs_are_freed_after_their_last_use() -> None:
    net = build(
        inputs(x=(2, 3))
        + layer("ReLU", "x", "a", name="a")
        + layer("ReLU", "a", "b", name="b")
        + layer("ReLU", "b", "c", name="c")
    )
    living: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def watch(_: object, arguments: tuple[torch.Tensor, ...]) -> None:
        living.append(weakref.ref(arguments[0]))
        alive.append(sum(ref() is not None for ref in living))

    for _, module in net.layer_modules[1:]:
        module.register_forward_pre_hook(watch)
    with torch.no_grad():
        net({"x": noise(2, 3)})
    gc.collect()
    # The caller holds x; besides it only the layer's own argument lives.
    assert alive == [1, 2, 2]


def test_the_graph_of_the_last_pass_is_let_go_before_the_next() -> None:
    net = build(CLASSIFIER)
    net(BATCH)
    graph = weakref.ref(net.loss.grad_fn)
    net(BATCH)
    gc.collect()
    assert graph() is None


def test_the_public_list_is_true() -> None:
    public = poseidon.caffe.net.__all__
    assert sorted(public, key=lambda name: (name[0].islower(), name)) == list(public)
    assert all(hasattr(poseidon.caffe.net, name) for name in public)


def test_hooks_of_torch_work() -> None:
    net = build(CLASSIFIER)
    seen: list[str] = []
    for name, module in net.layer_modules:
        if module.blob_specs:
            module.register_forward_pre_hook(lambda *_, name=name: seen.append(f"use {name}"))
    for info in net.parameters_info:
        info.parameter.register_post_accumulate_grad_hook(
            lambda _, name=info.name: seen.append(f"grad {name}")
        )
    gradients(net)
    assert seen[:2] == ["use ip", "use out"]
    assert sorted(seen[2:]) == ["grad ip.0", "grad ip.1", "grad out.0", "grad out.1"]
    assert seen.index("grad out.0") < seen.index("grad ip.0")


def test_paths_of_the_definition_are_resolved_by_the_context(tmp_path: object) -> None:
    found: list[str] = []

    def resolve(path: str) -> object:
        found.append(path)
        raise DefinitionError("enough")

    context = LayerContext(phase=TRAIN, seed=0, resolve=resolve)  # type: ignore[arg-type]
    text = layer("Data", "", "a", "data_param { source: 'db' batch_size: 1 }")
    with pytest.raises(DefinitionError, match="enough"):
        compile_net(definition(text), context, state=NetState(phase=TRAIN))
    assert found == ["db"]


class Overflowing(Layer):
    """Memory runs out in its forward pass, or in its backward pass."""

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        return [bottoms[0]]

    def forward(self, bottom: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        top = bottom * 2
        top.register_hook(fail)
        return top


def fail(gradient: torch.Tensor) -> None:
    torch.empty(2**60, dtype=torch.uint8)


def test_where_memory_runs_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._CLASSES, "Overflowing", Overflowing)
    product = "inner_product_param { num_output: 3 weight_filler { type: 'msra' } }"
    net = build(
        inputs(x=(5, 4), label=(5,))
        + layer("InnerProduct", "x", "low", product, name="low")
        + layer("Overflowing", "low", "b", name="big")
        + layer("InnerProduct", "b", "high", product, name="high")
        + layer("SoftmaxWithLoss", "high label", "loss", name="loss")
    )
    given = {"x": torch.ones(5, 4), "label": torch.zeros(5)}
    size = r"with a batch_size of 5: out of memory"
    used = r"[0-9.]+ of [0-9.]+ GiB of this machine, by this process, are in use; use a smaller"
    with (
        torch.no_grad(),
        pytest.raises(
            JobError,
            match=rf"layer 'big' \(Overflowing\): in the forward pass, {size} of the GPU: 2.00 GiB "
            f"more do not fit while {used}",
        ),
    ):
        net(given)
    net(given)
    with pytest.raises(
        JobError,
        match=rf"layer 'low' .*: in the backward pass, here or just above, {size}: .*{used}",
    ):
        net.backward(net.loss)
