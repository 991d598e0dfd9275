"""The exchange by all-reduce: buckets, and the process groups of torch.distributed that sum
them.
"""
