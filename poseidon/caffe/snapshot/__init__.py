"""Reading and writing of Caffe's snapshot files, `.caffemodel` and `.solverstate`."""
