"""The claims: each figure of README's tables and sentences, and the figures of docs that need
hardware.

Law: data only. The published figures are in the file of results (`page.RESULTS`), and
`claims.py --publish` writes them there and into the pages.
"""

from __future__ import annotations

from benchmarks.claim_checks.definitions import (
    Claim,
    Elsewhere,
    Measurement,
    Sentence,
    Speedup,
)

REAL_OURS = "default,default+int8,default+powersgd:4:start=2"
REAL_HOOKS = "fp16,powersgd:4"
MEASUREMENTS = (
    Measurement(
        name="computed-100",
        words="speed --compute real --net gpt-20m --rates 100 --rounds 2 --iterations 1 "
        f"--ours {REAL_OURS} --hooks {REAL_HOOKS}",
    ),
    Measurement(
        name="computed-1000",
        words="speed --compute real --net gpt-20m --rates 1000 --rounds 3 --iterations 3 "
        f"--ours {REAL_OURS} --hooks {REAL_HOOKS}",
    ),
    Measurement(
        name="computed-10000",
        words="speed --compute real --net gpt-20m --rates 10000 --rounds 5 --iterations 3 "
        "--ours default --hooks=",
    ),
    Measurement(
        name="computed-rounds",
        words="speed --compute real --net gpt-2m --rates 100 --rounds 3 "
        "--ours default+H20+int8 --hooks diloco:20",
    ),
    Measurement(
        name="alexnet",
        words="speed --net alexnet --rates 250 --rounds 2 --iterations 1 --warm 1 --buckets= "
        "--in_clear",
    ),
    Measurement(
        name="resnet50",
        words="speed --net resnet50 --exchange ps --rates 1000 --rounds 3 --iterations 2 --warm 1 "
        "--buckets= --in_clear",
    ),
    Measurement(
        name="resnet50-servers",
        words="speed --net resnet50 --exchange ps --rates 250 --servers 4 --rounds 2 "
        "--iterations 2 --warm 1 --buckets= --in_clear",
    ),
    Measurement(
        name="resnet50-auto",
        words="speed --net resnet50 --exchange auto --rates none --rounds 5 --iterations 4 "
        "--warm 1 --buckets= --in_clear",
    ),
    Measurement(name="two-workers", script="scale.py", words="forms --nets gpt-2m --rounds 3"),
)

