"""Predictions of a job's iteration time: a simulator of schemes on hosts and
links, fed with measured rates and costs.
"""
