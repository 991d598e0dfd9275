"""Through the parameter server: the tables of a store, and how tensors are laid out in them."""
