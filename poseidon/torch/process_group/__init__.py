"""torch.distributed over a job's own connections: the process group "poseidon", and scripts that
are written for DistributedDataParallel.
"""
