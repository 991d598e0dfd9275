"""Caffe's solver: a worker's process, its replica, its training loop and its snapshots."""
