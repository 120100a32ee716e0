"""Static limits of stacks: observe batches, merge over ranks, suggest limits, keep them in JSON."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torchrec_tpu.sparsecore.errors import LayoutError
from torchrec_tpu.sparsecore.layout import Layout, Stack, round_up

if TYPE_CHECKING:
    from torchrec_tpu.sparsecore.batch import Stats
    from torchrec_tpu.sparsecore.preprocess import IdPolicy

FORMAT = "torchrec_tpu capacity observation"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a compiled program reserves for one stack (or one table).

    Too small and batches do not fit; too big wastes SparseCore memory and HBM.
    """

    max_ids: int  # ids of one core that go to one partition, duplicates within a sample merged
    max_unique_ids: int  # distinct rows among them, the rows that are fetched
    buffer_ids: int | None = None  # slots of one core, multiple of 8; None: what max_ids can need

    def __post_init__(self) -> None:
        if self.max_ids < 1 or self.max_unique_ids < 1:
            raise LayoutError(f"{self}: limits must be >= 1")
        if self.buffer_ids is not None and (self.buffer_ids < 8 or self.buffer_ids % 8):
            raise LayoutError(f"{self}: buffer_ids must be a positive multiple of 8")

    def slots_per_core(self, num_cores: int) -> int:
        """Slots of one core's buffer.

        >>> Capacity(max_ids=10, max_unique_ids=4).slots_per_core(num_cores=2)
        32
        """
        return self.buffer_ids or num_cores * round_up(self.max_ids, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Maxima:
    """The largest that any batch needed, over source cores and partitions."""

    max_ids: int = 0
    max_unique_ids: int = 0
    slots: int = 0  # of one core; not known for a table (0)

    def merge(self, other: Maxima) -> Maxima:
        """The larger of each."""
        return Maxima(
            max_ids=max(self.max_ids, other.max_ids),
            max_unique_ids=max(self.max_unique_ids, other.max_unique_ids),
            slots=max(self.slots, other.slots),
        )


StackKey = tuple[tuple[str, int, int], ...]
"""Sorted (table, rotation, block_rows): decides how many ids of a stack meet in a partition."""


def _key_of(stack: Stack) -> StackKey:
    return tuple(sorted((t.table.name, t.rotation, t.block_rows) for t in stack.tables))


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a run of batches needed, by stack and by table.

    Made by `observe` or `calibrate`; `merge` adds batches or ranks; `suggest` gives limits, also
    for a layout that stacks the same tables in another way.
    """

    num_cores: int
    num_batches: int
    stacks: Mapping[StackKey, Maxima]
    tables: Mapping[str, Maxima]

    def merge(self, *others: Observation) -> Observation:
        """One observation of all batches. Order and grouping do not matter.

        Raises:
            LayoutError: the observations are of different stacks or numbers of cores.
        """
        merged = self
        for other in others:
            if (merged.num_cores, merged.stacks.keys()) != (other.num_cores, other.stacks.keys()):
                raise LayoutError(
                    "observations of different layouts do not merge: "
                    f"{merged.num_cores} cores, stacks {list(merged.stacks)}; "
                    f"{other.num_cores} cores, stacks {list(other.stacks)}"
                )
            merged = Observation(
                num_cores=merged.num_cores,
                num_batches=merged.num_batches + other.num_batches,
                stacks={
                    key: maxima.merge(other.stacks[key]) for key, maxima in merged.stacks.items()
                },
                tables={
                    name: maxima.merge(other.tables[name]) for name, maxima in merged.tables.items()
                },
            )
        return merged

    def suggest(
        self, layout: Layout, *, headroom: float = 0.25, multiple: int = 8
    ) -> dict[str, Capacity]:
        """Limits by stack name for `layout`.

        A stack of the same tables (rotations, blocks) gets its own maxima, any other the sum of its
        tables' maxima, which no observed batch can exceed.

        Args:
            layout: of the same tables and number of cores, fed as many samples on each core.
            headroom: what to add for batches to come, as a fraction.
            multiple: limits are rounded up to it.

        Raises:
            LayoutError: a table or the number of cores was not observed.
            ValueError: no batch was observed, or headroom or multiple is out of range.
        """
        if not self.num_batches:
            raise ValueError("no batch was observed; there is nothing to suggest limits from")
        if headroom < 0 or multiple < 1:
            raise ValueError(f"headroom={headroom} must be >= 0 and multiple={multiple} >= 1")
        if layout.num_cores != self.num_cores:
            raise LayoutError(
                f"observed on {self.num_cores} cores, asked for {layout.num_cores}: partitions "
                "differ; calibrate again"
            )

        def roomy(observed: int, multiple: int) -> int:
            return round_up(max(1, math.ceil(observed * (1 + headroom))), multiple)

        suggestion = {}
        for stack in layout.stacks:
            maxima = self.stacks.get(_key_of(stack)) or self._sum_of_tables(stack)
            max_ids = roomy(maxima.max_ids, multiple)
            suggestion[stack.name] = Capacity(
                max_ids=max_ids,
                max_unique_ids=min(roomy(maxima.max_unique_ids, multiple), stack.rows_per_core),
                buffer_ids=min(roomy(maxima.slots, 8), self.num_cores * round_up(max_ids, 8)),
            )
        return suggestion

    def _sum_of_tables(self, stack: Stack) -> Maxima:
        names = {stacked.table.name for stacked in stack.tables}
        if unknown := sorted(names - self.tables.keys()):
            raise LayoutError(f"tables {unknown} were not observed; calibrate again")
        max_ids = sum(self.tables[name].max_ids for name in names)
        held = sum(
            maxima.slots
            for key, maxima in self.stacks.items()
            if any(name in names for name, *_ in key)
        )
        return Maxima(
            max_ids=max_ids,
            max_unique_ids=sum(self.tables[name].max_unique_ids for name in names),
            # Two bounds: every partition at its most; and the slots of the stacks that held the
            # tables, whose ids may meet so that each partition has up to 7 more padding slots.
            slots=min(
                self.num_cores * round_up(max_ids, 8),
                (held + 7 * self.num_cores) // 8 * 8,
            ),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file, all of it or nothing."""
        path = Path(path)
        document = {
            "format": FORMAT,
            "version": VERSION,
            "num_cores": self.num_cores,
            "num_batches": self.num_batches,
            "stacks": [
                {
                    "tables": [
                        {"name": name, "rotation": rotation, "block_rows": block_rows}
                        for name, rotation, block_rows in key
                    ],
                    **asdict(maxima),
                }
                for key, maxima in self.stacks.items()
            ],
            "tables": {
                name: {"max_ids": maxima.max_ids, "max_unique_ids": maxima.max_unique_ids}
                for name, maxima in self.tables.items()
            },
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(document, file, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Observation:
        """The observation that `save` wrote.

        Raises:
            ValueError: the file is not one, or of a later version.
        """
        try:
            document: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
            if document["format"] != FORMAT:
                raise ValueError(f"format is {document['format']!r}")
            if document["version"] != VERSION:
                raise ValueError(f"version {document['version']!r} is not {VERSION}")
            return cls(
                num_cores=int(document["num_cores"]),
                num_batches=int(document["num_batches"]),
                stacks={
                    tuple(
                        (table["name"], int(table["rotation"]), int(table.get("block_rows", 0)))
                        for table in stack["tables"]
                    ): Maxima(
                        max_ids=int(stack["max_ids"]),
                        max_unique_ids=int(stack["max_unique_ids"]),
                        slots=int(stack["slots"]),
                    )
                    for stack in document["stacks"]
                },
                tables={
                    name: Maxima(
                        max_ids=int(table["max_ids"]), max_unique_ids=int(table["max_unique_ids"])
                    )
                    for name, table in document["tables"].items()
                },
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is not a {FORMAT}: {error!r}") from error


def observe(layout: Layout, *stats: Stats) -> Observation:
    """What these batches of `layout` needed."""

    def largest(arrays: Iterable[npt.NDArray[np.int32]]) -> int:
        return max((int(array.max()) for array in arrays), default=0)

    return Observation(
        num_cores=layout.num_cores,
        num_batches=len(stats),
        stacks={
            _key_of(stack): Maxima(
                max_ids=largest(batch.max_ids[index] for batch in stats),
                max_unique_ids=largest(batch.max_unique_ids[index] for batch in stats),
                slots=largest(batch.required_slots[index] for batch in stats),
            )
            for index, stack in enumerate(layout.stacks)
        },
        tables={
            stacked.table.name: Maxima(
                max_ids=largest(batch.table_max_ids[index] for batch in stats),
                max_unique_ids=largest(batch.table_max_unique_ids[index] for batch in stats),
            )
            for index, stacked in enumerate(layout.stack_order_tables)
        },
    )


def sum_of_table_limits(layout: Layout, limits: Mapping[str, Capacity]) -> dict[str, Capacity]:
    """Limits by stack name from limits by table name: the sum over a stack's tables.

    Stacks none of whose tables are named are left out.

    Raises:
        LayoutError: an unknown table, or a stack with only some of its tables named.
    """
    for name in limits:
        layout.stacked_table(name)
    capacity = {}
    for stack in layout.stacks:
        names = [stacked.table.name for stacked in stack.tables]
        given = [limits[name] for name in names if name in limits]
        if not given:
            continue
        if len(given) < len(names):
            raise LayoutError(
                f"stack {stack.name!r}: tables {[n for n in names if n not in limits]} have no "
                "limit but share the stack with tables that have one"
            )
        buffer_ids = [limit.buffer_ids for limit in given]
        capacity[stack.name] = Capacity(
            max_ids=sum(limit.max_ids for limit in given),
            max_unique_ids=sum(limit.max_unique_ids for limit in given),
            buffer_ids=None if None in buffer_ids else sum(slots or 0 for slots in buffer_ids),
        )
    return capacity


def calibrate(
    batches: Iterable[Mapping[str, Any]],
    layout: Layout,
    *,
    batch_size: int | None = None,
    num_threads: int | None = None,
    id_policy: IdPolicy = "error",
    is_weighted: bool = False,
) -> Observation:
    """What these batches need. Merge the result over ranks, then `suggest`.

    Args:
        batches: arguments of a `Preprocessor` call each: keys, values, lengths or offsets, weights.
        layout: the tables' places.
        batch_size: as of the Preprocessor that will use the limits, like what follows.
        num_threads: worker threads.
        id_policy: ids out of range are counted where they end up.
        is_weighted: whether `weights` are needed.
    """
    from torchrec_tpu.sparsecore.preprocess import Preprocessor  # native code, only needed here

    preprocessor = Preprocessor(
        layout,
        batch_size=batch_size,
        num_threads=num_threads,
        id_policy=id_policy,
        is_weighted=is_weighted,
    )
    observation = observe(layout)
    for batch in batches:
        observation = observation.merge(observe(layout, preprocessor.measure(**batch)))
    return observation
