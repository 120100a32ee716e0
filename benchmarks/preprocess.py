"""Host preprocessing of one DLRM v2 batch: this package beside the wheel `jax_tpu_embedding`.

    python benchmarks/preprocess.py [--threads 1] [--rounds 15] [--case split-2 ...] [--json FILE]

Each round runs both, one after the other, in this process; the table shows the median over rounds
of the CPU time (user + system, all threads) and of the wall time. The batch: 26 features,
214 ids per sample, 4096 samples, ids by a power law (alpha 1.05) scattered over each vocabulary.
We start at the int64 values and lengths of a KJT. The peer starts at int32 arrays, already cut by
feature, which is the fastest input that it takes, with limits that fit the batch as exactly as its
format allows. Before timing, the buffers of both are compared bit by bit.

The peer allocates its outputs at every call, so its time depends on malloc. By default malloc is
glibc's untouched; --keep-memory makes it keep all memory (as M_MMAP_THRESHOLD and M_TRIM_THRESHOLD
of 1 GiB do), for both sides. Without the wheel only our side is measured.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from torchrec_tpu.sparsecore import Combiner, SparseBatch, Table, make_layout
from torchrec_tpu.sparsecore.preprocess import Preprocessor

# fmt: off
ROWS = (40_000_000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40_000_000, 3_067_956, 405282, 10,
        2209, 11938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590152, 12973, 108, 36)
HOTNESS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
# fmt: on
BATCH = 4096
CORES_PER_DEVICE = 2
DIM = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    num_cores: int
    is_stacked: bool = False
    combiner: str = "sum"
    is_weighted: bool = False
    distribution: str = "power law"


CASES = (
    Case(name="split-2", num_cores=2),
    Case(name="split-128", num_cores=128),
    Case(name="stack-2", num_cores=2, is_stacked=True),
    Case(name="stack-128", num_cores=128, is_stacked=True),
    Case(name="uniform-128", num_cores=128, distribution="uniform"),
    Case(name="mean-2", num_cores=2, combiner="mean"),
    Case(name="mean-128", num_cores=128, combiner="mean"),
    Case(name="weighted-sum-2", num_cores=2, is_weighted=True),
    Case(name="weighted-mean-2", num_cores=2, combiner="mean", is_weighted=True),
    Case(name="weighted-sum-stack-128", num_cores=128, is_weighted=True, is_stacked=True),
    Case(name="weighted-mean-128", num_cores=128, combiner="mean", is_weighted=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    values: np.ndarray  # int64
    lengths: np.ndarray  # int64
    weights: np.ndarray | None  # float32

    def of(self, array: np.ndarray, feature: int) -> np.ndarray:
        """(BATCH, hotness) part of one feature."""
        begin = BATCH * sum(HOTNESS[:feature])
        hotness = HOTNESS[feature]
        return array[begin : begin + BATCH * hotness].reshape(BATCH, hotness)


def make_data(case: Case, *, alpha: float = 1.05, seed: int = 1) -> Data:
    rng = np.random.default_rng(seed)
    values = []
    for rows, hotness in zip(ROWS, HOTNESS, strict=True):
        num_ids = BATCH * hotness
        if case.distribution == "uniform":
            values.append(rng.integers(0, rows, num_ids))
            continue
        # Inverse of the cumulative bounded power law, then a permutation of the rows.
        top = float(rows + 1) ** (1 - alpha) - 1
        rank = ((top * rng.random(num_ids) + 1) ** (1 / (1 - alpha)) - 1).astype(np.int64)
        values.append((np.minimum(rank, rows - 1) * 1_000_003 + 12_345) % rows)
    all_values = np.concatenate(values)
    return Data(
        values=all_values,
        lengths=np.repeat(np.array(HOTNESS, np.int64), BATCH),
        weights=rng.random(len(all_values), np.float32) + 0.25 if case.is_weighted else None,
    )


class Ours:
    """The public entry, KJT arrays in, SparseBatch out."""

    def __init__(self, case: Case, data: Data, num_threads: int) -> None:
        tables = [
            Table(
                name=f"t{i}",
                num_embeddings=rows,
                embedding_dim=DIM,
                combiner=Combiner(case.combiner),
                features=(f"f{i}",),
            )
            for i, rows in enumerate(ROWS)
        ]
        num_devices = case.num_cores // CORES_PER_DEVICE
        self.layout = make_layout(
            tables,
            num_devices=num_devices,
            cores_per_device=CORES_PER_DEVICE,
            num_local_devices=1,
            stacks=[[table.name for table in tables]] if case.is_stacked else "none",
            batch_size=BATCH,
        )
        self.keys = [f"f{i}" for i in range(len(ROWS))]
        self.data = data
        self.preprocess = Preprocessor(
            self.layout, num_threads=num_threads, is_weighted=case.is_weighted
        )

    def __call__(self) -> SparseBatch:
        data = self.data
        return self.preprocess(self.keys, data.values, lengths=data.lengths, weights=data.weights)


class Peer:
    """The wheel's native entry, called as its Python layer does, without that layer's cost."""

    def __init__(self, module: Any, case: Case, data: Data, ours: Ours) -> None:
        self.module = module
        self.case = case
        batch = ours()
        self.specs = []
        num_devices = case.num_cores // CORES_PER_DEVICE
        for s, stack in enumerate(ours.layout.stacks):
            max_ids = max(8, int(batch.stats.max_ids[s].max()))
            most_slots = -(-max_ids // 8) * 8 * case.num_cores * CORES_PER_DEVICE
            slots = int(batch.stats.required_slots[s].max()) * CORES_PER_DEVICE
            stack_spec = SimpleNamespace(
                stack_name=stack.name,
                combiner=case.combiner,
                max_ids_per_partition=max_ids,
                max_unique_ids_per_partition=max(8, int(batch.stats.max_unique_ids[s].max())),
                suggested_coo_buffer_size_per_device=min(slots, most_slots),
            )
            for i, stacked in enumerate(stack.tables):
                table_spec = SimpleNamespace(
                    name=stacked.table.name,
                    vocabulary_size=stacked.table.num_embeddings,
                    stacked_table_spec=stack_spec,
                    setting_in_stack=SimpleNamespace(stack_name=stack.name),
                )
                transformation = SimpleNamespace(
                    row_offset=i * BATCH * num_devices,
                    col_offset=stacked.row_offset * case.num_cores,
                    col_shift=stacked.rotation,
                )
                self.specs.append(
                    SimpleNamespace(
                        name=stacked.table.features[0],
                        table_spec=table_spec,
                        input_shape=[BATCH * num_devices, 1],
                        output_shape=[BATCH * num_devices, DIM],
                        id_transformation=transformation,
                        _id_transformation=transformation,
                    )
                )
        features = range(len(ROWS))
        ids = data.values.astype(np.int32)
        self.ids = [np.ascontiguousarray(data.of(ids, f)) for f in features]
        self.weights = None
        if data.weights is not None:
            self.weights = [np.ascontiguousarray(data.of(data.weights, f)) for f in features]

    def __call__(self) -> Any:
        return self.module.preprocess_sparse_dense_matmul_input(
            self.ids,
            self.weights,
            self.specs,
            1,
            self.case.num_cores // CORES_PER_DEVICE,
            num_sc_per_device=CORES_PER_DEVICE,
            batch_number=1,
        )


def assert_same(case: Case, ours: Ours, peer: Peer) -> None:
    """Every byte that the format specifies."""
    batch, theirs = ours(), peer()
    for stack, buffers in zip(ours.layout.stacks, batch.stacks, strict=True):
        pointers = np.asarray(theirs[0][stack.name]).reshape(CORES_PER_DEVICE, -1)
        np.testing.assert_array_equal(
            pointers, buffers.row_pointers.reshape(CORES_PER_DEVICE, -1), stack.name
        )
        wanted = (np.asarray(theirs[k][stack.name]) for k in (1, 2, 3))
        actual = (buffers.embedding_ids, buffers.sample_ids, buffers.gains)
        for one, other in zip(wanted, actual, strict=True):
            rows = one.reshape(CORES_PER_DEVICE, -1), other.reshape(CORES_PER_DEVICE, -1)
            for core in range(CORES_PER_DEVICE):
                end = -(-int(pointers[core][case.num_cores - 1]) // 8) * 8
                a, b = rows[0][core, :end], rows[1][core, :end]
                assert np.array_equal(a.view(np.int32), b.view(np.int32)), stack.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    cpu_ms: float
    wall_ms: float
    min_cpu_ms: float
    min_wall_ms: float


def measure(functions: list[Callable[[], object]], rounds: int) -> list[Times]:
    """Interleaved: round after round, each function once."""
    cpu: list[list[float]] = [[] for _ in functions]
    wall: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds + 2):  # two to warm up
        for i, function in enumerate(functions):
            cpu_start, wall_start = time.process_time(), time.perf_counter()
            result = function()
            wall[i].append(1e3 * (time.perf_counter() - wall_start))
            cpu[i].append(1e3 * (time.process_time() - cpu_start))
            del result  # its release is not ours to time
    return [
        Times(
            cpu_ms=statistics.median(c[2:]),
            wall_ms=statistics.median(w[2:]),
            min_cpu_ms=min(c[2:]),
            min_wall_ms=min(w[2:]),
        )
        for c, w in zip(cpu, wall, strict=True)
    ]


def keep_memory() -> None:
    """Makes glibc's malloc keep what is freed, instead of giving it back to the kernel."""
    mallopt = ctypes.CDLL(None).mallopt
    m_trim_threshold, m_mmap_threshold = -1, -3
    if not (mallopt(m_trim_threshold, 1 << 30) and mallopt(m_mmap_threshold, 1 << 30)):
        sys.exit("mallopt refused; --keep-memory needs glibc")


