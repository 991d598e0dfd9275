"""ONNX models as nets of Caffe2 and back, by the names of `caffe2.python.onnx`."""
