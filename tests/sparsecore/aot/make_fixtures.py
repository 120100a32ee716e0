"""Writes fixtures/: scheduled programs of a small model, and libtpu's figures beside them.

    python tests/sparsecore/aot/make_fixtures.py

Instructions are as the compiler wrote them; of their backend_config only what `hlo` reads is kept,
source locations and, outside the entry, layouts are left out, so that the files are small. The
name of a call as a whole, which is a note to libtpu's makers, becomes "(unnamed)".
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from torchrec_tpu import adagrad, aot, shard
from torchrec_tpu.sparsecore.aot.compile import compile_program
from torchrec_tpu.sparsecore.aot.program import Mode, Program
from torchrec_tpu.sparsecore.aot.topology import topology

FIXTURES = Path(__file__).parent / "fixtures"
TARGET = "v6e:2x2"
BATCH_SIZE = 64
TABLES = {"small": 100, "large": 5000}


class Model(nn.Module):
    """Two tables, a dense layer before and one after the lookup."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name, num_embeddings=rows, embedding_dim=16, feature_names=[f"f_{name}"]
                )
                for name, rows in TABLES.items()
            ]
        )
        self.before = nn.Linear(8, 128)
        self.after = nn.Linear(128 + 16 * len(TABLES), 128)

    def forward(self, batch: tuple[Tensor, KeyedJaggedTensor]) -> Tensor:
        dense, kjt = batch
        features = torch.cat([self.before(dense), self.ebc(kjt).values()], dim=1)
        return self.after(features).square().mean()


def trace(mode: Mode, *, target: str = TARGET, batch_size: int = BATCH_SIZE) -> Program:
    """The model's step for a slice; each bag has two ids."""
    ids = torch.arange(2 * batch_size * len(TABLES)) * 7 % min(TABLES.values())
    kjt = KeyedJaggedTensor(
        [f"f_{name}" for name in TABLES], ids, lengths=torch.full((len(TABLES) * batch_size,), 2)
    )
    slice_ = topology(target)
    return aot.trace(
        shard(Model(), optimizer=adagrad(lr=0.1)),
        (torch.zeros(batch_size, 8), kjt),
        num_devices=slice_.num_devices,
        cores_per_device=slice_.chip.cores_per_device,
        dense_optimizer=adagrad(lr=0.1),
        mode=mode,
    )


def trimmed(text: str) -> str:
    """A scheduled program without what nothing here reads."""
    text = re.sub(r", (metadata|frontend_attributes)=\{[^{}]*\}", "", text)
    text = re.sub(r'"[A-Z]+\(b/\d+\)"', '"(unnamed)"', text)
    parts = re.split(r", backend_config=(?=\{)", text)
    out = [parts[0]]
    for part in parts[1:]:
        config, end = json.JSONDecoder().raw_decode(part)
        kept = {}
        if cycles := config.get("window_config", {}).get("estimated_cycles"):
            kept["window_config"] = {"estimated_cycles": cycles}
        if sparse_core := config.get("sparse_core_config"):
            names = ("offload", "program_size", "stack_size_high_watermark")
            kept["sparse_core_config"] = {name: sparse_core[name] for name in names}
        if kept:
            out.append(f", backend_config={json.dumps(kept, separators=(',', ':'))}")
        out.append(part[end:])
    called, entry, main = "".join(out).partition("\nENTRY ")
    called = re.sub(r"(?<=\])\{[^{}]*\}|/\*index=\d+\*/", "", called)
    return called.replace('}, execution_thread="sparsecore"', "}") + entry + main


def main() -> None:
    """Writes all of them."""
    modes: tuple[Mode, ...] = ("exact", "pipelined")
    for mode in modes:
        program = trace(mode)
        compiled = compile_program(program, TARGET)
        FIXTURES.joinpath(f"{mode}.hlo.txt").write_text(trimmed(compiled.text))
        facts = {"memory": asdict(compiled.memory), "flops": compiled.flops}
        FIXTURES.joinpath(f"{mode}.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
