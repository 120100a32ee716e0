"""One chip: layouts, host preprocessing, ops, optimizers and backends.

Importing this package needs numpy only; `Preprocessor` loads the native code when first asked for.
What needs torch is in `ops`, `backends` and `aot`.
"""

from typing import TYPE_CHECKING, Any

from torchrec_tpu.sparsecore.batch import SparseBatch, StackBuffers, Stats
from torchrec_tpu.sparsecore.capacity import (
    Capacity,
    Observation,
    calibrate,
    observe,
    sum_of_table_limits,
)
from torchrec_tpu.sparsecore.chips import CHIPS, Chip
from torchrec_tpu.sparsecore.geometry import FeatureGeometry, Geometry, TableGeometry
from torchrec_tpu.sparsecore.layout import (
    Block,
    Combiner,
    Layout,
    Stack,
    StackedFeature,
    StackedTable,
    Table,
)
from torchrec_tpu.sparsecore.stacking import auto_stacks, make_layout

if TYPE_CHECKING:
    from torchrec_tpu.sparsecore.preprocess import Preprocessor

__all__ = [
    "CHIPS",
    "Block",
    "Capacity",
    "Chip",
    "Combiner",
    "FeatureGeometry",
    "Geometry",
    "Layout",
    "Observation",
    "Preprocessor",
    "SparseBatch",
    "Stack",
    "StackBuffers",
    "StackedFeature",
    "StackedTable",
    "Stats",
    "Table",
    "TableGeometry",
    "auto_stacks",
    "calibrate",
    "make_layout",
    "observe",
    "sum_of_table_limits",
]


def __getattr__(name: str) -> Any:
    if name == "Preprocessor":
        from torchrec_tpu.sparsecore.preprocess import Preprocessor

        return Preprocessor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
