"""The commands that make or divide data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from poseidon.cli.parsers.form import Command, FlagGroup, Parser, flag, switch, word
from poseidon.cli.parsers.reading import retired
from poseidon.flags.flag import BACKENDS, Opens, Takes, progress
from poseidon.flags.values import count, whole

DATA = "CIFAR-10: an archive, or a folder that holds it"


def _backend(group: FlagGroup, *, default: str | None) -> None:
    text = f"lmdb or leveldb ({default or 'what the folder holds'})"
    flag(group, "backend", text, choices=BACKENDS, default=default, metavar="KIND")


def _partition_data(parser: Parser) -> None:
    word(parser, "db_path", "folder of the database, or list file", read=Path, opens=Opens.DATABASE)
    group = parser.section("Flags")
    _backend(group, default=None)
    flag(group, "num_partitions", "parts (one for each client, else 2)", read=whole, metavar="N")
    text = "the machinefile: a part for each client with workers"
    flag(group, "hostfile", text, metavar="FILE", opens=Opens.MACHINEFILE)
    switch(group, "distribute", "copy part k to the k-th of them over SSH")
    flag(group, "root_folder", "for a list: put before each path", metavar="DIR", default="")
    switch(group, "replace", "replace earlier parts, here and on the hosts")
    flag(group, "ssh_config", "in place of ~/.ssh/config, as ssh -F", metavar="FILE")
    group.add(progress())


def _prepare_cifar10(parser: Parser) -> None:
    group = parser.section("Flags")
    flag(group, "data", DATA, read=Path, metavar="DIR", opens=Opens.FILE_OR_FOLDER)
    _backend(group, default="lmdb")
    text = "with leveldb: make parts _0 to _<N-1> as well (1)"
    flag(group, "clients", text, read=whole, default=1, metavar="N")
    flag(group, "folder", "where they go (examples/cifar10)", read=Path, metavar="DIR")
    flag(group, "url", "download the archive from there, or fail", metavar="URL")
    flag(group, "md5", "checksum of the archive (the published one's)", metavar="SUM")
    switch(group, "download_only", "fetch the archive and stop")
    group.add(progress())


def _convert_cifar(parser: Parser) -> None:
    word(parser, "input", "archive, or folder that holds it", read=Path, opens=Opens.FILE_OR_FOLDER)
    word(parser, "output_folder", "where the databases go", read=Path)
    word(parser, "db_type", "lmdb or leveldb", choices=BACKENDS)
    parser.section("Flags").add(progress())


def _picture_words(parser: Parser, beside: str) -> None:
    word(parser, "root_folder", "put before each path as it is", metavar="ROOTFOLDER")
    text = f"a line for each picture: path and {beside}"
    word(parser, "list_file", text, metavar="LISTFILE", read=Path, opens=Opens.FILE)
    word(parser, "db_name", "the database to make", read=Path)


def _picture_flags(group: FlagGroup) -> None:
    switch(group, "gray", "read pictures as grey ones")
    switch(group, "shuffle", "change the order of the pictures")
    switch(group, "check_size", "check that all pictures have the same number of values")
    switch(group, "encoded", "keep the pictures in their file format")
    text = "keep them in this format: png, jpg, ..."
    flag(group, "encode_type", text, default="", metavar="FORMAT")
    _backend(group, default="lmdb")


def _convert_imageset(parser: Parser) -> None:
    _picture_words(parser, "label")
    group = parser.section("Flags")
    _picture_flags(group)
    for side in ("width", "height"):
        text = f"{side} of each picture (its own)"
        flag(group, f"resize_{side}", text, read=whole, default=0, metavar="PIXELS")
    flag(group, "seed", "of the shuffle (0)", read=whole, default=0, metavar="N")
    parser.arguments.add(retired("subsampling"), retired("label_range"))
    group.add(progress())


def _convert_annoset(parser: Parser) -> None:
    _picture_words(parser, "annotation")
    group = parser.section("Flags")
    kinds = ("classification", "detection")
    text = "detection, or classification: a label in each line"
    flag(group, "anno_type", text, choices=kinds, default="classification", metavar="KIND")
    text = "xml (PASCAL VOC), json (COCO) or txt"
    flag(group, "label_type", text, choices=("xml", "json", "txt"), default="xml", metavar="FORMAT")
    text = "names and labels, a LabelMap"
    flag(group, "label_map_file", text, read=Path, default=None, metavar="FILE", opens=Opens.FILE)
    switch(group, "check_label", "refuse names and labels that occur twice")
    _picture_flags(group)
    pixels = partial(flag, group, read=count, default=0, metavar="PIXELS")
    pixels("min_dim", "enlarge pictures whose shorter side is less")
    pixels("max_dim", "shrink pictures whose longer side is more")
    pixels("resize_width", "width of each picture (its own)")
    pixels("resize_height", "height of each picture (its own)")
    flag(group, "seed", "of the shuffle (0)", read=whole, default=0, metavar="N")
    text = "also list name, height and width of each picture"
    flag(group, "name_size_file", text, read=Path, default=None, metavar="FILE")
    group.add(progress())


def _convert_voc(parser: Parser) -> None:
    text = "folder of VOC2007 and others, or one of these"
    word(parser, "voc_folder", text, read=Path, opens=Opens.FOLDER)
    word(parser, "output_folder", "where the files go", read=Path)
    group = parser.section("Flags")
    text = "comma-separated (trainval,test, else train,val)"
    flag(group, "parts", text, default="", metavar="NAMES")
    text = "names and labels (VOC's classes)"
    flag(group, "label_map_file", text, read=Path, metavar="FILE", opens=Opens.FILE)
    _backend(group, default="lmdb")
    flag(group, "seed", "of the shuffle of training parts (0)", read=whole, default=0, metavar="N")
    group.add(progress())


def _make_db(parser: Parser) -> None:
    text = "folder of classes, or list file"
    word(parser, "pictures", text, read=Path, takes=Takes.OPTIONAL_WORD)
    word(parser, "db_name", "the database to make", read=Path, takes=Takes.OPTIONAL_WORD)
    group = parser.section("Flags")
    kinds = (*BACKENDS, "minidb")
    text = "lmdb, leveldb or minidb (lmdb)"
    flag(group, "backend", text, choices=kinds, default="lmdb", metavar="KIND")
    text = "caffe2: TensorProtos; caffe: Datum (caffe2)"
    flag(group, "format", text, choices=("caffe2", "caffe"), default="caffe2", metavar="FORMAT")
    switch(group, "gray", "one channel, not three")
    switch(group, "raw", "store pixels, not files")
    flag(group, "encode_type", "store files of this format: jpg, png", default="", metavar="FORMAT")
    for side in ("width", "height"):
        text = f"{side} of each picture (its own)"
        flag(group, f"resize_{side}", text, read=count, default=0, metavar="PIXELS")
    text = "resize the shorter side, keep the ratio"
    flag(group, "shorter_side", text, read=count, default=0, metavar="PIXELS")
    switch(group, "shuffle", "in random order; -noshuffle: as found (on)", default=True)
    flag(group, "seed", "of the order, and of drawings (0)", read=count, default=0, metavar="N")
    text = "for a list: put before each path (its folder)"
    flag(group, "root_folder", text, default=None, metavar="DIR")
    group.add(progress())
    group = parser.section("A drawn set, in place of pictures: make_db --generate=two_class DIR")
    text = "two_class: cars and boats"
    flag(group, "generate", text, choices=("two_class",), default=None, metavar="SET")
    flag(group, "count", "pictures to train on (1280)", read=count, default=1280, metavar="N")
    flag(group, "test_count", "pictures to test on (96)", read=count, default=96, metavar="N")


def _convert_mnist(parser: Parser, folder: str) -> None:
    word(parser, "input_folder", "folder of the four .gz files", read=Path, opens=Opens.FOLDER)
    group = parser.section("Flags")
    flag(group, "folder", f"where they go (examples/{folder})", read=Path, metavar="DIR")
    _backend(group, default="lmdb")
    if folder == "siamese":
        flag(group, "seed", "of the random pairs (0)", read=count, default=0, metavar="N")
    group.add(progress())


def _compute_image_mean(parser: Parser) -> None:
    word(parser, "input_db", "folder of the database", read=Path, opens=Opens.DATABASE)
    word(parser, "output_file", "mean file: mean.binaryproto", read=Path, takes=Takes.OPTIONAL_WORD)
    group = parser.section("Flags")
    _backend(group, default=None)
    group.add(progress())


_command = partial(Command, module="databases")
COMMANDS: Sequence[Command] = (
    _command(
        name="partition_data",
        line="divide a database or a list among clients",
        description="Divide the records of a database, the lines of a list of pictures, or the "
        "rows of HDF5 files into n parts: record i goes to <DB_PATH>_(i mod n). Client k of a job "
        "whose data layer has shared_file_system: false reads <DB_PATH>_k. --distribute copies "
        "each part to its client and compares checksums; repeat the command to resume an "
        "interrupted copy. Nothing is overwritten without --replace.",
        example="poseidon partition_data --num_partitions=2 cifar10_train_lmdb\n"
        "poseidon partition_data --hostfile=cluster --distribute cifar10_train_lmdb",
        declare=_partition_data,
    ),
    _command(
        name="convert_imageset",
        line="convert picture files into a database",
        description="Write the pictures that LISTFILE names, a line each with path and label, "
        "into the new database "
        "DB_NAME. ROOTFOLDER is put before each path as it is, so it ends with a slash.",
        example="poseidon convert_imageset -shuffle pictures/ list.txt train_lmdb",
        declare=_convert_imageset,
    ),
    _command(
        name="convert_annoset",
        line="convert pictures with objects into a database",
        description="Write the pictures that LISTFILE names, a line each with a picture and its "
        "annotation file, into the new database DB_NAME, for AnnotatedData layers. ROOTFOLDER is "
        "put before each path as it is, so it ends with a slash. As SSD's tool of that name.",
        example="poseidon convert_annoset -anno_type=detection -label_type=txt pics/ list db",
        declare=_convert_annoset,
    ),
    _command(
        name="convert_voc",
        line="convert a folder of PASCAL VOC into databases",
        description="Make a list, a file of names and sizes, a window file and a database of each "
        "part of VOC_FOLDER, and the label map. VOC_FOLDER is a folder of years, such as "
        "VOCdevkit, or one with ImageSets, Annotations and JPEGImages. With VOC2007 and VOC2012 "
        "the databases are VOC0712_trainval_lmdb and VOC0712_test_lmdb; they are not overwritten.",
        example="poseidon convert_voc VOCdevkit examples/VOC0712",
        declare=_convert_voc,
    ),
    _command(
        name="make_db",
        line="make a database of folders of pictures",
        description="Write pictures and labels into the new database DB_NAME, for Caffe2's "
        "ImageInput or for Caffe. PICTURES is a folder with a sub-folder for each class (labels "
        "follow the order of their names), or a file with a line for each picture: path and label. "
        "--format=caffe makes the database that Caffe's Data layer reads. "
        "With --generate=two_class PICTURES is the folder in which two_class_train and two_class_val are "
        "made, of drawn cars and boats.",
        example="poseidon make_db --shorter_side=256 pictures/ train_lmdb\n"
        "poseidon make_db --format=caffe --shorter_side=256 pictures/ train_lmdb\n"
        "poseidon make_db "
        "--generate=two_class data/",
        declare=_make_db,
    ),
    _command(
        name="compute_image_mean",
        line="compute the mean picture of a database",
        description="Print the mean of each channel, and write the mean picture where OUTPUT_FILE "
        "is given.",
        example="poseidon compute_image_mean train_lmdb mean.binaryproto",
        declare=_compute_image_mean,
    ),
    _command(
        name="prepare_cifar10",
        line="make the databases of the CIFAR-10 example",
        description="Make databases and mean file. Uses, in this order: databases made earlier; "
        "CIFAR-10 under --data or $POSEIDON_DATA; a download; and without a network a small "
        "built-in set of drawn pictures, with a warning that it is not CIFAR-10.",
        example="poseidon prepare_cifar10 --data=cifar-10-binary.tar.gz",
        declare=_prepare_cifar10,
    ),
    _command(
        name="convert_cifar",
        line="convert published CIFAR-10 into databases",
        description="Make OUTPUT_FOLDER/cifar10_train_<kind>, cifar10_test_<kind> and "
        "mean.binaryproto.",
        example="poseidon convert_cifar cifar-10-batches-bin . lmdb",
        declare=_convert_cifar,
    ),
    _command(
        name="convert_mnist",
        line="convert published MNIST into databases",
        description="Make mnist_train_<kind> and mnist_test_<kind>; nothing is overwritten.",
        example="poseidon convert_mnist mnist/ --folder=examples/mnist",
        declare=partial(_convert_mnist, folder="mnist"),
    ),
    _command(
        name="convert_mnist_siamese",
        line="make databases of random pairs of MNIST's digits",
        description="Make mnist_siamese_train_<kind> and mnist_siamese_test_<kind>; nothing is "
        "overwritten. A record "
        "is a pair of digits as two channels, its label 1 if they are of one class and 0 if not.",
        example="poseidon convert_mnist_siamese mnist/ --folder=examples/siamese",
        declare=partial(_convert_mnist, folder="siamese"),
    ),
)
