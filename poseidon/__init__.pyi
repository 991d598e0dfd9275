"""The public names of the package, each with its module: type checkers read them here, and so does
`__init__.py`.
"""

from poseidon.binding import bind as bind
from poseidon.engine.this_process import log as log
from poseidon.engine.this_process import this_worker as this_worker
from poseidon.engine.worker_context import ThisWorker as ThisWorker
from poseidon.errors import PoseidonError as PoseidonError
from poseidon.torch.distribute import distribute as distribute
from poseidon.torch.function import launch as launch
from poseidon.torch.group import Group as Group
from poseidon.torch.options import Outer as Outer
from poseidon.torch.sampler import SharedSampler as SharedSampler
from poseidon.torch.shards import host_mesh as host_mesh
from poseidon.torch.tables.plan import RowWiseAdaGrad as RowWiseAdaGrad
from poseidon.torch.tables.table import Table as Table
from poseidon.torch.update_rules import SGD as SGD
from poseidon.torch.update_rules import AdaDelta as AdaDelta
from poseidon.torch.update_rules import AdaGrad as AdaGrad
from poseidon.torch.update_rules import Adam as Adam
from poseidon.torch.update_rules import AdamW as AdamW
from poseidon.torch.update_rules import Lion as Lion
from poseidon.torch.update_rules import Muon as Muon
from poseidon.torch.update_rules import ParameterGroup as ParameterGroup
from poseidon.torch.update_rules import RMSProp as RMSProp
from poseidon.version import __version__ as __version__
