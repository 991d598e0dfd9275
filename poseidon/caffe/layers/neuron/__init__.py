"""Element-wise layers and normalization layers."""
