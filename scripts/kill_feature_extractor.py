#!/usr/bin/env python3
"""Stop the feature extractions that were started from a machinefile:
scripts/kill_feature_extractor.py <hostfile>

Leaves training jobs of the same machinefile alone; `poseidon kill` stops one job by its id. Needs
no installation of Poseidon itself, and works from any folder.
"""

import sys
from pathlib import Path

# a checkout works without being installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from poseidon.cli.entry import use_environment

use_environment("psutil", "paramiko")

from poseidon.cli.running_jobs import kill_feature_extractor

if __name__ == "__main__":
    sys.exit(kill_feature_extractor(sys.argv[1:]))
