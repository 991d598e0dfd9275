"""Predictions of a job's iteration time: a formula for each scheme, what it needs of a net and of a
cluster, and what it recommends.
"""
