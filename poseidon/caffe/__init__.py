"""The front end for Caffe's definitions: nets, data, the solver's loop, and their jobs."""
