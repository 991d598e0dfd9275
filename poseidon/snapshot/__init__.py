"""`.caffemodel` and `.solverstate`: named arrays in and out of Caffe's files."""
