"""Compilation of a net definition to a torch module."""

from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.net.load import LoadReport
from poseidon.caffe.net.net import Net
from poseidon.caffe.net.net_plan import LayerStep, NetPlan, plan_net
from poseidon.caffe.net.params import ParamInfo

__all__ = ["LayerStep", "LoadReport", "Net", "NetPlan", "ParamInfo", "compile_net", "plan_net"]
