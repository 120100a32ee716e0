"""The public names: this file is their one list, and the package imports each at first use."""

from torchrec_tpu.api import calibrate as calibrate
from torchrec_tpu.api import prepare as prepare
from torchrec_tpu.api import shard as shard
from torchrec_tpu.sharding.checkpoint import Restored as Restored
from torchrec_tpu.sharding.checkpoint import latest_checkpoint as latest_checkpoint
from torchrec_tpu.sharding.checkpoint import load_checkpoint as load_checkpoint
from torchrec_tpu.sharding.checkpoint import save_checkpoint as save_checkpoint
from torchrec_tpu.sharding.data_parallel import DataParallel as DataParallel
from torchrec_tpu.sharding.embeddings import Options as Options
from torchrec_tpu.sharding.embeddings import (
    SparseCoreEmbeddingBagCollection as SparseCoreEmbeddingBagCollection,
)
from torchrec_tpu.sharding.embeddings import (
    SparseCoreEmbeddingCollection as SparseCoreEmbeddingCollection,
)
from torchrec_tpu.sharding.plan import SparseCorePlan as SparseCorePlan
from torchrec_tpu.sharding.planner import TpuEmbeddingShardingPlanner as TpuEmbeddingShardingPlanner
from torchrec_tpu.sharding.sharders import sharders as sharders
from torchrec_tpu.sharding.swap import SwapReport as SwapReport
from torchrec_tpu.sharding.swap import fused_optimizer as fused_optimizer
from torchrec_tpu.sharding.swap import swap_embeddings as swap_embeddings
from torchrec_tpu.sharding.topology import TpuTopology as TpuTopology
from torchrec_tpu.sparsecore.capacity import Capacity as Capacity
from torchrec_tpu.sparsecore.errors import TorchrecTpuError as TorchrecTpuError
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec as OptimizerSpec
from torchrec_tpu.sparsecore.optimizers import adagrad as adagrad
from torchrec_tpu.sparsecore.optimizers import adam as adam
from torchrec_tpu.sparsecore.optimizers import ftrl as ftrl
from torchrec_tpu.sparsecore.optimizers import laprop as laprop
from torchrec_tpu.sparsecore.optimizers import rowwise_adagrad as rowwise_adagrad
from torchrec_tpu.sparsecore.optimizers import sgd as sgd
