"""examples/dmp.py with a process that is killed between forward and backward of one step.

python dies_in_step.py RANK STEP [options of dmp.py]. Only in a job's first attempt under torchrun.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

import torch

DMP = Path(__file__).parents[2] / "examples" / "dmp.py"


def main() -> None:
    victim, step = int(sys.argv[1]), int(sys.argv[2])
    sys.argv = [str(DMP), *sys.argv[3:]]
    if os.environ["RANK"] == str(victim) and os.environ.get("TORCHELASTIC_RESTART_COUNT") != "1":
        backward, calls = torch.Tensor.backward, iter(range(1, step + 1))

        def last_backward(self: torch.Tensor, *args: object, **kwargs: object) -> None:
            if next(calls) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            backward(self, *args, **kwargs)

        torch.Tensor.backward = last_backward
    runpy.run_path(str(DMP), run_name="__main__")


if __name__ == "__main__":
    main()
