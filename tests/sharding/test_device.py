"""Collections on a device: all of on_device.py in a process that has a stand-in for a TPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).with_name("on_device.py")


def test_collections_train_on_a_device_as_on_the_cpu() -> None:
    child = subprocess.run(
        [sys.executable, "-m", "pytest", str(CASES), "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-8000:] + child.stderr[-2000:]
    assert re.search(r"\n\d+ passed in", child.stdout), child.stdout[-2000:]
