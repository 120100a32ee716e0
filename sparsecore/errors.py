"""The exceptions of torchrec_tpu: each names what was wrong, where, and what to do.

All but PeerError are raised before anything is changed: weights, optimizer state and buffers are as
they were before the call.
"""


class TorchrecTpuError(Exception):
    """Any error that torchrec_tpu raises on purpose."""


class LayoutError(TorchrecTpuError, ValueError):
    """Tables, features or stacks that contradict each other."""


class KjtError(TorchrecTpuError, ValueError):
    """A KJT whose arrays contradict each other (lengths, offsets, values, weights, dtypes)."""


class DuplicateKeyError(KjtError):
    """A KJT that has the same key twice."""


class MissingKeyError(TorchrecTpuError, KeyError):
    """A KJT without a key that a table needs."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class WeightsError(TorchrecTpuError, ValueError):
    """Weights that are absent where is_weighted=True needs them, or that ask for a gradient."""


class PlacementError(TorchrecTpuError, ValueError):
    """Shards of a table that no collection can serve, or a plan that leaves tables out."""


class BatchSizeError(TorchrecTpuError, ValueError):
    """A batch larger than the static batch size."""


class BatchLayoutError(TorchrecTpuError, ValueError):
    """A prepared SparseBatch that was made for another layout."""


class IdRangeError(TorchrecTpuError, ValueError):
    """An id outside its table.

    Attributes:
        feature: KJT key.
        table: table name.
        sample: index of the sample in the batch (of the bag or of the sequence).
        position: index of the id inside that bag or sequence.
        value: the id.
        num_embeddings: rows of the table; valid ids are 0 .. num_embeddings - 1.
    """

    def __init__(
        self,
        *,
        feature: str,
        table: str,
        sample: int,
        position: int,
        value: int,
        num_embeddings: int,
    ) -> None:
        self.feature = feature
        self.table = table
        self.sample = sample
        self.position = position
        self.value = value
        self.num_embeddings = num_embeddings
        super().__init__(
            f"feature {feature!r} of table {table!r}: sample {sample} has id {value} at position "
            f"{position}, valid ids are 0..{num_embeddings - 1} (num_embeddings={num_embeddings}). "
            "Fix the data or the table's num_embeddings, or choose id_policy='clamp' (row 0, as "
            "FBGEMM does) or id_policy='drop' (ignore and count)"
        )


class CapacityError(TorchrecTpuError, ValueError):
    """A batch that does not fit the static limits of a stack.

    Attributes:
        stack: stack name.
        core: global index of the source SparseCore.
        partition: destination partition, or None when the core's buffer as a whole is too small.
        kind: "ids", "unique ids" or "buffer slots".
        observed: what the batch needs.
        limit: what the capacity allows.
    """

    def __init__(
        self, *, stack: str, core: int, partition: int | None, kind: str, observed: int, limit: int
    ) -> None:
        self.stack = stack
        self.core = core
        self.partition = partition
        self.kind = kind
        self.observed = observed
        self.limit = limit
        where = f"core {core}" if partition is None else f"partition {core}->{partition}"
        super().__init__(
            f"stack {stack!r}: {where} needs {observed:,} {kind}, capacity is {limit:,}. Raise the "
            "limit: calibrate(batches) on data like this suggests one; on CPU leave the capacity "
            "unset and buffers take the size that the batch needs"
        )


class TableError(TorchrecTpuError, ValueError):
    """A table that this collection cannot hold: its dtype, kind or device."""


class BackwardError(TorchrecTpuError, RuntimeError):
    """A lookup that is differentiated twice; its fused update runs in the first backward."""


class UnshardedError(TorchrecTpuError, RuntimeError):
    """Training of unsharded tables in one of several processes, where replicas would diverge."""


class PeerError(TorchrecTpuError, RuntimeError):
    """A collective that cannot end, because ranks have died, hang or do something else.

    Tables on the ranks that are left may have parts of a step: go on from a checkpoint.

    Attributes:
        ranks: those that are missing; empty when all are there and the network is at fault.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        super().__init__(message)


class PeerBatchError(TorchrecTpuError, ValueError):
    """A batch that another rank could not use; that rank raises its own error.

    Attributes:
        ranks: those with such a batch.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        super().__init__(message)


class OptimizerError(TorchrecTpuError, ValueError):
    """An optimizer, or an option of one, that has no fused update here."""


class StateDictError(TorchrecTpuError, ValueError):
    """A state dict whose tables, shapes or slots do not fit the module."""


class ProgramError(TorchrecTpuError, RuntimeError):
    """A traced step that is not what it should be, or a model that cannot be traced."""


class DependencyError(TorchrecTpuError, ImportError):
    """An optional package that is missing, or whose version was never tested with this one."""


class TopologyError(TorchrecTpuError, ValueError):
    """A name that no slice has."""


class CompileError(TorchrecTpuError, RuntimeError):
    """The compiler refused a program, or died over it."""


class LimitsError(CompileError):
    """Limits of a stack that the SparseCore's memory cannot hold.

    Attributes:
        stacks: those that have the refused limits; empty when that is not known.
        larger_may_fit: whether larger limits may fit again, for which the compiler has another
            method: `probe.suggest_feasible` finds the next that do.
    """

    def __init__(
        self, message: str, *, stacks: tuple[str, ...] = (), larger_may_fit: bool = False
    ) -> None:
        self.stacks = stacks
        self.larger_may_fit = larger_may_fit
        super().__init__(message)


class HbmError(CompileError):
    """A program that needs more HBM than a device has.

    Attributes:
        needed_bytes: of one device.
        available_bytes: what the compiler may use of it.
    """

    def __init__(self, message: str, *, needed_bytes: int, available_bytes: int) -> None:
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        super().__init__(message)


class CompilerDiedError(CompileError):
    """The compiler's process ended without an answer.

    Attributes:
        exit_code: of the process; the negative number of the signal that ended it.
    """

    def __init__(self, message: str, *, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(message)


class DeadlineError(CompileError, TimeoutError):
    """A compilation that took longer than it may."""


class CheckpointError(TorchrecTpuError, RuntimeError):
    """A checkpoint that could not be saved or loaded; the last good one is still there."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint with a file that is missing, cut off or altered."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint of other tables, shapes or optimizers than the model's."""
