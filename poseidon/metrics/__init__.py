"""What training measured, and where it goes: glog lines, the netoutputs file, the progress line."""