def load_peer(num_threads: int) -> tuple[Any, str]:
    """The wheel's native module and its version, or None and why not."""
    # Read once, when the module is loaded; only counts below the number of CPUs are honoured.
    os.environ["SPARSECORE_INPUT_PREPROCESSING_THREADS"] = str(num_threads)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        module = importlib.import_module(
            "jax_tpu_embedding.sparsecore.lib.core.pybind_input_preprocessing"
        )
        return module, importlib.metadata.version("jax_tpu_embedding")
    except ImportError as error:
        return None, str(error)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--case", nargs="*", choices=names, default=names, metavar="NAME")
    parser.add_argument("--keep-memory", action="store_true", help="malloc keeps freed memory")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()

    if args.keep_memory:
        keep_memory()
    peer_module, peer_version = load_peer(args.threads)
    malloc = "keeps freed memory" if args.keep_memory else "glibc default"
    num_ids = BATCH * sum(HOTNESS)
    print(f"{processor()}, {args.threads} thread(s), {num_ids:,} ids, {args.rounds} rounds")
    if peer_module is None:
        print(f"without the peer: {peer_version} (pip install jax_tpu_embedding)")
    else:
        print(f"peer: jax_tpu_embedding {peer_version}; malloc: {malloc}")
    print(
        f"{'case':24}{'ours cpu':>10}{'wall':>8}{'Mid/s':>7}"
        f"{'peer cpu':>10}{'wall':>8}{'cpu ratio':>11}{'wall':>7}"
    )
    results = []
    for case in CASES:
        if case.name not in args.case:
            continue
        data = make_data(case)
        ours = Ours(case, data, args.threads)
        functions: list[Callable[[], object]] = [ours]
        if peer_module is not None:
            peer = Peer(peer_module, case, data, ours)
            assert_same(case, ours, peer)
            functions.append(peer)
        times = measure(functions, args.rounds)
        mine = times[0]
        line = (
            f"{case.name:24}{mine.cpu_ms:8.2f}ms{mine.wall_ms:8.2f}"
            f"{num_ids / mine.cpu_ms / 1e3:7.0f}"
        )
        row: dict[str, Any] = {"case": asdict(case), "ours": asdict(mine)}
        if peer_module is not None:
            theirs = times[1]
            row["peer"] = asdict(theirs)
            row["cpu_ratio"] = theirs.cpu_ms / mine.cpu_ms
            row["wall_ratio"] = theirs.wall_ms / mine.wall_ms
            line += (
                f"{theirs.cpu_ms:8.2f}ms{theirs.wall_ms:8.2f}"
                f"{row['cpu_ratio']:10.2f}x{row['wall_ratio']:6.2f}x"
            )
        print(line, flush=True)
        results.append(row)
    if args.json:
        report = {
            "benchmark": "preprocess",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "processor": processor(),
            "load": os.getloadavg()[0],
            "threads": args.threads,
            "rounds": args.rounds,
            "ids": num_ids,
            "malloc": malloc,
            "peer": None if peer_module is None else f"jax_tpu_embedding {peer_version}",
            "results": results,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
