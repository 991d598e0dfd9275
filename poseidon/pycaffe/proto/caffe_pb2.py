"""`import caffe.proto.caffe_pb2`: an alias of the project's module, so that both names have the same message classes."""

import sys

from poseidon.caffe.proto import caffe_pb2

sys.modules[__name__] = caffe_pb2
