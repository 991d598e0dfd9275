"""Metrics of training and their outputs: glog lines, the netoutputs file, the progress bar,
statistics and traces.
"""
