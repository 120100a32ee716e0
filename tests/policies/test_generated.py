"""Generated files are checked in, and they are what their generators write today."""

import shutil
from pathlib import Path

import pytest

from torchrec_tpu.sparsecore.rules import GENERATED, main

ROOT = Path(__file__).parents[2]


def test_the_optimizer_functors_are_not_stale() -> None:
    assert main(["--check"], root=ROOT) == 0


def test_a_stale_file_is_caught_and_written_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / GENERATED
    copy.parent.mkdir(parents=True)
    assert main(["--check"], root=tmp_path) == 1  # absent
    shutil.copy(ROOT / GENERATED, copy)
    assert main(["--check"], root=tmp_path) == 0
    copy.write_text(copy.read_text().replace("row - t0", "row + t0", 1))
    capsys.readouterr()
    assert main(["--check"], root=tmp_path) == 1
    assert "--write" in capsys.readouterr().out
    assert main(["--write"], root=tmp_path) == 0
    assert copy.read_text() == (ROOT / GENERATED).read_text()


def test_a_wheel_without_csrc_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--check"], root=tmp_path)
    assert "run this from a checkout" in capsys.readouterr().err
