"""StableHLO through libtpu, for a slice that need not exist: `compile_program(program, topology)`.

The compiler runs in a child process, because it may abort, hang, or lock the machine's TPU. The
child gets a deadline, and its whole process group ends with it or with this process. What came out,
a refusal included, is kept on disk: the same program for the same slice costs its seconds or
minutes once.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from torchrec_tpu.sparsecore.aot import adapter, lowering
from torchrec_tpu.sparsecore.aot.program import PooledFacts, Program, StackFacts
from torchrec_tpu.sparsecore.aot.topology import Topology, topology
from torchrec_tpu.sparsecore.errors import (
    CompileError,
    CompilerDiedError,
    DeadlineError,
    HbmError,
    LimitsError,
    ProgramError,
)

logger = logging.getLogger(__name__)

Options = Mapping[str, str | int | bool]

CACHE_VARIABLE: Final = "TORCHREC_TPU_CACHE"
"""Environment variable: the directory of kept results instead of the user's cache directory."""

DEADLINE_SECONDS: Final = 1800.0

_FORMAT: Final = 3  # of a kept result
_TAIL_LINES: Final = 12
_RAGGED_ON_SPARSECORE: Final = "xla_tpu_enable_sparse_core_collective_offload_ragged_all_to_all"
"""Option of libtpu: on by default for tpu7x, off for v6e and v5p."""

_POLL_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """HBM of one device that a compiled program takes.

    Attributes:
        argument_bytes: everything that comes in, with the padding of its layout.
        output_bytes: everything that goes out; `alias_bytes` of it reuse arguments.
        alias_bytes: donated arguments.
        temp_bytes: for the time of a step: SparseCore stacks and TensorCore temporaries.
        code_bytes: the program.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        new = self.output_bytes - self.alias_bytes
        return self.argument_bytes + new + self.temp_bytes + self.code_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What libtpu made of a program.

    Attributes:
        topology: name of the slice.
        memory: of one device.
        flops: of one device's step on the TensorCore, by XLA's count.
        text: the scheduled program of one device; `hlo.parse` reads it.
        libtpu: version of the compiler.
        seconds: wall time of the compiler's process, when it ran.
        is_kept: whether this is the kept result of an earlier call.
    """

    topology: str
    memory: Memory
    flops: float
    text: str
    libtpu: str
    seconds: float
    is_kept: bool


def compile_program(
    program: Program,
    target: Topology | str,
    *,
    options: Options | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    keep: bool = True,
) -> Compiled:
    """Compiles a traced step for a slice.

    Args:
        program: traced for as many devices and cores as the slice has.
        target: the slice.
        options: as of `compile_stablehlo`, like what follows.
        deadline_seconds: wall time.
        keep: whether to use and keep results on disk.

    Raises:
        ProgramError: the program was traced for another number of devices or cores.
        TopologyError, DependencyError, CompileError: as `compile_stablehlo`.
    """
    target = topology(target) if isinstance(target, str) else target
    wanted = (program.num_devices, program.cores_per_device)
    if wanted != (target.num_devices, target.chip.cores_per_device):
        raise ProgramError(
            f"the program was traced for {wanted[0]} devices of {wanted[1]} SparseCores, "
            f"{target.name} has {target.num_devices} of {target.chip.cores_per_device}: trace it "
            "for that slice"
        )
    return compile_stablehlo(
        program.text,
        target,
        options=options,
        stacks=program.stacks,
        pooled=program.pooled,
        deadline_seconds=deadline_seconds,
        keep=keep,
    )


def compile_stablehlo(
    text: str,
    target: Topology | str,
    *,
    options: Options | None = None,
    stacks: Sequence[StackFacts] = (),
    pooled: Sequence[PooledFacts] = (),
    deadline_seconds: float = DEADLINE_SECONDS,
    keep: bool = True,
) -> Compiled:
    """Compiles StableHLO for every device of a slice: one replica each, or one partition.

    Args:
        text: of one module, for one device.
        target: the slice.
        options: XLA's, by name. XLA_FLAGS and LIBTPU_INIT_ARGS are not passed on, so that a result
            depends on nothing but its arguments.
        stacks: to name the one whose limits are refused.
        pooled: the same for pooled stacks.
        deadline_seconds: wall time that the compiler may take.
        keep: whether to use and keep results on disk (`cache_directory`).

    Raises:
        TopologyError: the slice does not exist.
        DependencyError: jax, jaxlib or libtpu is missing or was never tested.
        LimitsError: a stack's limits do not fit the SparseCore's memory.
        HbmError: the program needs more HBM than a device has.
        CompilerDiedError: the compiler aborted or crashed.
        DeadlineError: the deadline passed.
        CompileError: any other refusal, in the compiler's words.
    """
    target = topology(target) if isinstance(target, str) else target
    adapter.require("jax", "jaxlib", "libtpu")
    libtpu = metadata.version("libtpu")
    if lowering.RAGGED_ALL_TO_ALL in text:
        options = {_RAGGED_ON_SPARSECORE: True, **(options or {})}
    options = dict(sorted((options or {}).items()))
    key = hashlib.sha256(
        json.dumps(
            [_FORMAT, text, target.name, options, libtpu, metadata.version("jaxlib")]
        ).encode()
    ).hexdigest()
    result = _read(key) if keep else None
    is_kept = result is not None
    if result is None:
        result = _compile_in_child(text, target.name, options, deadline_seconds)
        if keep:
            _write(key, result)
    if (refusal := result["refusal"]) is not None:
        raise diagnosis(refusal, target, stacks, pooled)
    return Compiled(
        topology=target.name,
        memory=Memory(**{f"{name}_bytes": size for name, size in result["memory"].items()}),
        flops=max(0.0, result["cost"].get("flops", 0.0)),  # -1: there are none
        text=result["text"],
        libtpu=libtpu,
        seconds=result["seconds"],
        is_kept=is_kept,
    )


