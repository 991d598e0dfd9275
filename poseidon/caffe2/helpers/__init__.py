"""The helpers of `brew`: functions that add a layer to a model."""
