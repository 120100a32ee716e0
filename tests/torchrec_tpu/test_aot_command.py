"""`torchrec-tpu aot`, and what is behind it."""

import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from torchrec_tpu import aot
from torchrec_tpu.cli import main
from torchrec_tpu.planning import plan_recipe
from torchrec_tpu.recipes import capped, dlrm_v2_synthetic
from torchrec_tpu.sharding.cost import Way
from torchrec_tpu.sparsecore.aot import adapter
from torchrec_tpu.sparsecore.aot.compile import CACHE_VARIABLE

needs_compiler = pytest.mark.skipif(
    adapter.why_unavailable() is not None, reason=adapter.why_unavailable() or ""
)
ARGUMENTS = ["aot", "--recipe", "dlrm_v2_synthetic", "--max-rows", "50"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--topology", "tpu7x:32", "--global-batch", "64"], "tpu7x:4x4x2 (64 devices)"),
        (["--topology", "v6e:2x2", "--global-batch", "66"], "does not divide by 4 devices"),
        (
            ["--topology", "v6e:2x2", "--global-batch", "64", "--json", "no/such/folder/r.json"],
            "no such folder",
        ),
    ],
)
def test_what_the_user_can_mend_is_said_in_a_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ARGUMENTS, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: ")
    assert says in error


@pytest.mark.parametrize(
    "arguments", [["--global-batch", "0"], ["--global-batch", "64", "--headroom", "-1"]]
)
def test_numbers_out_of_range_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*ARGUMENTS, "--topology", "v6e:2x2", *arguments])
    assert ended.value.code == 2
    assert "usage: " in capsys.readouterr().err


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pipelined", "num_calls"), [("v6e:2x2", False, 2), ("v5p:2x2x1", True, 1)]
)
def test_a_recipe_is_compiled_and_reported(
    name: str,
    pipelined: bool,
    num_calls: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "report.json"
    flag = ["--pipelined"] if pipelined else []
    argv = [*ARGUMENTS, "--topology", name, "--global-batch", "256", "--json", str(path), *flag]
    assert main(argv) == 0
    text = capsys.readouterr().out
    document = json.loads(path.read_text())
    assert document["fits"]
    assert document["findings"] == []
    assert document["mode"] == ("pipelined" if pipelined else "exact")
    assert document["global_batch_size"] == 256
    assert len(document["sparsecore"]["calls"]) == num_calls
    assert document["roofline"]["traffic"] == "batches"
    assert f"{name}: 4 chips" in text
    if pipelined:
        assert document["tensorcore"]["share_under_sparsecore"] > 0.8


def planned(
    path: Path, target: str, *, max_rows: int = 50, ways: Sequence[Way] = (Way.POOLED,)
) -> str:
    """A plan of the recipe in a file."""
    recipe = capped(dlrm_v2_synthetic(), max_rows=max_rows)
    plan = plan_recipe(recipe, target, global_batch_size=256, ways=ways)
    plan.save(path)
    return str(path)


@pytest.mark.parametrize(
    ("target", "batch", "max_rows", "ways", "says"),
    [
        (
            "tpu7x:1x1x1",
            "256",
            50,
            [Way.POOLED],
            "plan is for tpu7x:1x1x1 and",
        ),
        ("v6e:2x2", "512", 50, [Way.POOLED], "global batch of 256, not for v6e:2x2 and 512"),
        ("v6e:2x2", "256", 60, [Way.POOLED], "the plan is for other tables"),
        ("v6e:2x2", "256", 50, [Way.REPLICATED], "which compiled programs cannot"),
    ],
)
def test_a_plan_for_something_else_is_refused(
    target: str,
    batch: str,
    max_rows: int,
    ways: Sequence[Way],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = planned(tmp_path / "plan.json", target, max_rows=max_rows, ways=ways)
    arguments = ["--topology", "v6e:2x2", "--global-batch", batch, "--plan", plan]
    assert main([*ARGUMENTS, *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_file_that_is_no_plan_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    arguments = [*ARGUMENTS, "--topology", "v6e:2x2", "--global-batch", "64", "--plan", str(path)]
    for content in (None, "{}", "no JSON"):
        if content is not None:
            path.write_text(content)
        assert main(arguments) == 2
        assert capsys.readouterr().err.startswith("error: ")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("target", ["tpu7x:1x1x1", "v6e:2x1"])
def test_a_plan_with_pooled_tables_is_compiled_and_reported(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(tmp_path / "plan.json", target)
    path = tmp_path / "report.json"
    arguments = ["--topology", target, "--global-batch", "256", "--plan", plan]
    assert main([*ARGUMENTS, *arguments, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["fits"]
    assert document["findings"] == []
    assert document["stacks"] == []
    assert document["table_copies"] == 0
    exchange = document["exchange"]
    (stack,) = document["pooled"]
    assert (exchange["rows"], exchange["row_ids"]) == (0, 0)
    assert 0 < exchange["pooled_ids"] <= stack["id_bytes"]
    assert exchange["pooled_vectors"] == 2 * stack["block_bytes"]
    assert "ids of pooled tables" in capsys.readouterr().out


@needs_compiler
@pytest.mark.slow
def test_limits_that_cannot_be_compiled_make_a_report_that_says_so() -> None:
    """So much headroom that an update's rows do not fit a tile."""
    found = aot.compile_recipe(
        dlrm_v2_synthetic(), "v6e:1x1", global_batch_size=512, headroom=400.0
    )
    assert not found.fits
    assert "stack 't_C1" in found.reasons[0]
    assert "max_unique_ids" in found.reasons[0]
    assert found.hbm is None


@needs_compiler
@pytest.mark.slow
def test_the_example_prints_both_modes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Path(__file__).parents[2] / "examples" / "aot_v7x.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--topology", "tpu7x:1x1x1"])
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    for mode in ("exact", "pipelined"):
        assert f"tpu7x:1x1x1: 1 chips, 2 devices of 2 SparseCores, 1 hosts; {mode} step" in printed
    assert printed.count("\nfits\n") == 2
    assert "NOTE" not in printed
