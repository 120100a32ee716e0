"""What a device backend checks and rearranges; for its calls see aot/test_device_calls."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from torchrec_tpu.sparsecore import Combiner, Layout, Table, backends, make_layout
from torchrec_tpu.sparsecore.backends import tpu
from torchrec_tpu.sparsecore.capacity import Capacity
from torchrec_tpu.sparsecore.geometry import Geometry, StackLimits
from torchrec_tpu.sparsecore.ops import as_tensors
from torchrec_tpu.sparsecore.optimizers import RULES
from torchrec_tpu.sparsecore.preprocess import Preprocessor

BATCH_SIZE = 7
CORES = 2


def layout_of(combiner: Combiner, dims: tuple[int, int, int] = (6, 6, 16)) -> Layout:
    """Two tables on one stack, the second with two features, and one alone."""
    names = ((("a", 50), ("f",)), (("b", 97), ("g", "h")), (("c", 31), ("k",)))
    return make_layout(
        [
            Table(
                name=name,
                num_embeddings=rows,
                embedding_dim=dim,
                combiner=combiner,
                features=features,
            )
            for ((name, rows), features), dim in zip(names, dims, strict=True)
        ],
        cores_per_device=CORES,
        stacks=[["a", "b"]],
    )


class Batch:
    """A batch with everything that the backend takes, on the CPU."""

    def __init__(self, layout: Layout) -> None:
        rng = np.random.default_rng(0)
        capacity = {stack.name: Capacity(max_ids=64, max_unique_ids=64) for stack in layout.stacks}
        lengths = rng.integers(0, 4, 4 * BATCH_SIZE).astype(np.int32)
        self.batch = Preprocessor(layout)(
            ["f", "g", "h", "k"],
            rng.integers(0, 31, lengths.sum()).astype(np.int32),
            lengths=lengths,
        )
        self.geometry = replace(
            layout.geometry(self.batch),
            limits=tuple(StackLimits(one.max_ids, one.max_unique_ids) for one in capacity.values()),
        )
        self.buffers = as_tensors(self.batch)
        self.tables = [
            torch.zeros(CORES * stack.rows_per_core, stack.dim) for stack in layout.stacks
        ]

    @property
    def width(self) -> int:
        return self.geometry.features[0].out_stride

    def calls(self, geometry: Geometry | None = None) -> list[tpu.StackCall]:
        return list(tpu.stack_calls(self.buffers, self.tables, geometry or self.geometry))


@pytest.fixture
def batch() -> Batch:
    return Batch(layout_of(Combiner.SUM))


# ------------------------------------------------------------------------------------ (un)stacking


@pytest.mark.parametrize("combiner", [Combiner.SUM, Combiner.NONE])
def test_every_sample_goes_where_the_geometry_says_and_its_gradient_comes_back(
    combiner: Combiner,
) -> None:
    dims = (6, 6, 16) if combiner is Combiner.SUM else (6, 6, 6)
    given = Batch(layout_of(combiner, dims))
    geometry, calls = given.geometry, given.calls()
    activations = [
        torch.randn(call.samples, table.shape[1])
        for call, table in zip(calls, given.tables, strict=True)
    ]
    if combiner is Combiner.SUM:
        shape = (BATCH_SIZE, given.width)
    else:
        shape = (sum(feature.num_samples for feature in geometry.features), given.width)
    out = tpu.unstack(calls, activations, CORES, shape)
    wanted = torch.full((out.numel(),), torch.nan)
    gradients = [torch.zeros_like(rows) for rows in activations]
    grad = torch.randn(shape)
    for table in geometry.tables:
        samples_per_core = calls[table.stack].samples // CORES
        for feature in geometry.features[table.first_feature :][: table.num_features]:
            for i in range(feature.num_samples):
                core, sample = divmod(i, feature.samples_per_core)
                row = core * samples_per_core + feature.sample_offset + sample
                at = feature.out_offset + i * feature.out_stride
                vector = slice(at, at + table.dim)
                wanted[vector] = activations[table.stack][row, : table.dim]
                gradients[table.stack][row, : table.dim] = grad.view(-1)[vector].clamp(-1, 1)
    assert torch.equal(out.view(-1), wanted)
    for call, want in zip(calls, gradients, strict=True):
        got = tpu.stack_gradient(call, grad, CORES, dim=want.shape[1], limit=1.0)
        assert torch.equal(got, want), f"stack {call.index}"


def test_an_output_that_features_do_not_fill_is_refused(batch: Batch) -> None:
    calls = batch.calls()
    rows = [
        torch.zeros(call.samples, t.shape[1]) for call, t in zip(calls, batch.tables, strict=True)
    ]
    for shape in [(BATCH_SIZE + 1, batch.width), (BATCH_SIZE, batch.width + 1)]:
        with pytest.raises(ValueError, match="expected"):
            tpu.unstack(calls, rows, CORES, shape)
    with pytest.raises(ValueError, match="expected"):
        tpu.stack_gradient(
            calls[0], torch.zeros(BATCH_SIZE - 1, batch.width), CORES, dim=8, limit=None
        )


# ---------------------------------------------------------------------------------------- checking


def test_arguments_that_contradict_each_other_are_refused(batch: Batch) -> None:
    geometry = batch.geometry
    with pytest.raises(ValueError, match=r"limits of 0 stacks, expected 2.*calibrate"):
        batch.calls(replace(geometry, limits=()))
    with pytest.raises(ValueError, match="7 buffers for 2 stacks"):
        list(tpu.stack_calls(batch.buffers[:-1], batch.tables, geometry))
    with pytest.raises(ValueError, match="3 tables for stacks"):
        list(tpu.stack_calls(batch.buffers, [*batch.tables, batch.tables[0]], geometry))
    for at, wrong in ((0, torch.zeros(8)), (2, batch.buffers[2].long()), (3, torch.zeros(16))):
        buffers = [*batch.buffers[:at], wrong, *batch.buffers[at + 1 :]]
        with pytest.raises(ValueError, match="stack 0: buffers are"):
            list(tpu.stack_calls(buffers, batch.tables, geometry))
    with pytest.raises(NotImplementedError, match="do not fill"):
        list(tpu.stack_calls(batch.buffers, [batch.tables[0][:-2], batch.tables[1]], geometry))
    with pytest.raises(ValueError, match="contiguous float32 table"):
        list(tpu.stack_calls(batch.buffers, [batch.tables[0].double(), batch.tables[1]], geometry))


@pytest.mark.parametrize("trained", [[0, 2], [1, 2]])
def test_a_frozen_table_among_trained_ones_is_refused(batch: Batch, trained: list[int]) -> None:
    """A zero gradient would not freeze it: Adam moves rows by their moments."""
    with pytest.raises(NotImplementedError, match=r"stack 0.*a frozen table"):
        batch.calls(batch.geometry.select(trained))


def test_tables_in_blocks_of_rows_are_refused(batch: Batch) -> None:
    blocks = tuple(
        t._replace(block_rows=-(-t.num_embeddings // CORES)) for t in batch.geometry.tables
    )
    with pytest.raises(NotImplementedError, match="stack 0: its tables lie in blocks of rows"):
        batch.calls(replace(batch.geometry, tables=blocks))


def test_a_whole_stack_can_be_frozen(batch: Batch) -> None:
    (call,) = tpu.stack_calls(batch.buffers, batch.tables[1:], batch.geometry.select([2]))
    assert call.index == 1
    assert call.buffers == tuple(batch.buffers[4:])


def test_a_stack_whose_tables_have_different_operands_is_refused(batch: Batch) -> None:
    operands = torch.tensor([[0.1], [0.2], [0.1]])
    with pytest.raises(NotImplementedError, match=r"stack 0: .* different values of \('lr',\)"):
        tpu.operands_of_stacks(RULES["sgd"], operands, batch.calls(), torch.device("meta"))
    constants, scalars = tpu.operands_of_stacks(
        RULES["sgd"], torch.tensor([[0.5], [0.5], [0.25]]), batch.calls(), torch.device("meta")
    )
    assert constants == [[0.5], [0.25]]
    assert scalars.shape == (2, 1)


def test_a_row_wise_mean_over_tables_of_different_width_is_refused() -> None:
    given = Batch(layout_of(Combiner.SUM, (6, 7, 16)))
    slots = [torch.zeros(len(table)) for table in given.tables]
    with pytest.raises(NotImplementedError, match=r"row-wise mean over tables of dims \[6, 7\]"):
        list(tpu.states_of(RULES["rowwise_adagrad"], given.calls(), given.tables, slots))


def test_slots_of_another_rule_are_refused(batch: Batch) -> None:
    slots = [torch.zeros_like(table) for table in batch.tables]
    with pytest.raises(ValueError, match="2 slots for 2 stacks, rule 'adam' has 2"):
        list(tpu.states_of(RULES["adam"], batch.calls(), batch.tables, slots))
    with pytest.raises(ValueError, match="table and slots of rule 'rowwise_adagrad'"):
        list(tpu.states_of(RULES["rowwise_adagrad"], batch.calls(), batch.tables, slots))


def test_limits_survive_encoding(batch: Batch) -> None:
    ints = batch.geometry.encode()
    assert Geometry.decode(ints) == batch.geometry
    with pytest.raises(ValueError, match="not an encoded geometry"):
        Geometry.decode(ints[:-1])


# ------------------------------------------------------------------------------------ availability


def installed(monkeypatch: pytest.MonkeyPatch, path: Path, version: str) -> None:
    """Has Python find a distribution `torch_tpu` of that version."""
    directory = path / f"torch_tpu-{version}.dist-info"
    directory.mkdir()
    (directory / "METADATA").write_text(f"Name: torch_tpu\nVersion: {version}\n")
    monkeypatch.syspath_prepend(path)


def test_another_version_of_torch_tpu_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(monkeypatch, tmp_path, "9.9")
    for name in ("tpu", "xla"):
        why = backends.why_unavailable(name)
        assert why is not None
        assert why.startswith("torch_tpu 9.9 is installed, tested is 0.2.0; pip install")


def test_a_torch_tpu_that_was_not_loaded_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(monkeypatch, tmp_path, "0.2.0")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert "torch_tpu 0.2.0 is installed but was not loaded" in (tpu.why_no_tpu() or "")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_machine_without_a_tpu_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch, tmp_path, "0.2.0")
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    assert "torch sees no accelerator: this machine has no TPU device" in (tpu.why_no_tpu() or "")
    with pytest.raises(NotImplementedError, match=r"backend 'tpu' cannot run here: torch_tpu"):
        backends.choose("tpu")


def test_without_torch_tpu_the_backend_says_how_to_get_it() -> None:
    """In a process that finds no distribution of that name."""
    script = (
        "import importlib.metadata as m\n"
        "found = m.Distribution.discover\n"
        "m.Distribution.discover = classmethod(lambda cls, **k: (\n"
        "    d for d in found(**k) if d.metadata['Name'] != 'torch_tpu'))\n"
        "from torchrec_tpu.sparsecore import backends\n"
        "print(backends.describe())\n"
    )
    lines = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["cpu", "reference", "tpu", "xla"]
    for line in lines[2:]:
        assert "unavailable: torch_tpu is not installed; pip install 'torchrec_tpu[tpu]'" in line
