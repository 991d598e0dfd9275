"""`poseidon upgrade_net_proto_text`: a prototxt net of any grammar, in today's."""

from __future__ import annotations

from poseidon.caffe.proto.caffe_pb2 import NetParameter
from poseidon.caffe.proto.text import read, to_text
from poseidon.caffe.proto.upgrade.driver import needs_upgrade, upgrade_net
from poseidon.caffe.proto.upgrade.v0 import dropped_settings
from poseidon.cli.upgrading import Upgrade

COMMAND = Upgrade(
    what="a net in text",
    read=lambda path: read(path, NetParameter()),
    needed=needs_upgrade,
    upgrade=upgrade_net,
    write=lambda net: to_text(net).encode(),
    left_out=dropped_settings,
)
run = COMMAND.run
