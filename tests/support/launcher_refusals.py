"""Broken jobs that the launcher must refuse before it starts a process."""

from tests.support.broken_jobs import HAS_NO_GPU, Broken, hosts, mixed_shapes, solver, write
from tests.support.refused_data import DATA_AND_MODELS
from tests.support.refused_definitions import DEFINITIONS

FLAGS_AND_FILES = (
    Broken(
        name="snapshot-folder-cannot-be-made",
        edit=(solver('"snap"', '"hosts/snap"'),),
        says=r"solver\.prototxt:6: snapshot_prefix: .*hosts",
    ),
    Broken(name="output-is-a-file", flags=("--output={}/hosts",), says=r"output.*{}/hosts"),
    Broken(
        name="output-below-a-file", flags=("--output={}/hosts/deep",), says=r"output.*{}/hosts/deep"
    ),
    Broken(
        name="net-outputs-below-a-file",
        flags=("--net_outputs={}/hosts/o",),
        says=r"net_outputs.*{}/hosts",
    ),
    Broken(
        name="hosts-missing",
        flags=("--hostfile={}/none",),
        says=r"{}/none: there is no such machinefile",
    ),
    Broken(name="hosts-empty", edit=(hosts("# nobody\n"),), says=r"{}/hosts: no client found"),
    Broken(
        name="host-id-missing",
        edit=(hosts("0 127.0.0.1 0\n2 127.0.0.1 0\n"),),
        says=r"{}/hosts:2: .*1 is missing",
    ),
    Broken(
        name="host-id-twice",
        edit=(hosts("0 127.0.0.1 0\n0 127.0.0.1 0\n"),),
        says=r"{}/hosts:2: client 0 is already",
    ),
    Broken(
        name="host-port-text",
        edit=(hosts("0 127.0.0.1 http\n"),),
        says=r"{}/hosts:1: the port must be .*'http'",
    ),
    Broken(
        name="host-port-too-high",
        edit=(hosts("0 127.0.0.1 65536\n"),),
        says=r"{}/hosts:1: the port must be .*65536",
    ),
    Broken(
        name="host-port-shared",
        edit=(hosts("0 127.0.0.1 9000\n1 127.0.0.1 9000\n"),),
        says=r"{}/hosts:2: clients 0 and 1 on 127\.0\.0\.1 share port 9000",
    ),
    Broken(
        name="host-address-wrong",
        edit=(hosts("0 127.0.0.256 0\n"),),
        says=r"{}/hosts:1: '127\.0\.0\.256' is not an",
    ),
    Broken(
        name="host-line-short",
        edit=(hosts("127.0.0.1 9999\n"),),
        says=r"{}/hosts:1: expected '<id> <host> <port>'",
    ),
    Broken(
        name="host-remote",
        edit=(hosts("0 node7 9999\n"),),
        says=r"root@node7: the name node7 is not known|\S+@node7: ",
    ),
    Broken(
        name="snapshot-and-weights",
        flags=("--snapshot=a", "--weights=b"),
        says="--snapshot and --weights exclude each other",
        code=2,
    ),
    Broken(
        name="snapshot-missing",
        flags=("--snapshot={}/s",),
        says=r"--snapshot: there is no file {}/s",
    ),
    Broken(
        name="weights-missing",
        flags=("--weights={}/w,{}/net.prototxt",),
        says=r"--weights: there is no file {}/w",
    ),
    Broken(name="staleness-negative", flags=("--staleness=-1",), says=r"staleness.*'-1'", code=2),
    Broken(
        name="consistency-unknown", flags=("--consistency=BSP",), says=r"SSPPush.*'BSP'", code=2
    ),
    Broken(name="flag-unknown", flags=("--solvr=x",), says=r"--solvr", code=2),
    Broken(
        name="threads-zero", flags=("--threads=0",), says=r"--threads=0: expected 1 or more", code=2
    ),
    Broken(
        name="return-timeout-below-zero",
        flags=("--return_timeout=-1",),
        says=r"--return_timeout=-1: expected 0",
        code=2,
    ),
    Broken(
        name="stall-timeout-zero", flags=("--stall_timeout=0",), says=r"stall_timeout.*0", code=2
    ),
    Broken(name="channels-zero", flags=("--shards=0",), says=r"shards.* 1 .*0", code=2),
    Broken(
        name="gpu-not-a-number", flags=("--gpu=first",), says=r"--gpu must be .*'first'", code=2
    ),
    Broken(name="solver-flag-missing", command=("train",), says=r"--solver", code=2),
    Broken(name="command-unknown", command=("trian",), says=r"trian", code=2),
    Broken(
        name="partition-nothing",
        command=("partition_data", "{}/none_lmdb"),
        says=r"{}/none_lmdb does not exist",
    ),
    Broken(
        name="partition-no-database", command=("partition_data", "{}"), says=r"{} is not a database"
    ),
    Broken(
        name="partition-a-short-list",
        command=("partition_data", "{}/hosts"),
        says=r"cannot divide {}/hosts into 2 parts: it has only 1 lines",
        code=2,
    ),
    Broken(
        name="partition-other-backend",
        command=("partition_data", "--backend=leveldb", "{}/train_lmdb"),
        says=r"train_lmdb is LMDB, but was named as LevelDB",
    ),
    Broken(
        name="partition-exists",
        prepare=lambda folder: (folder / "train_lmdb_1").mkdir(),
        command=("partition_data", "{}/train_lmdb"),
        says=r"train_lmdb_1.*exists",
    ),
    Broken(
        name="partition-too-many",
        command=("partition_data", "--num_partitions=11", "{}/train_lmdb"),
        says=r"into 11 parts: it has only 10 records",
        code=2,
    ),
    Broken(
        name="partition-none",
        command=("partition_data", "--num_partitions=0", "{}/train_lmdb"),
        says=r"into 0 parts: expected at least 1",
        code=2,
    ),
    Broken(
        name="mean-of-different-shapes",
        prepare=lambda folder: mixed_shapes(folder / "mixed"),
        command=("compute_image_mean", "{}/mixed", "{}/mean"),
        says=r"{}/mixed: the record with key '00003' has shape",
    ),
    Broken(
        name="mean-into-a-file",
        command=("compute_image_mean", "{}/train_lmdb", "{}/hosts/mean"),
        says=r"{}/hosts/mean cannot be written",
    ),
    Broken(
        name="cifar-from-nothing",
        command=("convert_cifar", "{}/none", "{}/made", "lmdb"),
        says=r"{}/none",
    ),
    Broken(
        name="cifar-broken-archive",
        prepare=write("cifar-10-python.tar.gz", b"not an archive"),
        command=("convert_cifar", "{}", "{}/made", "lmdb"),
        says=r"cifar-10-python\.tar\.gz",
    ),
    Broken(
        name="kill-nobody",
        command=("kill", "{}/none"),
        says=r"{}/none' is neither a running job nor",
    ),
    Broken(
        name="kill-without-target",
        command=("kill",),
        says=r"give a job's id, a machinefile, or --all",
        code=2,
    ),
)
LAUNCHER = DEFINITIONS + FLAGS_AND_FILES + DATA_AND_MODELS
if HAS_NO_GPU:
    LAUNCHER += (
        Broken(
            name="gpu-mode-without-gpu",
            edit=(solver("CPU", "GPU"),),
            says=r"solver\.prototxt:8: solver_mode: GPU",
        ),
        Broken(
            name="gpu-flag-without-gpu",
            flags=("--gpu=0",),
            says=r"--gpu=0: there is no GPU 0",
            code=2,
        ),
        Broken(
            name="gpu-of-the-machinefile-without-gpu",
            edit=(hosts("0 127.0.0.1 0 gpus=0\n"),),
            says=r"gpus=0 of client 0 on 127\.0\.0\.1: this machine has 0 GPUs, .* gpus=cpu",
            code=2,
        ),
        Broken(name="gpu-all-without-gpu", flags=("--gpu=all",), says=r"--gpu=all: no GPU", code=2),
    )
