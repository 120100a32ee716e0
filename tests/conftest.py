"""Settings for every test.

Imports neither torch nor our package: the numpy floor is tested where torch is absent.
"""

import os

from hypothesis import settings

# An installed torch_tpu would otherwise load itself at `import torch`, here and in every child.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

# Shared machines make deadlines flaky; CI must give the same verdict for the same commit.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
