#!/usr/bin/env python3
"""Stop the jobs that were started from a machinefile: scripts/kill_caffe.py <hostfile>

The same as `poseidon kill <hostfile>`, under the name that Poseidon's users know. Needs no
installation of Poseidon itself, and works from any folder.
"""

import sys
from pathlib import Path

# a checkout works without being installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from poseidon.cli.entry import use_environment

use_environment("psutil", "paramiko")

from poseidon.cli.running_jobs import kill_caffe

if __name__ == "__main__":
    sys.exit(kill_caffe(sys.argv[1:]))
