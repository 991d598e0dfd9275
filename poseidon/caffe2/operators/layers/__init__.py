"""Layers of nets: convolution, pooling, normalization, activations, losses, recurrent units."""
