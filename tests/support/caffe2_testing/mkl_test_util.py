"""The devices of tests of Intel's operators: the CPU, whose operators use oneDNN where torch
does.
"""

from __future__ import annotations

from poseidon.caffe2.proto import DEVICE_NUMBERS, caffe2_pb2
from tests.support.caffe2_testing import hypothesis_test_util as hu

cpu_do = hu.cpu_do
cuda_do = hu.cuda_do
gpu_do = hu.gpu_do
mkl_do = caffe2_pb2.DeviceOption(device_type=DEVICE_NUMBERS["MKLDNN"])
device_options = hu.device_options


def device_checker_device_options() -> object:
    """Return the strategy of the devices that a test compares."""
    return hu.device_checker_device_options()


def gradient_checker_device_option() -> object:
    """Return the strategy of the device that a test checks gradients on."""
    return hu.gradient_checker_device_option()


gcs = hu.gcs
gcs_cpu_only = hu.gcs_cpu_only
gcs_gpu_only = hu.gcs_gpu_only
gcs_mkl_only = hu.gcs_cpu_only
gcs_cuda_only = hu.gcs_cuda_only
gcs_cpu_ideep = hu.gcs_cpu_only
gcs_ideep_only = hu.gcs_cpu_only
