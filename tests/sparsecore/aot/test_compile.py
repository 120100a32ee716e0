"""The compiler in its child process: what it says, what it dies of, what is kept."""

import gzip
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from torchrec_tpu.sparsecore.aot import adapter, compile, hlo
from torchrec_tpu.sparsecore.aot.compile import (
    CACHE_VARIABLE,
    Compiled,
    compile_program,
    compile_stablehlo,
    diagnosis,
    run,
)
from torchrec_tpu.sparsecore.aot.program import Expected, Program, StackFacts
from torchrec_tpu.sparsecore.aot.topology import topology
from torchrec_tpu.sparsecore.errors import (
    CompileError,
    CompilerDiedError,
    DeadlineError,
    DependencyError,
    HbmError,
    LimitsError,
    ProgramError,
    TopologyError,
    TorchrecTpuError,
)

TARGET = topology("tpu7x:2x2x1")
needs_libtpu = pytest.mark.skipif(
    adapter.why_unavailable("jax", "jaxlib", "libtpu") is not None,
    reason=adapter.why_unavailable("jax", "jaxlib", "libtpu") or "",
)


def text_of(num_rows: int = 256) -> str:
    """A small program without SparseCores."""
    shape = f"tensor<{num_rows}x128xf32>"
    return f"""
module @m {{
  func.func @main(%a: {shape} {{tf.aliasing_output = 0 : i32}}, %b: {shape}) -> {shape} {{
    %0 = stablehlo.add %a, %b : {shape}
    return %0 : {shape}
  }}
}}
"""


def stack(
    name: str, *, max_ids: int = 64, max_unique_ids: int = 32, dim: int = 128, rows: int = 4096
) -> StackFacts:
    return StackFacts(
        name=name,
        collection="ebc",
        tables=(name,),
        rows=rows,
        dim=dim,
        samples=512,
        slots_per_device=1 << 20,
        max_ids=max_ids,
        max_unique_ids=max_unique_ids,
        rule="adagrad",
    )


# ------------------------------------------------------------------------------------- diagnosis
# The refusals are libtpu 0.0.52's own words.

TOO_MANY_ROWS = """INVALID_ARGUMENT: E3001: CompileTimeSparseCoreInvalidReplicaCount:
No viable logical replica count for the embedding table with metadata: max_nz_per_row = 16384, \
max_unique_nz_per_row = 14336, feature_width = 128, sample_count = 256 (last tried split factor \
for vector splitting = 16, fixed_size_allocation_bytes = 605696, \
row_dependent_size_allocation_bytes = 196608, total_spmem_size_bytes = 524032)
See https://openxla.org/xla/errors/error_3001 for more details."""
SINGLE_ROW = (
    "RESOURCE_EXHAUSTED: Can't fit a single row. TileSpmem bytes: 524032; Reserved bytes: 0; "
    "Available bytes: 523992; Row bytes: 8379840"
)
LARGE_TABLE = (
    "INVALID_ARGUMENT: SparseCore only supports 16 GiB of HBM per tensor, got 20480000000 in "
    "%param_0.40 = f32[40000000,128]{1,0:T(8)L(1024)} parameter(0)"
)
HBM = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
    "required for HLO temporaries (149.06G) exceeds available HBM (94.74G). HLO module: main."
)


def test_too_many_distinct_rows_name_the_stack_and_the_bytes() -> None:
    wrong = stack("wrong", max_ids=16384, max_unique_ids=14336)
    error = diagnosis(TOO_MANY_ROWS, TARGET, [stack("right"), wrong])
    assert isinstance(error, LimitsError)
    assert error.stacks == ("wrong",)
    assert not error.larger_may_fit
    for part in ("'wrong'", "16,384", "14,336", "605,696 B", "524,032 B", "No viable logical"):
        assert part in str(error)


def test_a_row_that_does_not_fit_names_the_stack_and_the_bytes() -> None:
    wrong = stack("wrong", max_ids=20000, max_unique_ids=16240)
    error = diagnosis(SINGLE_ROW, TARGET, [stack("right"), wrong])
    assert isinstance(error, LimitsError)
    assert error.stacks == ("wrong",)
    assert error.larger_may_fit
    for part in ("'wrong'", "8,379,840 B", "523,992 B", "suggest_feasible"):
        assert part in str(error)


def test_a_stack_beyond_16_gib_a_core_is_named() -> None:
    wrong = stack("wrong", rows=2 * 40_000_000)
    error = diagnosis(LARGE_TABLE, TARGET, [stack("right"), wrong])
    assert isinstance(error, LimitsError)
    assert error.stacks == ("wrong",)
    assert "20,480,000,000 B" in str(error)


