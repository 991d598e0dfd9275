"""Cells of recurrent networks: the parts of `rnn_cell`."""
