#!/usr/bin/env python3
"""Fetch a model's weights: scripts/download_model_binary.py models/bvlc_reference_caffenet

The same as `poseidon download_model_binary`, under the name that Caffe's users know; works from any
folder.
"""

import sys
from pathlib import Path

# a checkout works without being installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from poseidon.cli.entry import use_environment

use_environment()

from poseidon.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["download_model_binary", *sys.argv[1:]]))
