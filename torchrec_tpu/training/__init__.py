"""Training runs of DLRM v2 on the SparseCore path, beside plain TorchRec on request.

`run(Options(recipe=..., out=...))` is the whole of it; `main` is the same from a command line.
"""

from torchrec_tpu.training.command import main
from torchrec_tpu.training.loop import Options, TrainingError, UsageError, run
from torchrec_tpu.training.sides import build_model, torch_optimizer

__all__ = [
    "Options",
    "TrainingError",
    "UsageError",
    "build_model",
    "main",
    "run",
    "torch_optimizer",
]
