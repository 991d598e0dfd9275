"""Caffe's schema: prototxt text in and out, phase rules, paths. The lowest room: imports only errors."""