# ------------------------------------------------------------------------------------------- child


def _compile_in_child(
    text: str, target: str, options: Options, deadline_seconds: float
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="torchrec_tpu_") as name:
        directory = Path(name)
        (directory / "program.mlir").write_text(text)
        request = {"topology": target, "options": options}
        (directory / "request.json").write_text(json.dumps(request))
        environment = {
            **{k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")},
            **adapter.ENVIRONMENT,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "XLA_FLAGS": f"--xla_dump_to={directory / 'dump'} --xla_dump_hlo_as_text",
        }
        command = [sys.executable, "-m", __name__, str(directory)]
        started = time.monotonic()
        exit_code, output = run(command, environment, deadline_seconds=deadline_seconds)
        seconds = time.monotonic() - started
        try:
            result: dict[str, Any] = json.loads((directory / "result.json").read_text())
        except FileNotFoundError:
            raise CompilerDiedError(
                f"libtpu, compiling for {target}, {_end_of(exit_code)}\n{_tail(output)}",
                exit_code=exit_code,
            ) from None
        return {**result, "seconds": round(seconds, 3)}


def run(
    command: Sequence[str], environment: Mapping[str, str], *, deadline_seconds: float
) -> tuple[int, str]:
    """Runs a command in a process group of its own, which ends with the call whatever happens.

    Returns:
        Exit code, and what it printed.

    Raises:
        DeadlineError: the deadline passed.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        with _process_group() as group:
            child = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=group,
            )
            ends_at = time.monotonic() + deadline_seconds
            while child.poll() is None:
                if time.monotonic() > ends_at:
                    os.killpg(group, signal.SIGKILL)
                    child.wait()
                    output.seek(0)
                    raise DeadlineError(
                        f"the compiler did not end within {deadline_seconds:g} s and was stopped; "
                        f"raise deadline_seconds, or look at what it said\n{_tail(output.read())}"
                    )
                time.sleep(_POLL_SECONDS)
        output.seek(0)
        return child.returncode, output.read()


@contextlib.contextmanager
def _process_group() -> Iterator[int]:
    """A group of processes that all end with the block, or with this process however it ends.

    Its first member waits for the end of a pipe that only this process holds open.
    """
    guard = subprocess.Popen(
        ["/bin/sh", "-c", "read -r line; kill -KILL 0"], stdin=subprocess.PIPE, process_group=0
    )
    try:
        yield guard.pid
    finally:
        # As long as nobody has waited for the guard, the group's number cannot become another's.
        os.killpg(guard.pid, signal.SIGKILL)
        guard.communicate()


def main(directory: Path) -> None:
    """The child: compiles program.mlir as request.json says, and writes result.json."""
    request = json.loads((directory / "request.json").read_text())
    result: dict[str, Any] = {"refusal": None}
    try:
        executable = adapter.compile_with_libtpu(
            (directory / "program.mlir").read_text(),
            request["topology"],
            options=request["options"],
        )
    except adapter.CompilerRefusal as refusal:
        result["refusal"] = str(refusal)
    else:
        (scheduled,) = (directory / "dump").glob("*.after_codegen.txt")
        result.update(asdict(executable), text=scheduled.read_text())
    written = directory / "result.json.new"
    written.write_text(json.dumps(result))
    written.replace(directory / "result.json")


# --------------------------------------------------------------------------------------- diagnosis


def diagnosis(
    refusal: str,
    target: Topology,
    stacks: Sequence[StackFacts] = (),
    pooled: Sequence[PooledFacts] = (),
) -> CompileError:
    """The error that libtpu's words stand for."""
    chip = target.chip
    if match := re.search(
        r"No viable logical replica count.*?max_nz_per_row = (\d+), max_unique_nz_per_row = (\d+), "
        r"feature_width = (\d+), sample_count = (\d+).*?fixed_size_allocation_bytes = (\d+).*?"
        r"total_spmem_size_bytes = (\d+)",
        refusal,
        re.DOTALL,
    ):
        max_ids, max_unique_ids, dim, _, needed, available = map(int, match.groups())
        of_stack = {  # libtpu takes no more for possible than a core's buffer has slots
            stack.name: (min(stack.max_ids, slots), min(stack.max_unique_ids, slots), stack.dim)
            for stack in stacks
            for slots in [stack.slots_per_device // chip.cores_per_device]
        }
        refused = max_ids, max_unique_ids, dim
        names = tuple(name for name, limits in of_stack.items() if limits == refused)
        return LimitsError(
            f"{_stacks(names)}max_ids={max_ids:,} and max_unique_ids={max_unique_ids:,} of rows of "
            f"{dim} need at least {needed:,} B in a tile of a {chip.name} SparseCore, which has "
            f"{available:,} B. Lower the limits (a smaller batch per device, more devices, or "
            "fewer tables in the stack). libtpu: No viable logical replica count",
            stacks=names,
        )
    if match := re.search(
        r"Can't fit a single row.*?TileSpmem bytes: (\d+).*?Available bytes: (\d+).*?"
        r"Row bytes: (\d+)",
        refusal,
        re.DOTALL,
    ):
        _, available, row_bytes = map(int, match.groups())
        # Nearly always the row and gain of each id of a partition; else the stack stays unnamed.
        names = tuple(
            stack.name
            for stack in stacks
            if row_bytes in {n * (stack.dim + 1) * 4 for n in (stack.max_ids, stack.max_unique_ids)}
            or len(stacks) == 1
        )
        return LimitsError(
            f"{_stacks(names)}what one partition looks up needs {row_bytes:,} B at once, a tile of "
            f"a {chip.name} SparseCore has {available:,} B free. Lower the limits; a larger "
            "max_unique_ids may fit too, suggest_feasible() finds the next that does. libtpu: "
            "Can't fit a single row",
            stacks=names,
            larger_may_fit=True,
        )
    if match := re.search(r"(\d+) GiB of HBM per tensor, got (\d+)", refusal):
        limit, got = int(match[1]) << 30, int(match[2])
        if owned := tuple(stack.name for stack in pooled if stack.rows * stack.dim * 4 == got):
            return LimitsError(
                f"pooled {_stacks(owned)}a local lookup takes a table of up to {limit:,} B, "
                f"a device would have {got:,} B. Place its rows or columns on several devices",
                stacks=owned,
            )
        names = tuple(
            stack.name
            for stack in stacks
            if stack.rows // chip.cores_per_device * stack.dim * 4 == got
        )
        return LimitsError(
            f"{_stacks(names)}a SparseCore takes tables up to {limit:,} B of each core, this one "
            f"has {got:,} B. Split the stack, or use more devices",
            stacks=names,
        )
    if match := re.search(
        r"Ran out of memory.*?\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)",
        refusal,
        re.DOTALL,
    ) or re.search(
        r"Ran out of memory in memory space hbm.*?Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm",
        refusal,
        re.DOTALL,
    ):
        needed = _bytes(match[1], match[2])
        available = _bytes(match[3], match[4])
        return HbmError(
            f"a device of {target.name} needs {needed / 2**30:.1f} GiB of HBM and has "
            f"{available / 2**30:.1f} GiB to give. Use more devices, a smaller batch, or lower "
            "limits",
            needed_bytes=needed,
            available_bytes=available,
        )
    return CompileError(f"libtpu does not compile the program for {target.name}: {refusal}")


def _stacks(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f"stack{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}: "


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * 1024 ** " KMGT".index(unit or " "))


def _end_of(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code} and no result:"
    name = signal.Signals(-exit_code).name
    hint = "; perhaps the machine ran out of memory" if name == "SIGKILL" else ""
    return f"died of {name}{hint}:"


def _tail(output: str) -> str:
    """The check that failed, if any, and the last lines."""
    lines = [line for line in output.splitlines() if line.strip()]
    tail = lines[-_TAIL_LINES:]
    fatal = [line for line in lines if re.match(r"F\d{4} ", line) and line not in tail]
    return "\n".join([*fatal[:1], *tail])


# -------------------------------------------------------------------------------------------- kept


def cache_directory() -> Path:
    """Where results are kept; it may be deleted at any time.

    TORCHREC_TPU_CACHE, or torchrec_tpu in XDG_CACHE_HOME (~/.cache).
    """
    if directory := os.environ.get(CACHE_VARIABLE):
        return Path(directory)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchrec_tpu"


def _path(key: str) -> Path:
    return cache_directory() / "aot" / f"{key}.json.gz"


def _read(key: str) -> dict[str, Any] | None:
    """A kept result; None when there is none, or none that is whole."""
    path = _path(key)
    try:
        entry = json.loads(gzip.decompress(path.read_bytes()))
        if not isinstance(entry, dict) or entry.pop("key", None) != key:
            raise ValueError("not this program's result")
        result: dict[str, Any] = entry
    except FileNotFoundError:
        return None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        logger.warning("%s is damaged (%s); the program is compiled again", path, error)
        return None
    return result


def _write(key: str, result: Mapping[str, Any]) -> None:
    """Keeps a result: all of it or nothing. A place that cannot be written costs a warning."""
    path = _path(key)
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(gzip.compress(json.dumps({**result, "key": key}).encode()))
        draft.replace(path)
    except OSError as error:
        logger.warning("the compiled program is not kept: %s; set %s", error, CACHE_VARIABLE)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
