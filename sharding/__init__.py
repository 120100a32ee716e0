"""Many chips: sharded modules, fused optimizers and the config swap."""

from torchrec_tpu.sharding import _compat

_compat.let_torchrec_ask_for_a_tpu()
