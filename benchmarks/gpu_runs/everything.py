"""Every check and figure of one GPU, part by part, within a limit on the time: `gpu.py --all`.

Law: a part that fails, or that the time does not reach, is a row; the others go on, and the file has
what there is after each part.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_runs.checks import CheckFailed, batches, build, loop, other_stream
from benchmarks.gpu_runs.jobs import ROOT, lone_worker, shard_process
from benchmarks.gpu_runs.nets import DeviceNet
from benchmarks.gpu_runs.speed import SpeedEffort, System, contestants, device_name, measure_speed
from benchmarks.testbed.tables import Table
from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TRAIN, LayerParameter, NetState
from poseidon.caffe.proto.definition import NetDefinition, read_net
from poseidon.engine.worker_context import WorkerContext
from poseidon.errors import PoseidonError
from poseidon.exchange.compute_options import DEFAULT_COMPUTE, Arithmetic, ComputeOptions
from poseidon.exchange.device import TYPES, choose_fastest, compute_on
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.torch.distribute import join
from poseidon.torch.options import DistributeOptions
from poseidon.torch.update_rules import SGD
from ps_server import Precision

Report = Callable[[str], None]
SYSTEMS = (
    System("default, one GPU", None),
    System("ps", ExchangeOptions(kind=ExchangeKind.SERVER)),
    System("hybrid", ExchangeOptions(kind=ExchangeKind.HYBRID)),
    *(
        System(
            f"ps, --wire_precision={wire.value}",
            ExchangeOptions(kind=ExchangeKind.SERVER, precision=wire),
        )
        for wire in (Precision.BFLOAT16, Precision.FLOAT16)
    ),
    *(
        System(f"ps, --compress={codec}", ExchangeOptions(kind=ExchangeKind.SERVER, compress=codec))
        for codec in ("int8", "topk:0.01", "powersgd:4")
    ),
)
"""What a job of one worker may be, beside plain torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaffeNet:
    """A net of the zoo, on random images.

    Attributes:
        path: of its definition, in prototxt.
        image: channels, height and width.
    """

    name: str
    path: str
    batch: int
    image: tuple[int, int, int]


CAFFE_NETS = (
    CaffeNet(name="AlexNet", path="alexnet/train_val.prototxt", batch=256, image=(3, 227, 227)),
    CaffeNet(name="GoogLeNet", path="googlenet/train_val.prototxt", batch=128, image=(3, 224, 224)),
    CaffeNet(
        name="ResNet-50", path="resnet/resnet50_train_val.prototxt", batch=64, image=(3, 224, 224)
    ),
)
SMALL_NETS = (
    CaffeNet(name="LeNet", path="lenet/lenet_train_test.prototxt", batch=4, image=(1, 28, 28)),
)
FORMS = (
    ComputeOptions(),
    ComputeOptions(precision=Arithmetic.TF32),
    ComputeOptions(precision=Arithmetic.BFLOAT16),
    ComputeOptions(precision=Arithmetic.BFLOAT16, channels_last=True),
    ComputeOptions(precision=Arithmetic.FLOAT16),
    ComputeOptions(precision=Arithmetic.FLOAT16, channels_last=True),
)


def run_everything(
    device: torch.device,
    parts: Mapping[str, Callable[[], Table]],
    *,
    limit_s: float,
    report: Report,
    on_table: Callable[[Table], None],
    now_s: Callable[[], float] = time.monotonic,
) -> bool:
    """Run parts in their order; return whether all of them have been run and are good.

    Args:
        limit_s: no part begins later than that.
        on_table: takes each table as soon as it is there; the last one says how each part ended.
    """
    began_s, rows = now_s(), []
    for name, part in parts.items():
        at_s = now_s() - began_s
        if at_s > limit_s:
            rows.append((name, "", f"left out: {limit_s:.0f} s were over"))
            continue
        report(name)
        problem = ""
        try:
            on_table(part())
        except (PoseidonError, RuntimeError, AssertionError) as error:
            problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        rows.append((name, f"{now_s() - began_s - at_s:.0f}", problem or "good"))
    on_table(
        Table(
            title=f"Everything on {device_name(device)}",
            head=("part", "seconds", "result"),
            rows=tuple(rows),
            reading=f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN "
            f"{torch.backends.cudnn.version()}.",
            facts=tuple({"part": name, "result": result} for name, _, result in rows),
        )
    )
    return all(result == "good" for _, _, result in rows)


