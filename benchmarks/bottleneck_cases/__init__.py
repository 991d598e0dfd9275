"""Jobs with a known bottleneck, on hosts that are network namespaces."""
