"""The command line: what it prints, what it returns, and that broken packages do not stop it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from criteo_format import criteo_lines, write_criteo

from torchrec_tpu import doctor
from torchrec_tpu.cli import COMMANDS, main
from torchrec_tpu.doctor import Diagnosis, Finding, diagnose, to_json, to_text

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
"""


def run_python(program: str, *, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs a program in a new interpreter in which some packages cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", f"{BLOCK.format(names=without)}\n{program}"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


# ------------------------------------------------------------------------------------------ command


def test_help_lists_every_command_and_loads_nothing_heavy() -> None:
    program = (
        "from torchrec_tpu.cli import main\ntry: main(['--help'])\nfinally: print(*sys.modules)"
    )
    result = run_python(program)
    assert result.returncode == 0
    *text, modules = result.stdout.splitlines()
    assert all(any(command.name in line for line in text) for command in COMMANDS)
    assert {"torch", "numpy", "jax", "matplotlib"}.isdisjoint(modules.split())


def test_a_command_that_cannot_be_loaded_points_to_the_doctor() -> None:
    program = "from torchrec_tpu.cli import main\nsys.exit(main(['train']))"
    result = run_python(program, without=("torchrec",))
    assert result.returncode == 2
    assert "cannot be loaded" in result.stderr
    assert "torchrec-tpu doctor" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("argv", [[], ["dance"], ["doctor", "--nonsense"]])
def test_wrong_arguments_end_with_code_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "usage: torchrec-tpu" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("torchrec-tpu ")


def test_train_writes_record_snapshots_and_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    argv = "train --data synthetic --max-rows 20 --batch-size 16 --steps-per-epoch 3 --threads 1"
    assert main([*argv.split(), "--compare-torchrec", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "the same as plain TorchRec" in printed.out
    assert "epoch 1/1" in printed.err  # the progress bar
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["record.json", "run.png", "snapshots"]


def test_train_prints_errors_that_the_user_can_mend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = criteo_lines(60)
    lines[40] = lines[40] + "\toops"
    path = write_criteo(tmp_path / "bad.tsv", lines)
    argv = ["train", "--recipe", "dlrm_v2_criteo_sample", "--no-progress", "--out", str(tmp_path)]
    assert main([*argv, "--path", str(path)]) == 2
    assert f"error: {path}: line 41: 41 fields, expected 40" in capsys.readouterr().err
    assert main([*argv, "--path", str(tmp_path / "none")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(argv) == 2
    assert "--path" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- doctor


def finding_of(diagnosis: Diagnosis, subject: str) -> Finding:
    (found,) = [finding for finding in diagnosis.findings if finding.subject == subject]
    return found


def test_doctor_finds_this_environment_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "models train on the cpu backend" in text
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["healthy"] is True
    backends = told["backends"]
    assert set(backends) == {"cpu", "reference", "tpu", "xla"}
    assert backends["cpu"] is None
    assert backends["reference"] is None
    assert "TPU" in backends["tpu"]  # says what is missing: there is no TPU where tests run
    assert "TPU" in backends["xla"]
    assert {f["subject"] for f in told["findings"] if f["level"] == "ok"} >= {
        "torch",
        "torchrec",
        "fbgemm operators",
        "native extension",
        "training step",
    }
    for output in (text, json.dumps(told)):
        assert str(Path.cwd()) not in output
        assert sys.prefix not in output


@pytest.mark.parametrize(
    "missing", ["torch", "torchrec", "fbgemm_gpu", "torchrec_tpu.sparsecore._native"]
)
def test_doctor_survives_what_is_missing_and_says_how_to_get_it(missing: str) -> None:
    program = "from torchrec_tpu.cli import main\nsys.exit(main(['doctor', '--json']))"
    result = run_python(program, without=(missing,))
    assert result.returncode == 1, result.stderr
    told = json.loads(result.stdout)
    problems = [finding for finding in told["findings"] if finding["level"] == "problem"]
    assert told["healthy"] is False
    assert problems
    assert all("pip install" in problem["remedy"] for problem in problems)


def test_doctor_loads_neither_torch_tpu_nor_jax() -> None:
    program = "from torchrec_tpu.cli import main\nmain(['doctor'])\nprint(*sys.modules)"
    modules = run_python(program).stdout.splitlines()[-1].split()
    assert "torch" in modules
    assert {"torch_tpu", "jax", "jaxlib", "libtpu"}.isdisjoint(modules)


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Lets the doctor see other versions than there are."""
    real = doctor._version
    wanted = {name.replace("__", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(doctor, "_version", lambda name: wanted.get(name, real(name)))


def test_doctor_knows_both_builds_of_fbgemm_in_one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, fbgemm__gpu="1.8.0")
    found = finding_of(diagnose(), "fbgemm")
    assert "overwrote" in found.text
    assert "pip uninstall fbgemm-gpu fbgemm-gpu-cpu" in found.remedy


def test_doctor_knows_that_torch_tpu_loads_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, torch_tpu="0.2.0")
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD")
    assert "RuntimeError" in finding_of(diagnose(), "torch_tpu").text
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert "torch_tpu" not in {finding.subject for finding in diagnose().findings}


def test_doctor_notes_versions_that_were_not_tested_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch, torch="2.9.0+cpu")
    assert "torch 2.9.0+cpu (tested 2.13.0)" in finding_of(diagnose(), "versions").text


def test_doctor_sees_an_fbgemm_without_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_FBGEMM_OPERATORS", ("jagged_2d_to_dense", "no_such_operator"))
    found = diagnose()
    assert not found.is_healthy
    assert "not registered: no_such_operator;" in finding_of(found, "fbgemm operators").text
    assert "models do not train" in to_text(found)
    assert json.loads(to_json(found))["healthy"] is False


def test_tested_versions_are_those_of_the_requirements() -> None:
    root = Path(__file__).parents[2] / "requirements"
    lines = "\n".join((root / name).read_text() for name in ("cpu.txt", "no-deps.txt", "tpu.txt"))
    pinned = dict(line.split("==") for line in lines.splitlines() if "==" in line)
    assert {name: pinned[name] for name in doctor.TESTED} == dict(doctor.TESTED)
