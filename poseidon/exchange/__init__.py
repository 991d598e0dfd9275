"""Exchanges: they keep the replicas of a job together. One contract, several schemes."""
