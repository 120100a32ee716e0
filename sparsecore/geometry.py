"""The integers that travel with a batch through torch ops and into native code.

Everything is in stack order (`Layout.stack_order_tables`, `Layout.stack_order_features`). Sample i
of a feature is looked up by local core i // samples_per_core, in row
sample_offset + i % samples_per_core of that core's samples of the stack. Its output vector, and its
gradient, starts at float out_offset + i * out_stride of the flat output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class TableGeometry(NamedTuple):
    """One table: its stack, logical shape, place in the stack, and its features."""

    stack: int
    num_embeddings: int
    dim: int  # logical, not padded
    row_offset: int
    rotation: int
    first_feature: int
    num_features: int
    block_rows: int = 0  # rows of a core's contiguous block; 0: every num_cores-th row

    def rows_per_core(self, num_cores: int) -> int:
        """Rows that each core keeps, a multiple of 8; those behind the table's are padding."""
        return -(-(self.block_rows or -(-self.num_embeddings // num_cores)) // 8) * 8


class FeatureGeometry(NamedTuple):
    """One lookup: where its samples are on a core, and where its output is."""

    sample_offset: int
    samples_per_core: int
    num_samples: int  # over all local cores, without padding
    out_offset: int  # floats
    out_stride: int  # floats


class StackLimits(NamedTuple):
    """What a device's program reserves for one (core, partition) of a stack; see `Capacity`."""

    max_ids: int
    max_unique_ids: int


HEADER_INTS = 5
TABLE_INTS = len(TableGeometry._fields)
FEATURE_INTS = len(FeatureGeometry._fields)
LIMIT_INTS = len(StackLimits._fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Shapes and places of one batch. See the module's docstring for the meaning.

    >>> geometry = Geometry(num_cores=4, num_local_cores=4, num_stacks=1,
    ...     tables=(TableGeometry(0, 100, 8, 0, 0, 0, 1),),
    ...     features=(FeatureGeometry(0, 2, 7, 0, 8),))
    >>> geometry.encode()
    [4, 4, 1, 1, 1, 0, 100, 8, 0, 0, 0, 1, 0, 0, 2, 7, 0, 8]
    >>> Geometry.decode(geometry.encode()) == geometry
    True
    """

    num_cores: int
    num_local_cores: int
    num_stacks: int
    tables: tuple[TableGeometry, ...]
    features: tuple[FeatureGeometry, ...]
    limits: tuple[StackLimits, ...] = ()  # one a stack, for tables on a device; none on the CPU

    def select(self, tables: Sequence[int]) -> Geometry:
        """The same batch with only some of its tables, given by index in ascending order.

        Stacks keep their numbers: an update with the result reads the same buffers and skips the
        ids of all other tables.
        """
        chosen: list[TableGeometry] = []
        features: list[FeatureGeometry] = []
        for table in (self.tables[index] for index in tables):
            chosen.append(table._replace(first_feature=len(features)))
            features += self.features[table.first_feature :][: table.num_features]
        return replace(self, tables=tuple(chosen), features=tuple(features))

    def encode(self) -> list[int]:
        """5 header ints (cores, local cores, stacks, tables, features), 8 a table, 5 a feature.

        Then 2 a stack, when there are limits.
        """
        header = (
            self.num_cores,
            self.num_local_cores,
            self.num_stacks,
            len(self.tables),
            len(self.features),
        )
        rows = (header, *self.tables, *self.features, *self.limits)
        return [value for row in rows for value in row]

    @classmethod
    def decode(cls, ints: Sequence[int]) -> Geometry:
        """The geometry of `encode`'s ints.

        Raises:
            ValueError: the header does not fit the number of ints.
        """
        header = tuple(ints[:HEADER_INTS])
        num_cores, num_local_cores, num_stacks, num_tables, num_features = (
            header if len(header) == HEADER_INTS else (0, 0, 0, 0, 0)
        )
        first_feature = HEADER_INTS + num_tables * TABLE_INTS
        end = first_feature + num_features * FEATURE_INTS
        with_limits = end + max(num_stacks, 0) * LIMIT_INTS
        is_valid = num_cores > 0 and min(num_tables, num_features) >= 0
        if not is_valid or len(ints) not in (end, with_limits):
            raise ValueError(f"{len(ints)} ints with header {header} are not an encoded geometry")
        return cls(
            num_cores=num_cores,
            num_local_cores=num_local_cores,
            num_stacks=num_stacks,
            tables=tuple(
                TableGeometry(*ints[at : at + TABLE_INTS])
                for at in range(HEADER_INTS, first_feature, TABLE_INTS)
            ),
            features=tuple(
                FeatureGeometry(*ints[at : at + FEATURE_INTS])
                for at in range(first_feature, end, FEATURE_INTS)
            ),
            limits=tuple(
                StackLimits(*ints[at : at + LIMIT_INTS]) for at in range(end, len(ints), LIMIT_INTS)
            ),
        )
