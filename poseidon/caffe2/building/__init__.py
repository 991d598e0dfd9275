"""Steps and nets built by nested blocks: the parts of `net_builder`."""
