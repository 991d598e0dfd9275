"""The layers and blobs of a pycaffe net, and the operations on them."""
