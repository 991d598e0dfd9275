"""`poseidon upgrade_net_proto_binary`: a binary net or a .caffemodel of any grammar, in today's,
with its blobs.
"""

from __future__ import annotations

from poseidon.caffe.proto.caffe_pb2 import NetParameter
from poseidon.caffe.proto.upgrade.driver import needs_upgrade, upgrade_net
from poseidon.caffe.proto.upgrade.v0 import dropped_settings
from poseidon.caffe.snapshot.files import read_message
from poseidon.cli.upgrading import Upgrade

COMMAND = Upgrade(
    what="a net in binary form",
    read=lambda path: read_message(path, NetParameter(), "binary net"),
    needed=needs_upgrade,
    upgrade=upgrade_net,
    write=NetParameter.SerializeToString,
    left_out=dropped_settings,
)
run = COMMAND.run
