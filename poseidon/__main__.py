"""`python -m poseidon`: the same as the command `poseidon`."""

import os
import sys

if not getattr(sys.flags, "safe_path", False) and sys.path[0] != os.path.dirname(
    os.path.dirname(__file__)
):  # Python's own library comes before the current folder
    sys.path.append(sys.path.pop(0))

from poseidon.cli.checkout import refuse_old_python

refuse_old_python()

from poseidon.cli.entry import main  # noqa: E402  (an old Python cannot read it)

if __name__ == "__main__":
    raise SystemExit(main())
