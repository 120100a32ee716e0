"""One chip: layouts, host preprocessing, ops, optimizers and backends.

Importing this package needs numpy only. What needs torch is in `ops`, `backends` and `aot`.
"""

from torchrec_tpu.sparsecore.batch import SparseBatch, StackBuffers, Stats
from torchrec_tpu.sparsecore.geometry import FeatureGeometry, Geometry, TableGeometry
from torchrec_tpu.sparsecore.layout import (
    Combiner,
    Layout,
    Stack,
    StackedFeature,
    StackedTable,
    Table,
)
from torchrec_tpu.sparsecore.stacking import auto_stacks, make_layout

__all__ = [
    "Combiner",
    "FeatureGeometry",
    "Geometry",
    "Layout",
    "SparseBatch",
    "Stack",
    "StackBuffers",
    "StackedFeature",
    "StackedTable",
    "Stats",
    "Table",
    "TableGeometry",
    "auto_stacks",
    "make_layout",
]
