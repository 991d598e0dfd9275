"""Nets of Caffe as nets of Caffe2; `poseidon.caffe2.caffe_translator` has what scripts call."""
