"""`poseidon test`: score a trained net on its own test data, as `caffe test` does."""

from __future__ import annotations

import argparse
import logging
import signal
import sys

import torch

from poseidon.base import glog
from poseidon.caffe.tools.scoring import score
from poseidon.caffe.tools.solo import open_net
from poseidon.cli.interrupts import asked_to_stop
from poseidon.cli.net_requests import net_request
from poseidon.cli.progress_bar import progress_bar
from poseidon.observe.metrics.caffe_lines import running, using
from poseidon.observe.metrics.glog_lines import GlogSink
from ps_server.numerics import prepare_process

LOGGER = logging.getLogger("poseidon.test")


def run(arguments: argparse.Namespace) -> int:
    """Score; 0 when all batches have been, 130 when Ctrl-C came before."""
    prepare_process()
    request = net_request(arguments)
    sink = GlogSink(LOGGER)
    with (
        progress_bar(arguments.progress) as progress,
        glog.setup(stream=sys.stderr),
        asked_to_stop() as stopped,
    ):
        name = torch.cuda.get_device_name(request.device) if request.device.type == "cuda" else ""
        sink.write(*using(str(request.device), gpu_name=name))
        net = open_net(request)
        try:
            sink.write(running(arguments.iterations))
            write = progress.without_details(sink.write)
            scores = score(net, arguments.iterations, write, report=progress, stopped=stopped)
        finally:
            net.close()
    return 0 if scores.batches == arguments.iterations else 128 + signal.SIGINT