_WAYS = (
    ("plain", "default", "DDP", 0.1),
    ("int8", "default+int8", "DDP fp16", 0.15),
    ("powersgd", "default+powersgd:4:start=2", "DDP PowerSGD 4", 0.15),
)
"""Ours, and the job of torch that it is compared with."""
CLAIMS: tuple[Claim, ...] = (
    *(
        Claim(
            name=f"{way}-{rate}",
            what=f"GPT of 19 M parameters, {rate} Mbit/s: `{ours}` beside {other}",
            by=Speedup(measurement=f"computed-{rate}", rate_mbit=rate, ours=ours, other=other),
            tolerance=tolerance,
        )
        for rate in (100, 1000)
        for way, ours, other, tolerance in _WAYS
    ),
    Claim(
        name="plain-10000",
        what="GPT of 19 M parameters, 10000 Mbit/s: `default` beside DDP",
        by=Speedup(measurement="computed-10000", rate_mbit=10000, ours="default"),
    ),
    Claim(
        name="rounds-100",
        what="GPT of 2 M parameters, 100 Mbit/s: `default+H20+int8` beside a DiLoCo loop",
        by=Speedup(
            measurement="computed-rounds",
            rate_mbit=100,
            ours="default+H20+int8",
            other="DiLoCo loop 20",
        ),
        tolerance=0.15,
    ),
    Claim(
        name="alexnet-250",
        what="AlexNet, emulated, 250 Mbit/s, beside DDP",
        by=Speedup(measurement="alexnet", rate_mbit=250, ours="hybrid"),
        tolerance=0.4,
    ),
    Claim(
        name="resnet50-1000",
        what="ResNet-50, emulated, 1 Gbit/s, beside DDP",
        by=Speedup(measurement="resnet50", rate_mbit=1000, ours="ps"),
    ),
    Claim(
        name="resnet50-servers",
        what="ResNet-50, emulated, 250 Mbit/s, four more hosts that only serve, beside DDP",
        by=Speedup(measurement="resnet50-servers", rate_mbit=250, ours="ps 4 servers"),
    ),
    Claim(
        name="resnet50-auto",
        what="ResNet-50, emulated, unshaped, `--exchange=auto`, beside DDP",
        by=Speedup(measurement="resnet50-auto", rate_mbit=None, ours="auto"),
        tolerance=0.2,
    ),
    *(
        Claim(
            name=f"two-workers-{way}",
            what=f"GPT of 2 M parameters, two workers of one machine: `{ours}` beside DDP",
            by=Speedup(measurement="two-workers", rate_mbit=None, ours=ours),
            tolerance=0.15,
        )
        for way, ours in (("ddp", "run --ddp"), ("distribute", "distribute"))
    ),
    *(
        Claim(
            name=f"cifar10-{count}",
            what=f"accuracy of cifar10_quick on CIFAR-10 after {count} iterations",
            by=Elsewhere(
                reason="it needs CIFAR-10 and a quarter of an hour",
                command="make cifar10",
                file=f"benchmarks/results/logs/cifar10_quick_{log}.log",
                pattern=r"Test net output #0: accuracy = ([\d.]+)",
            ),
            tolerance=0.01,
        )
        for count, log in ((4000, "0-4000"), (5000, "lr1_4000-5000"))
    ),
    *(
        Claim(
            name=f"gpu-{net.lower()}",
            what=f"{net} on an H100: one worker through a shard beside plain torch",
            by=Elsewhere(
                reason="it needs an NVIDIA GPU",
                command="python benchmarks/gpu.py --rounds 5 --iterations 10",
                file="benchmarks/results/speed.md",
                pattern=rf"\| {net}, \w+/s \|[^(]*\(([\d.]+)\)",
            ),
            tolerance=0.01,
        )
        for net in ("AlexNet", "ResNet-50", "GPT-2")
    ),
)

SENTENCES = (
    Sentence(
        page="README.md",
        template="| GPT, 19 M parameters | DDP | defaults | {plain-100} | | {plain-1000} "
        "| {plain-10000} | |",
    ),
    Sentence(
        page="README.md",
        template="| | DDP, `fp16` hook | `--compress=int8` | {int8-100} | | {int8-1000} | | |",
    ),
    Sentence(
        page="README.md",
        template="| | DDP, PowerSGD hook | `--compress=powersgd:4` | {powersgd-100} | "
        "| {powersgd-1000} | | |",
    ),
    Sentence(
        page="README.md",
        template="| GPT, 2 M parameters | DiLoCo loop, 20 steps "
        "| `--local_steps=20 --compress=int8` | {rounds-100} | | | | |",
    ),
    Sentence(
        page="README.md",
        template="| AlexNet | DDP | `--exchange=hybrid` | | {alexnet-250} | | | |",
    ),
    Sentence(
        page="README.md",
        template="| ResNet-50 | DDP | `--exchange=ps` | "
        "| {resnet50-servers} (four more hosts that only serve) | {resnet50-1000} | | |",
    ),
    Sentence(page="README.md", template="| | DDP | defaults | | | | | {resnet50-auto} |"),
    Sentence(
        page="README.md",
        template="The accuracy is {cifar10-4000} after these 4000 iterations, and {cifar10-5000} "
        "after 1000 more with the second solver",
    ),
    Sentence(
        page="docs/performance.md",
        template="| GPT of 1.9 M parameters | {two-workers-ddp} | {two-workers-distribute} |",
    ),
    Sentence(
        page="docs/performance.md",
        template="a shard had {gpu-alexnet} (AlexNet), {gpu-resnet-50} (ResNet-50) and "
        "{gpu-gpt-2} (GPT-2) of the speed of plain torch",
    ),
)
