"""The launcher of a job: what it starts, on which hosts, what it keeps of it, and what its user
sees.
"""
