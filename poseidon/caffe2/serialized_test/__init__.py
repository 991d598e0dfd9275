"""Tests of operators whose inputs, outputs and operators can be kept in files and compared
later.
"""
