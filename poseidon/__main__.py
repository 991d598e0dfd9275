"""`python -m poseidon`: the same as the command `poseidon`."""

import os
import sys

if not getattr(sys.flags, "safe_path", False) and sys.path[0] != os.path.dirname(
    os.path.dirname(__file__)
):  # Python's own library comes before the current folder
    sys.path.append(sys.path.pop(0))

from poseidon.cli.entry import main, refuse_old_python

if __name__ == "__main__":
    refuse_old_python()
    raise SystemExit(main())
