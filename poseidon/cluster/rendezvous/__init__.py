"""The rendezvous of tasks that torchrun, Slurm, MPI or Kubernetes has started: they
find rank 0 and become the hosts of a job.
"""
