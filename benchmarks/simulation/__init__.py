"""A model of one training iteration on many hosts, as events; and what it predicts."""
