"""Lookup and fused update in C++ on the CPU's threads, on the tables as they are.

Tables and slots keep their logical, row-major form: a kernel finds a row from the (partition, local
row) that a buffer names. So weights are never copied, padded or permuted, and results do not depend
on threads, instruction set, or the number of cores laid out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from torchrec_tpu.sparsecore import _native
from torchrec_tpu.sparsecore.batch import Float32Array, StackBuffers, TableArray
from torchrec_tpu.sparsecore.geometry import Geometry


def available_cpus() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class CpuBackend:
    """The C++ kernels. Instances are thread-safe; calls on one take turns.

    Random rows of big tables miss the TLB: with THP_MEM_ALLOC_ENABLE=1 in the environment before
    torch is imported its tensors get huge pages, and narrow rows are found nearly twice as fast.

    >>> CpuBackend(num_threads=2).num_threads
    2
    """

    name = "cpu"

    def __init__(self, *, num_threads: int | None = None) -> None:
        self.set_num_threads(available_cpus() if num_threads is None else num_threads)

    @property
    def num_threads(self) -> int:
        """Threads of the next call, the calling one among them."""
        return self._pool.num_threads

    def set_num_threads(self, num_threads: int) -> None:
        """Use that many threads from the next call on; results stay bit for bit the same."""
        if num_threads < 1:
            raise ValueError(f"num_threads={num_threads}, wanted at least 1")
        self._pool = _native.ThreadPool(num_threads)
        self._ops = _native.RowOps(self._pool)

    def why_unavailable(self) -> str | None:
        """None: the kernels are part of the package."""
        return None

    def lookup(
        self,
        buffers: Sequence[StackBuffers],
        tables: Sequence[TableArray],
        geometry: Geometry,
        out: Float32Array,
    ) -> None:
        """Write the pooled vector of every sample; zeros for a sample without ids.

        Args:
            buffers: per stack.
            tables: (num_embeddings, dim) per table, stack order; float32 or float16.
            geometry: of the batch.
            out: flat output that `geometry` points into; other elements stay as they are.

        Raises:
            ValueError: arrays and geometry do not fit each other; nothing is written.
        """
        self._ops.lookup(_flatten(buffers), tables, geometry.encode(), out)

    def update(
        self,
        grad: Float32Array,
        buffers: Sequence[StackBuffers],
        tables: Sequence[TableArray],
        slots: Sequence[Sequence[Float32Array]],
        operands: Float32Array,
        geometry: Geometry,
        rule: str,
        max_gradient: float | None,
    ) -> None:
        """Apply one optimizer step, in place, to every row that the buffers name.

        Args:
            grad: flat gradient, laid out as `lookup`'s output.
            buffers: per stack; those of the lookup.
            tables: (num_embeddings, dim) per table, stack order; float32 or float16.
            slots: per table, in rule order: (num_embeddings, dim), or (num_embeddings,) for one
                number per row.
            operands: (num_tables, operands of the rule).
            geometry: of the batch.
            rule: name in `optimizers.RULES`.
            max_gradient: clip each element of `grad` to +-max_gradient before gains and sums.

        Raises:
            NotImplementedError: the rule has no kernel.
            ValueError: arrays and geometry do not fit each other; nothing is changed.
        """
        if rule not in _native.rules():
            raise NotImplementedError(
                f"backend 'cpu' has no fused {rule!r} update; it has {', '.join(_native.rules())}"
            )
        if max_gradient is not None and not max_gradient > 0:
            raise ValueError(f"max_gradient={max_gradient}, wanted a positive number or None")
        self._ops.update(
            grad,
            _flatten(buffers),
            tables,
            slots,
            operands,
            geometry.encode(),
            rule,
            max_gradient or 0.0,
        )


def _flatten(buffers: Sequence[StackBuffers]) -> list[NDArray[np.generic]]:
    return [
        array
        for stack in buffers
        for array in (stack.row_pointers, stack.embedding_ids, stack.sample_ids, stack.gains)
    ]
