"""The exchange by all-reduce: every worker owns a slice of each bucket of gradients, sums it in
the tree of virtual workers, and sends the mean to all others.
"""
