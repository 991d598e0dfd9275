"""`caffe.proto`: Caffe's messages, as `from caffe.proto import caffe_pb2` finds them."""

from poseidon.pycaffe.proto import caffe_pb2

__all__ = ["caffe_pb2"]
