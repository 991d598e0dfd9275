"""`import caffe.proto.caffe_pb2`: the very module of this project, so that a message is the same class under both names."""

import sys

from poseidon.proto import caffe_pb2

sys.modules[__name__] = caffe_pb2
