"""Compilation of a net definition to a torch module."""

from poseidon.net.compile import compile_net
from poseidon.net.load import LoadReport
from poseidon.net.net import Net
from poseidon.net.net_plan import NetPlan, Step, plan_net
from poseidon.net.params import ParamInfo

__all__ = ["LoadReport", "Net", "NetPlan", "ParamInfo", "Step", "compile_net", "plan_net"]
