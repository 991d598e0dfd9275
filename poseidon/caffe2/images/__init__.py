"""Images for Caffe2: records, their way into a batch, and databases made of picture files."""