def parts_of(
    device: torch.device,
    nets: Sequence[DeviceNet],
    caffe_nets: Sequence[CaffeNet],
    effort: SpeedEffort,
    *,
    checks: Callable[[], Table],
    report: Report,
) -> dict[str, Callable[[], Table]]:
    """Return all parts, those first that say most."""
    return {
        "checks": checks,
        "determinism": partial(determinism, device),
        "waits for the device": partial(synchronizations, nets[-1], device),
        **{
            f"speed and memory, {net.name}": partial(
                measure_speed, (net,), device, effort, report, SYSTEMS
            )
            for net in nets
        },
        **{
            f"precision, {net.name}": partial(precisions, net, device, effort) for net in caffe_nets
        },
        # last: what it has begun makes all later work slow
        "torch's sanitizer of streams": partial(sanitized, device),
    }


@contextmanager
def computing(device: torch.device, options: ComputeOptions) -> Iterator[None]:
    """Let torch compute so within the block."""
    compute_on(device, options)
    choose_fastest(options, shapes_change=False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        compute_on(device, DEFAULT_COMPUTE)
        torch.backends.cudnn.benchmark = False


def determinism(device: torch.device) -> Table:
    """Train a small net twice with each kind of kernels, and compare the bits.

    Raises:
        CheckFailed: they differ with --deterministic.
    """
    rows, rule = [], SGD(lr=0.1, momentum=0.9)

    def end() -> dict[str, Tensor]:
        module = build(device)
        context = WorkerContext(device=device)
        with join(module, rule, DistributeOptions(), context) as group:
            loop(device, lambda: other_stream(device))(module, group)
            group.settle()
        return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}

    for options in (ComputeOptions(), ComputeOptions(deterministic=True)):
        with computing(device, options):
            one, other = end(), end()
        equal = all(torch.equal(one[name], other[name]) for name in one)
        rows.append((options.deterministic, equal))
    if not rows[-1][1]:
        raise CheckFailed("two runs with --deterministic have different bits")
    return Table(
        title="Two runs of one job",
        head=("kernels", "bits"),
        rows=tuple(
            ("--deterministic" if fixed else "by default", "equal" if equal else "different")
            for fixed, equal in rows
        ),
        reading=f"{len(batches(device))} steps of a net with a convolution.",
        facts=tuple({"deterministic": fixed, "equal": equal} for fixed, equal in rows),
    )


def synchronizations(net: DeviceNet, device: torch.device) -> Table:
    """Count how often the training loop waits for the device in a step; none is the goal."""
    rows = []
    for system in (SYSTEMS[0], SYSTEMS[1]):
        with contestants(net, device, SpeedEffort(), (system,)) as found:
            ours = found[system.name]
            for _ in range(3):
                ours.iterate()
            ours.finish()
            with counted_waits(device) as waits:
                ours.iterate()
            ours.finish()
        rows.append((system.name, len(waits)))
    return Table(
        title=f"Waits of the training loop for the device in a step of {net.name}",
        head=("system", "waits"),
        rows=tuple((name, str(count)) for name, count in rows),
        reading="Counted by torch.cuda.set_sync_debug_mode, in all threads.",
        facts=tuple({"system": name, "waits": count} for name, count in rows),
    )


@contextmanager
def counted_waits(device: torch.device) -> Iterator[list[str]]:
    """Yield a list that has, after the block, each wait for the device within it."""
    found: list[str] = []
    if device.type != "cuda":
        yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found += [str(one.message) for one in caught if "synchroniz" in str(one.message)]


