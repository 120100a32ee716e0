"""A training step creates nothing of a table's size."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = """
    import json
    from pathlib import Path

    import torch
    from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

    import torchrec_tpu

    def kib(field):
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith(field)).split()[1])

    def peak_of(run):
        "Bytes that `run` needs at its peak beyond what was resident before."
        before = kib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        run()
        return (kib("VmHWM") - before) * 1024

    collection = torchrec_tpu.SparseCoreEmbeddingBagCollection(
        [EmbeddingBagConfig(name="t", num_embeddings=8_000_000, embedding_dim=64,
                            feature_names=["f"])],
        device="meta", optimizer=torchrec_tpu.adagrad(lr=0.1))
    collection.to_empty(device="cpu")
    weight = collection.get_parameter("embedding_bags.t.weight")
    weight.detach().zero_()

    def step():
        collection(kjt).values().sum().backward()

    kjt = KeyedJaggedTensor(["f"], torch.randint(0, len(weight), (40_000,)),
                            lengths=torch.full((4_000,), 10))
    step()  # optimizer state of these rows gets its pages
    print(json.dumps({
        "table": weight.numel() * 4,
        "step": peak_of(step),
        "control": peak_of(lambda: torch.ones_like(weight)),
    }))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_a_step_on_a_2_gb_table_needs_less_than_5_percent_of_it() -> None:
    import json

    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROGRAM)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout.splitlines()[-1])
    assert measured["table"] > 2e9
    assert measured["control"] > 0.95 * measured["table"], "the measurement would not see it"
    assert measured["step"] < 0.05 * measured["table"], measured
