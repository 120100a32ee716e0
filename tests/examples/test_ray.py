"""The distributed example on Ray: a worker is killed, Ray starts the job again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job import EXAMPLES, JOB, assert_same_bits, final_state, torchrun
from world import child_environment

from torchrec_tpu import latest_checkpoint

pytest.importorskip("ray", reason="Ray is not installed: pip install 'torchrec_tpu[ray]'")


def kill_a_worker(output: Path) -> None:
    """Rank 1, by the list that Ray prints."""
    found = re.findall(r"pid=(\d+)\) world_rank=1\b", output.read_text())
    os.kill(int(found[-1]), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_starts_the_job_again_and_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    torchrun(2, EXAMPLES / "dmp.py", *JOB, f"--folder={tmp_path / 'wanted'}")

    output, folder = tmp_path / "output", tmp_path / "found"
    workers = ("--workers=2", "--cpus-per-worker=0.5", "--max-restarts=1")
    with output.open("w") as stream:
        job = subprocess.Popen(
            [sys.executable, EXAMPLES / "ray_train.py", *JOB, *workers, f"--folder={folder}"],
            env=child_environment(RAY_COLOR_PREFIX="0", PYTHONUNBUFFERED="1"),
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
        try:
            while job.poll() is None and latest_checkpoint(folder) is None:
                time.sleep(0.02)
            assert job.poll() is None, output.read_text()[-6000:]
            kill_a_worker(output)
            assert job.wait(timeout=400) == 0, output.read_text()[-6000:]
        finally:
            job.terminate()
            job.wait()
    assert re.search(r"goes on after step \d+", output.read_text())
    assert_same_bits(final_state(folder, 14), final_state(tmp_path / "wanted", 14))
