"""Broken jobs that the launcher must refuse before it starts a process."""

import numpy as np

from poseidon.data.databases.kinds import Backend
from poseidon.data.mean import write_mean
from tests.support.broken_jobs import (
    HAS_NO_GPU,
    NOT_SHARED,
    TWO,
    V0_NET,
    Broken,
    both,
    cut_short,
    empty_lmdb,
    hosts,
    mixed_shapes,
    net,
    replace_database,
    saved_model,
    saved_state,
    solver,
    write,
)
from tests.support.databases import make_pictures

DEFINITIONS = (
    Broken(
        name="solver-field-typo",
        edit=(solver("base_lr:", "bace_lr:"),),
        says=r"solver\.prototxt:2:1: unknown field 'bace_lr' in SolverParameter; did you mean 'base_lr'\?",
    ),
    Broken(
        name="net-field-typo",
        edit=(net("{ num_output: 2 kernel_size", "{ num_output: 2 kernal_size"),),
        says=r"net\.prototxt:6:\d+: unknown field 'kernal_size' in ConvolutionParameter; did you mean 'kernel_size'\?",
    ),
    Broken(
        name="enum-typo", edit=(net("pool: MAX", "pool: MAXX"),), says=r"net\.prototxt:7:\d+: .*MAXX.*MAX"
    ),
    Broken(
        name="brace-missing",
        edit=(net('top: "loss" }', 'top: "loss"'),),
        says=r"net\.prototxt:10:1: the '\{' of 'layer' in line 10 is not",
    ),
    Broken(
        name="text-for-a-number",
        edit=(net("num_output: 10", 'num_output: "ten"'),),
        says=r"net\.prototxt:9:\d+: .*num_output",
    ),
    Broken(
        name="number-for-text", edit=(solver('"fixed"', "3"),), says=r"solver\.prototxt:3:\d+: .*lr_policy"
    ),
    Broken(
        name="solver-missing", prepare=lambda f: (f / "solver.prototxt").unlink(), says=r"{}/solver\.prototxt"
    ),
    Broken(name="solver-is-a-folder", command=("train", "--solver={}"), says=r"{}.*(folder|directory)"),
    Broken(name="solver-empty", prepare=write("solver.prototxt", ""), says=r"solver\.prototxt: .*empty"),
    Broken(
        name="solver-not-text",
        prepare=write("solver.prototxt", b"\xff\xfe\x00"),
        says=r"solver\.prototxt.*text",
    ),
    Broken(name="net-not-named", edit=(solver('net: "net.prototxt"\n', ""),), says="no train net is named"),
    Broken(
        name="net-missing",
        edit=(solver("net.prototxt", "nett.prototxt"),),
        says=r"solver\.prototxt:1: net: there is no net definition 'nett\.prototxt' \(searched: ",
    ),
    Broken(name="net-empty", prepare=write("net.prototxt", "# nothing\n"), says=r"net\.prototxt: .*empty"),
    Broken(
        name="first-grammar",
        prepare=write("net.prototxt", V0_NET),
        says=r"net\.prototxt:2: unknown layer type 'convolution' of Caffe's first format \(V0\); expected one of .*conv",
    ),
    Broken(
        name="net-without-loss",
        edit=(net("SoftmaxWithLoss", "Accuracy"),),
        says=r"net\.prototxt: the net has no loss to train on",
    ),
    Broken(
        name="layer-type-unknown",
        edit=(net('"InnerProduct"', '"InerProduct"'),),
        says=r"net\.prototxt:8: layer 'ip' .*'InerProduct'.*did you mean 'InnerProduct'\?",
    ),
    Broken(
        name="bottom-unknown",
        edit=(net('bottom: "pool" top: "ip"', 'bottom: "pol" top: "ip"'),),
        says=r"net\.prototxt:8: layer 'ip' \(InnerProduct\): unknown bottom 'pol'; did you mean 'pool'\?",
    ),
    Broken(
        name="bottom-only-in-the-other-phase",
        edit=(
            solver("max_iter", "test_iter: 1 test_interval: 1 max_iter"),
            net('top: "label"\n', 'top: "label" include { phase: TRAIN }\n'),
        ),
        says=r"net\.prototxt:5: layer 'conv' \(Convolution\): unknown bottom 'data'",
    ),
    Broken(
        name="phase-without-layers",
        edit=(
            solver("max_iter", "test_iter: 1 test_interval: 1 max_iter"),
            net("layer { name", "layer { include { phase: TRAIN } name"),
        ),
        says=r"net\.prototxt: the net has no layer for phase TEST",
    ),
    Broken(
        name="lr-policy-unknown",
        edit=(solver("fixed", "fixt"),),
        says=r"solver\.prototxt:3: lr_policy: .*fixed",
    ),
    Broken(
        name="momentum-out-of-range",
        edit=(solver("momentum: 0.9", "momentum: 1.5"),),
        says=r"solver\.prototxt:4: momentum: .*1\.5",
    ),
    Broken(
        name="rate-not-a-number",
        edit=(solver("base_lr: 0.01", "base_lr: nan"),),
        says=r"solver\.prototxt:2: base_lr",
    ),
    Broken(
        name="test-interval-missing",
        edit=(solver("max_iter", "test_iter: 1 max_iter"),),
        says=r"solver\.prototxt.*: test_interval: expected a positive number",
    ),
    Broken(
        name="test-iter-negative",
        edit=(solver("max_iter", "test_iter: -1 test_interval: 1 max_iter"),),
        says=r"solver\.prototxt:5: test_iter: ",
    ),
    Broken(
        name="max-iter-missing",
        edit=(solver("max_iter: 2\n", ""),),
        says=r"solver\.prototxt: max_iter: missing",
    ),
    Broken(
        name="solver-type-unknown",
        edit=(solver("max_iter", 'type: "SDG" max_iter'),),
        says=r"solver\.prototxt:5: type: unknown solver type 'SDG'; did you mean 'SGD'\?",
    ),
    Broken(
        name="snapshot-folder-cannot-be-made",
        edit=(solver('"snap"', '"hosts/snap"'),),
        says=r"solver\.prototxt:6: snapshot_prefix: .*hosts",
    ),
    Broken(name="output-is-a-file", flags=("--output={}/hosts",), says=r"output.*{}/hosts"),
    Broken(name="output-below-a-file", flags=("--output={}/hosts/deep",), says=r"output.*{}/hosts/deep"),
    Broken(
        name="net-outputs-below-a-file", flags=("--net_outputs={}/hosts/o",), says=r"net_outputs.*{}/hosts"
    ),
    Broken(
        name="hosts-missing", flags=("--hostfile={}/none",), says=r"{}/none: there is no such machinefile"
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
    Broken(name="snapshot-missing", flags=("--snapshot={}/s",), says=r"--snapshot: there is no file {}/s"),
    Broken(
        name="weights-missing",
        flags=("--weights={}/w,{}/net.prototxt",),
        says=r"--weights: there is no file {}/w",
    ),
    Broken(name="staleness-negative", flags=("--table_staleness=-1",), says=r"table_staleness.*'-1'", code=2),
    Broken(name="consistency-unknown", flags=("--consistency_model=BSP",), says=r"SSPPush.*'BSP'", code=2),
    Broken(name="flag-unknown", flags=("--solvr=x",), says=r"--solvr", code=2),
    Broken(name="threads-zero", flags=("--threads=0",), says=r"--threads=0: expected 1 or more", code=2),
    Broken(
        name="return-timeout-below-zero",
        flags=("--return_timeout=-1",),
        says=r"--return_timeout=-1: expected 0",
        code=2,
    ),
    Broken(name="stall-timeout-zero", flags=("--stall_timeout=0",), says=r"stall_timeout.*0", code=2),
    Broken(
        name="channels-zero", flags=("--num_comm_channels_per_client=0",), says=r"channels.* 1 .*0", code=2
    ),
    Broken(name="gpu-not-a-number", flags=("--gpu=first",), says=r"--gpu must be .*'first'", code=2),
    Broken(name="solver-flag-missing", command=("train",), says=r"--solver", code=2),
    Broken(name="command-unknown", command=("trian",), says=r"trian", code=2),
    Broken(
        name="partition-nothing",
        command=("partition_data", "{}/none_lmdb"),
        says=r"{}/none_lmdb does not exist",
    ),
    Broken(name="partition-no-database", command=("partition_data", "{}"), says=r"{} is not a database"),
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
    Broken(name="kill-nobody", command=("kill", "{}/none"), says=r"{}/none' is neither a running job nor"),
    Broken(
        name="kill-without-target",
        command=("kill",),
        says=r"expected a job's id, a machinefile, or --all",
        code=2,
    ),
)
DATA_AND_MODELS = (
    Broken(
        name="database-missing",
        edit=(net("train_lmdb", "none_lmdb"),),
        says=r"net\.prototxt:2: layer 'data' \(Data\): the database .*/none_lmdb does not exist",
    ),
    Broken(name="database-empty", prepare=replace_database(empty_lmdb), says=r"{}/train_lmdb is empty"),
    Broken(
        name="database-cut-short",
        prepare=lambda f: cut_short(f / "train_lmdb"),
        says=r"{}/train_lmdb is truncated",
    ),
    Broken(
        name="lmdb-is-leveldb",
        prepare=replace_database(
            lambda path: make_pictures(path, 10, backend=Backend.LEVELDB, shape=(1, 6, 6))
        ),
        says=r"{}/train_lmdb is LevelDB, but was named as LMDB: write backend: LEVELDB",
    ),
    Broken(
        name="kernel-too-large",
        edit=(net("kernel_size: 3", "kernel_size: 7"),),
        says=r"net\.prototxt:5: layer 'conv' \(Convolution\): .*7.*6",
    ),
    Broken(
        name="labels-do-not-fit-the-scores",
        edit=(net('bottom: "ip" bottom', 'bottom: "pool" bottom'),),
        says=r"net\.prototxt:10: layer 'loss' \(SoftmaxWithLoss\): bottom 'label' has 1 value per item, expected 9",
    ),
    Broken(
        name="mean-file-of-other-shape",
        edit=(net("scale: 0.01", 'mean_file: "mean"'),),
        prepare=lambda f: write_mean(f / "mean", np.zeros((3, 6, 6), np.float32)),
        says=r"{}/mean is 3 x 6 x 6 .*but the images are 1 x 6 x 6",
    ),
    Broken(
        name="mean-file-missing",
        edit=(net("scale: 0.01", 'mean_file: "mean"'),),
        says=r"mean file .*mean cannot be read: .*compute_image_mean makes one",
    ),
    Broken(
        name="crop-too-large",
        edit=(net("scale: 0.01", "crop_size: 9"),),
        says=r"crop_size 9 is larger than the images, which are 1 x 6 x 6",
    ),
    Broken(
        name="state-cut-short",
        prepare=both(saved_state(cut=50), saved_model("w.caffemodel")),
        flags=("--snapshot={}/s.solverstate",),
        says=r"{}/s\.solverstate is not a solver state, or it is truncated",
    ),
    Broken(
        name="state-is-a-model",
        prepare=saved_model("w.caffemodel"),
        flags=("--snapshot={}/w.caffemodel",),
        says=r"{}/w\.caffemodel is not a solver state",
    ),
    Broken(
        name="model-named-in-the-solver-missing",
        edit=(solver("max_iter", 'weights: "none.caffemodel" max_iter'),),
        says=r"cannot read the model .*none\.caffemodel: No such file",
    ),
    Broken(
        name="batch-size-zero",
        edit=(net("batch_size: 4", "batch_size: 0"),),
        says=r"net\.prototxt:2: layer 'data' \(Data\): .*batch_size",
    ),
    Broken(
        name="state-without-its-model",
        prepare=saved_state(),
        flags=("--snapshot={}/s.solverstate",),
        says=r"the weights of {}/s\.solverstate are missing",
    ),
    Broken(
        name="leveldb-shared-by-two-clients",
        edit=(TWO, net("backend: LMDB", "backend: LEVELDB")),
        prepare=replace_database(
            lambda path: make_pictures(path, 10, backend=Backend.LEVELDB, shape=(1, 6, 6))
        ),
        says=r"LevelDB database {}/train_lmdb .*in one process only: give each client its own part",
    ),
    Broken(
        name="partition-missing",
        edit=(TWO, NOT_SHARED),
        says=r"{}/train_lmdb_\d \(shared_file_system is false\), which does not exist: create it with",
    ),
    Broken(
        name="streaming-with-workers-of-a-host",
        flags=("--sync_every=4", "--sync_fragments=2", "--num_app_threads=2"),
        says="--sync_fragments and --sync_delay need one worker on each host, not 2: the workers of a host exchange all tensors",
        code=2,
    ),
    Broken(
        name="compress-pattern-without-tensor",
        edit=(TWO,),
        flags=("--compress=fc*=int8",),
        says=r"--compress=fc\*=int8: no tensor that int8 can take has a name like 'fc\*'; the tensors are conv.0, conv.1, ip.0",
        code=2,
    ),
    Broken(
        name="compress-pattern-of-a-codec-that-cannot-take-it",
        flags=("--compress=conv.1=powersgd:1",),
        says=r"no tensor that powersgd:1 can take has a name like 'conv.1'",
        code=2,
    ),
    Broken(
        name="powersgd-with-a-limit-of-the-norm",
        edit=(TWO, solver("max_iter: 2", "max_iter: 2 clip_gradients: 35")),
        flags=("--compress=powersgd:1",),
        says=r"clip_gradients: 35 is not possible with --compress=powersgd:1: ",
        code=2,
    ),
    Broken(
        name="partitions-of-more-clients",
        edit=(TWO, NOT_SHARED),
        prepare=lambda f: [make_pictures(f / f"train_lmdb_{part}", 3, shape=(1, 6, 6)) for part in range(3)],
        says=r"divided for more than the 2 clients of this job, as train_lmdb_2 shows",
    ),
)
LAUNCHER = DEFINITIONS + DATA_AND_MODELS
if HAS_NO_GPU:
    LAUNCHER += (
        Broken(
            name="gpu-mode-without-gpu",
            edit=(solver("CPU", "GPU"),),
            says=r"solver\.prototxt:8: solver_mode: GPU",
        ),
        Broken(name="gpu-flag-without-gpu", flags=("--gpu=0",), says=r"--gpu=0: there is no GPU 0", code=2),
        Broken(name="gpu-all-without-gpu", flags=("--gpu=all",), says=r"--gpu=all: no GPU", code=2),
    )
