"""Many chips: sharded modules, fused optimizers and the config swap."""

from torchrec_tpu.sharding import _compat

_compat.live_beside_torch_tpu()
_compat.hush_torch_about_itself()