def test_two_stacks_with_the_refused_limits_are_both_named() -> None:
    same = [stack(n, max_ids=16384, max_unique_ids=14336) for n in ("a", "b")]
    error = diagnosis(TOO_MANY_ROWS, TARGET, same)
    assert isinstance(error, LimitsError)
    assert error.stacks == ("a", "b")
    assert "stacks 'a', 'b': " in str(error)


@pytest.mark.parametrize(
    "refusal",
    [
        HBM,
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 149.06G of 94.74G hbm. "
        "Exceeded hbm capacity by 54.32G.",
    ],
)
def test_lack_of_memory_tells_both_amounts(refusal: str) -> None:
    error = diagnosis(refusal, TARGET)
    assert isinstance(error, HbmError)
    assert error.needed_bytes == int(149.06 * 2**30)
    assert error.available_bytes == int(94.74 * 2**30)
    assert "149.1 GiB" in str(error)
    assert "94.7 GiB" in str(error)


def test_an_unknown_refusal_is_quoted() -> None:
    error = diagnosis("INTERNAL: something new", TARGET)
    assert type(error) is CompileError
    assert "INTERNAL: something new" in str(error)
    assert "tpu7x:2x2x1" in str(error)


# ----------------------------------------------------------------------------------------- process


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_a_command_returns_its_exit_code_and_all_that_it_printed() -> None:
    program = "import sys; print('out', flush=True); print('err', file=sys.stderr); sys.exit(3)"
    assert run(python(program), os.environ, deadline_seconds=60) == (3, "out\nerr\n")


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but that nobody has waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def until(condition: Callable[[], bool]) -> None:
    """Returns when it holds; fails when it does not for long."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_deadline_ends_the_child_and_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
print("still at it", flush=True)
time.sleep(600)
"""
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"within 5 s.*(?s:.*)still at it") as error:
        run(python(program), os.environ, deadline_seconds=5)
    assert time.monotonic() - started < 60
    assert isinstance(error.value, TimeoutError)
    both = [int(pid) for pid in pids.read_text().split()]
    until(lambda: not any(map(is_alive, both)))


def test_what_a_child_leaves_behind_is_ended_too(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    program = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(pid)!r}, "w").write(str(child.pid))
"""
    run(python(program), os.environ, deadline_seconds=60)
    until(lambda: not is_alive(int(pid.read_text())))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_child_does_not_survive_its_parent(tmp_path: Path, number: signal.Signals) -> None:
    pids = tmp_path / "pids"
    child = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(pids) + ".new"!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
os.replace({str(pids) + ".new"!r}, {str(pids)!r})
time.sleep(600)
"""
    program = f"""
import os, sys
from torchrec_tpu.sparsecore.aot.compile import run
run([sys.executable, "-c", {child!r}], os.environ, deadline_seconds=600)
"""
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(python(program), env={**os.environ, "PYTHONPATH": path}) as parent:
        until(pids.exists)
        both = [int(pid) for pid in pids.read_text().split()]
        assert all(map(is_alive, both))
        parent.send_signal(number)
    until(lambda: not any(map(is_alive, both)))


