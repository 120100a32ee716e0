"""TorchRec models with their embedding tables on the TPU SparseCore, or on a plain CPU.

The public names are those of `__init__.pyi`. Each is imported when it is first used, so that
`import torchrec_tpu` itself loads neither torch nor jax.
"""

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def _public_names() -> dict[str, str]:
    """Public name -> module that defines it, from the stub's imports."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    return {
        alias.name: str(node.module)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


_MODULE_OF = _public_names()

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not _MODULE_OF[name].startswith("torchrec_tpu.sparsecore"):
        import_module("torchrec_tpu.sharding._compat").require_torchrec()
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "torch" in sys.modules:
    # Costs nothing now that torch is there, and stock TorchRec works beside torch_tpu from here on.
    import_module("torchrec_tpu.sharding")
