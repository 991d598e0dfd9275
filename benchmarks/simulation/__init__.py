"""A discrete-event model of one training iteration on many hosts, and its predictions."""