@pytest.mark.parametrize(
    ("program", "exit_code", "says"),
    [
        ("import os; print('F1129 check failed', flush=True); os.abort()", -6, "SIGABRT"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -11, "SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, "out of memory"),
        ("raise SystemExit('no such module')", 1, "exit code 1"),
    ],
)
def test_a_compiler_that_dies_is_told_by_its_signal_and_last_words(
    program: str, exit_code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child is replaced by one that dies in the same way, for libtpu does so rarely."""
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}"\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    with pytest.raises(CompilerDiedError, match=says) as error:
        compile._compile_in_child(text_of(), TARGET.name, {}, 60.0)
    assert error.value.exit_code == exit_code
    if "check failed" in program:
        assert "F1129 check failed" in str(error.value)


def test_the_failed_check_is_shown_above_the_last_lines() -> None:
    lines = ["I1129 fine", "F1129 the check", *(f"@ 0x{n:x}" for n in range(40))]
    tail = compile._tail("\n".join(lines)).splitlines()
    assert tail[0] == "F1129 the check"
    assert tail[1:] == lines[-12:]


# -------------------------------------------------------------------------------------------- kept


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "aot"


RESULT = {"refusal": None, "text": "HloModule m", "memory": {}, "cost": {}, "seconds": 1.0}


def test_a_result_is_read_as_it_was_written(cache: Path) -> None:
    assert compile._read("k") is None
    compile._write("k", RESULT)
    assert compile._read("k") == RESULT
    assert compile._read("other") is None
    assert [path.name for path in cache.iterdir()] == ["k.json.gz"]  # no draft is left


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"not gzip at all",
        lambda data: data[:-6] + bytes(6),
        lambda data: data[:20] + bytes(4) + data[24:],
        lambda data: gzip.compress(b"[1, 2]"),
        lambda data: gzip.compress(b"{}"),
        lambda data: gzip.compress(b'{"key": "of another program"}'),
    ],
    ids=["cut", "empty", "other", "checksum", "bits", "list", "keyless", "foreign"],
)
def test_a_damaged_result_is_as_none(
    damage: object, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compile._write("k", RESULT)
    path = cache / "k.json.gz"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert compile._read("k") is None
    assert "damaged" in caplog.text
    compile._write("k", RESULT)
    assert compile._read("k") == RESULT


def test_a_place_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    compile._write("k", RESULT)
    assert "not kept" in caplog.text


def test_results_are_kept_with_the_users_other_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert compile.cache_directory() == Path("/somewhere/torchrec_tpu")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert compile.cache_directory() == Path.home() / ".cache" / "torchrec_tpu"


# ------------------------------------------------------------------------------------ the real one


@needs_libtpu
def test_a_program_compiles_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--no_such_flag")  # the user's flags do not reach the compiler
    first = compile_stablehlo(text_of(), TARGET)
    assert not first.is_kept
    array = 256 * 128 * 4
    assert first.memory.argument_bytes == 2 * array
    assert first.memory.alias_bytes == first.memory.output_bytes == array
    assert first.memory.total_bytes == (
        2 * array + first.memory.temp_bytes + first.memory.code_bytes
    )
    schedule = hlo.parse(first.text)
    assert (schedule.num_replicas, schedule.calls, schedule.dots) == (8, (), 0)
    assert schedule.tc_cycles > 0

    def fail(*_: object) -> None:
        raise AssertionError("compiled again")

    with monkeypatch.context() as patched:
        patched.setattr(compile, "_compile_in_child", fail)
        second = compile_stablehlo(text_of(), "tpu7x:2x2x1")
    assert second == Compiled(**{**fields(first), "is_kept": True})
    (path,) = cache.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    third = compile_stablehlo(text_of(), TARGET)
    assert not third.is_kept
    assert third.memory == first.memory


def fields(compiled: Compiled) -> dict[str, object]:
    return {name: getattr(compiled, name) for name in Compiled.__dataclass_fields__}


@needs_libtpu
@pytest.mark.usefixtures("cache")
def test_a_program_that_is_too_large_is_refused_and_the_refusal_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for _ in range(2):
        with pytest.raises(HbmError) as error:
            compile_stablehlo(text_of(num_rows=150_000_000), TARGET)
        assert error.value.needed_bytes > error.value.available_bytes > 90 * 2**30
        monkeypatch.setattr(sys, "executable", "no interpreter: the second answer is kept")


@needs_libtpu
@pytest.mark.usefixtures("cache")
def test_text_that_is_no_stablehlo_is_a_compile_error() -> None:
    with pytest.raises(CompileError):
        compile_stablehlo("module { func.func @main( }", TARGET)


@needs_libtpu
def test_a_hopeless_deadline_is_told() -> None:
    with pytest.raises(DeadlineError, match=r"within 0.01 s"):
        compile_stablehlo(text_of(), TARGET, deadline_seconds=0.01, keep=False)


def test_a_slice_that_does_not_exist_is_refused_before_anything_starts() -> None:
    with pytest.raises(TopologyError, match="tpu7x:4x4x2"):
        compile_stablehlo(text_of(), "tpu7x:32")


def test_a_program_for_another_slice_is_refused() -> None:
    program = Program(
        text=text_of(),
        arguments=(),
        results=(),
        stacks=(),
        num_devices=4,
        cores_per_device=2,
        mode="exact",
        expected=Expected(num_lookups=0, num_updates=0, collectives=(), alias_bytes=0),
    )
    with pytest.raises(ProgramError, match=r"traced for 4 devices of 2 .* has 8 of 2"):
        compile_program(program, TARGET)


def test_without_the_compiler_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter, "TESTED", {**adapter.TESTED, "libtpu": ("0.0.1",)})
    with pytest.raises(DependencyError, match="aot") as error:
        compile_stablehlo(text_of(), TARGET)
    assert isinstance(error.value, TorchrecTpuError)
