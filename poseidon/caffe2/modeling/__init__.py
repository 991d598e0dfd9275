"""Parameters of models: how they start, how they are described, how scopes share them."""
