"""Python imports `sitecustomize` when it starts: here `poseidon.bind()` is called. Nothing else that
an environment can name reaches the Pythons that a script starts.

Law: the process is otherwise as without this file. Another `sitecustomize`, of the system or the
user, is run as well, and a Python without Poseidon is left alone. Any Python can read this file.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from os.path import abspath, dirname

HERE = dirname(abspath(__file__))

sys.path[:] = [path for path in sys.path if abspath(path) != HERE]
if sys.version_info >= (3, 10):  # noqa: UP036  (any Python reads this file)
    try:
        from poseidon.binding import bind
    except ImportError:
        pass
    else:
        bind()
hidden = PathFinder.find_spec("sitecustomize")
if hidden is not None and hidden.loader is not None:
    sys.modules["sitecustomize"] = module_from_spec(hidden)
    hidden.loader.exec_module(sys.modules["sitecustomize"])