def sanitized(device: torch.device) -> Table:
    """Train a small net while torch checks the order of what the training loop does on streams.

    Raises:
        CheckFailed: two streams use a tensor, and no event is between.
    """
    rule, systems = SGD(lr=0.1, momentum=0.9), SYSTEMS[:3]
    for system in systems:
        with ExitStack() as stack:
            context = WorkerContext(device=device)
            if system.options is not None:
                context = lone_worker(system.options, *stack.enter_context(shard_process()), device)
            if device.type == "cuda":
                stack.enter_context(_sanitizer(system.name))
            module = build(device)
            with join(module, rule, DistributeOptions(), context) as group:
                loop(device, lambda: other_stream(device))(module, group)
                group.settle()
    return Table(
        title="torch's sanitizer of streams",
        head=("system", "result"),
        rows=tuple((system.name, "good") for system in systems),
        reading="It sees tensors of the GPU, by their first address, and the training loop's work.",
        facts=tuple({"system": system.name} for system in systems),
    )


@contextmanager
def _sanitizer(name: str) -> Iterator[None]:
    # to import it makes all later work slow
    from torch.cuda._sanitizer import CUDASanitizerErrors, cuda_sanitizer

    cuda_sanitizer.enable()
    try:
        yield
    except CUDASanitizerErrors as error:
        raise CheckFailed(f"{name}: {error}; the text above has the tensors") from error
    finally:
        cuda_sanitizer.disable()


def precisions(net: CaffeNet, device: torch.device, effort: SpeedEffort) -> Table:
    """Measure forward and backward passes of a net in each precision, and the memory they need."""
    rows: list[tuple[str, float, int]] = []
    for options in FORMS:
        if options.precision is Arithmetic.TF32 and device.type != "cuda":
            continue
        name = options.precision.value + (", channels last" if options.channels_last else "")
        with computing(device, options), closing(opened(net, device, options)) as caffe:
            seconds, memory = _passes(caffe, device, effort)
        rows.append((name, net.batch / seconds, memory))
    return Table(
        title=f"{net.name}, batch {net.batch}, on {device_name(device)}",
        head=("precision", "images a second", "of float32", "memory, MB"),
        rows=tuple(
            (name, f"{rate:.1f}", f"{rate / rows[0][1]:.2f}", f"{memory / 1e6:.0f}")
            for name, rate, memory in rows
        ),
        reading="Forward and backward passes; the memory is the most that torch has allocated.",
        facts=tuple(
            {"net": net.name, "precision": name, "per_s": rate, "memory_bytes": memory}
            for name, rate, memory in rows
        ),
    )


def opened(net: CaffeNet, device: torch.device, options: ComputeOptions) -> Net:
    """Build a net whose data layers give random images."""
    found = read_net(ROOT / "prototxt" / net.path)
    state = NetState(phase=TRAIN)
    param = found.param
    context = LayerContext(
        phase=TRAIN,
        seed=1,
        device=device,
        autocast=TYPES.get(options.precision),
        channels_last=options.channels_last,
    )
    for index, layer in enumerate(param.layer):
        if layer.type == "Data":
            param.layer[index].CopyFrom(_random(layer, net))
    definition = NetDefinition(param=param, source=net.path, layer_lines=(), folder=found.folder)
    return compile_net(definition, context, state=state)


def _random(layer: LayerParameter, net: CaffeNet) -> LayerParameter:
    """Return a layer with the tops of a data layer."""
    found = LayerParameter(name=layer.name, type="DummyData", top=layer.top, include=layer.include)
    block = found.dummy_data_param
    block.shape.add().dim.extend((net.batch, *net.image))
    block.shape.add().dim.extend((net.batch,))
    block.data_filler.add(type="gaussian", std=1.0)
    block.data_filler.add(type="constant", value=0.0)
    return found


def _passes(net: Net, device: torch.device, effort: SpeedEffort) -> tuple[float, int]:
    """Return the seconds of an iteration, the median of rounds, and the bytes allocated."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for turn in range(1 + effort.rounds):  # the first is not measured
        began_s = time.perf_counter()
        for _ in range(effort.iterations):
            net.zero_grad(set_to_none=True)
            net()
            net.backward(net.loss)
        if on_gpu:
            torch.cuda.synchronize(device)
        if turn:
            seconds.append((time.perf_counter() - began_s) / effort.iterations)
    net.drop_graph()
    return sorted(seconds)[len(seconds) // 2], torch.cuda.max_memory_allocated(
        device
    ) if on_gpu else 0
