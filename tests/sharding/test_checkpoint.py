"""Checkpoints of one process: every form that tables have, every way in which files go bad."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from twin import (
    assert_same_bits,
    bag_configs,
    pooled,
    random_kjt,
    sequence,
    snapshot,
    train,
)

from torchrec_tpu import latest_checkpoint, load_checkpoint, save_checkpoint
from torchrec_tpu.sharding.checkpoint import files, storage
from torchrec_tpu.sharding.embeddings import SparseCoreCollection
from torchrec_tpu.sparsecore.errors import (
    CheckpointError,
    CheckpointMismatchError,
    DamagedCheckpointError,
)
from torchrec_tpu.sparsecore.optimizers import (
    OptimizerSpec,
    adagrad,
    adam,
    ftrl,
    rowwise_adagrad,
    sgd,
)

SPECS = [sgd(lr=0.1), adagrad(lr=0.1), rowwise_adagrad(lr=0.1), adam(lr=0.02), ftrl(lr=0.1)]

Make = Callable[..., SparseCoreCollection]


def trained(make: Make = pooled, **options: Any) -> SparseCoreCollection:
    collection = make(**options)
    train(collection, [random_kjt(seed) for seed in range(3)])
    return collection


def other(make: Make = pooled, **options: Any) -> SparseCoreCollection:
    """The same tables with other values in another layout."""
    collection = make(num_devices=4, stacks="none", **options)
    with torch.no_grad():
        for parameter in collection.parameters():
            parameter.add_(1.0)
    train(collection, [random_kjt(9)])
    return collection


class Model(nn.Module):
    """Tables and a dense part."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.tables = pooled(**options)
        self.over = nn.Sequential(nn.Linear(36, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        result: Tensor = self.over(self.tables(kjt).values())
        return result


def fit(model: Model, dense: torch.optim.Optimizer, scheduler: Any, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        dense.zero_grad()
        loss = model(random_kjt(seed)).square().mean()
        loss.backward()
        dense.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses


# -------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("make", [pooled, sequence])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_tables_and_every_slot_come_back_in_another_layout(
    spec: OptimizerSpec, make: Make, tmp_path: Path
) -> None:
    saved = trained(make, optimizer=spec)
    path = save_checkpoint(tmp_path, saved, step=3, progress={"epoch": 1})
    assert path == latest_checkpoint(tmp_path)

    loaded = other(make, optimizer=spec)
    restored = load_checkpoint(tmp_path, loaded)
    assert_same_bits(snapshot(saved), snapshot(loaded))
    assert (restored.step, restored.progress, restored.world_size) == (3, {"epoch": 1}, 1)


@pytest.mark.parametrize("spec", [adagrad(lr=0.1), adam(lr=0.02)], ids=lambda spec: spec.name)
def test_a_resumed_run_goes_on_with_the_same_bits(spec: OptimizerSpec, tmp_path: Path) -> None:
    def make() -> tuple[Model, torch.optim.Optimizer, Any, Any]:
        torch.manual_seed(1)
        model = Model(optimizer=spec)
        dense = torch.optim.Adam(model.over.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(dense, 0.9)
        of_tables = torch.optim.lr_scheduler.StepLR(model.tables.fused_optimizer, 2, 0.5)
        return model, dense, scheduler, of_tables

    model, dense, scheduler, of_tables = make()
    fit(model, dense, scheduler, range(4))
    model.tables.fused_optimizer.step()  # torch wants one before a scheduler's
    of_tables.step()
    of_tables.step()
    save_checkpoint(
        tmp_path,
        model,
        step=4,
        optimizers=dense,
        schedulers=[scheduler, of_tables],
        rank_state={"loader": torch.arange(3)},
    )
    expected = torch.rand(2), fit(model, dense, scheduler, range(4, 8))

    model2, dense2, scheduler2, of_tables2 = make()
    torch.manual_seed(99)
    restored = load_checkpoint(
        tmp_path, model2, optimizers=dense2, schedulers=[scheduler2, of_tables2], rng=True
    )
    assert torch.equal(restored.rank_state["loader"], torch.arange(3))
    assert torch.equal(torch.rand(2), expected[0])
    assert fit(model2, dense2, scheduler2, range(4, 8)) == expected[1]
    assert_same_bits(snapshot(model.tables), snapshot(model2.tables))
    assert_same_bits(model.state_dict(), model2.state_dict())
    assert model2.tables.fused_optimizer.param_groups[0]["lr"] == spec.lr / 2
    assert scheduler2.get_last_lr() == scheduler.get_last_lr()


def test_keyed_combined_and_wrapped_optimizers_come_back(tmp_path: Path) -> None:
    def make() -> tuple[Model, CombinedOptimizer]:
        torch.manual_seed(1)
        model = Model()
        dense = KeyedOptimizerWrapper(
            dict(model.over.named_parameters(prefix="over")),
            lambda parameters: torch.optim.Adam(parameters, lr=0.05),
        )
        stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=10, value=0.1)]
        warm = WarmupOptimizer(dense, stages=stages)
        return model, CombinedOptimizer([("tables", model.tables.fused_optimizer), ("", warm)])

    model, optimizer = make()
    for seed in range(3):
        model(random_kjt(seed)).sum().backward()
        optimizer.step()
    save_checkpoint(tmp_path, model, step=3, optimizers=optimizer)
    model2, optimizer2 = make()
    load_checkpoint(tmp_path, model2, optimizers=optimizer2)
    for seed in range(3, 5):
        for m, o in ((model, optimizer), (model2, optimizer2)):
            o.zero_grad()
            m(random_kjt(seed)).sum().backward()
            o.step()
    assert_same_bits(model.state_dict(), model2.state_dict())
    assert_same_bits(snapshot(model.tables), snapshot(model2.tables))


def test_a_part_of_the_model_reads_the_checkpoint_of_the_whole(tmp_path: Path) -> None:
    model = Model(optimizer=adam())
    model(random_kjt(0)).sum().backward()
    save_checkpoint(tmp_path, model, step=1)
    tables = other(optimizer=adam())
    load_checkpoint(tmp_path, tables)
    assert_same_bits(snapshot(model.tables), snapshot(tables))


def test_the_model_alone(tmp_path: Path) -> None:
    saved = trained(optimizer=adagrad(lr=0.1))
    save_checkpoint(tmp_path, saved, step=1)
    loaded = pooled(optimizer=sgd())
    load_checkpoint(tmp_path, loaded, with_optimizer=False)
    assert_same_bits(saved.state_dict(), loaded.state_dict())


def test_tables_larger_than_a_block_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "BLOCK_BYTES", 200)
    saved = trained(optimizer=adam())
    path = save_checkpoint(tmp_path, saved, step=1)
    index = dcp.FileSystemReader(path).read_metadata()
    stored = index.state_dict_metadata["model.embedding_bags.users.weight"]
    assert [tuple(chunk.sizes) for chunk in stored.chunks[-2:]] == [(12, 4), (5, 4)]
    for block_bytes in (200, 48, 1 << 20):
        monkeypatch.setattr(storage, "BLOCK_BYTES", block_bytes)
        loaded = other(optimizer=adam())
        load_checkpoint(tmp_path, loaded)
        assert_same_bits(snapshot(saved), snapshot(loaded))


# ------------------------------------------------------------------------------- plain TorchRec


def eager(optimizer: type[torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """TorchRec's collection as a user trains it without fused updates."""
    torch.manual_seed(11)
    collection = EmbeddingBagCollection(bag_configs())
    return collection, optimizer(collection.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("spec", "optimizer", "names"),
    [
        (adagrad(lr=0.1), torch.optim.Adagrad, {"momentum1": "sum"}),
        (rowwise_adagrad(lr=0.1), RowWiseAdagrad, {"momentum1": "sum"}),
        (
            adam(lr=0.1),
            torch.optim.Adam,
            {"momentum1": "exp_avg", "exp_avg_sq": "exp_avg_sq", "step": "step"},
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_plain_torchrec_reads_ours_and_we_read_plain_torchrec(
    spec: OptimizerSpec,
    optimizer: type[torch.optim.Optimizer],
    names: dict[str, str],
    tmp_path: Path,
) -> None:
    saved = trained(optimizer=spec)
    save_checkpoint(tmp_path / "ours", saved, step=3)
    plain, plain_optimizer = eager(optimizer)
    load_checkpoint(tmp_path / "ours", plain, optimizers=plain_optimizer)
    assert_same_bits(saved.state_dict(), plain.state_dict())
    for table in ("users", "goods", "tags"):
        parameter = plain.get_parameter(f"embedding_bags.{table}.weight")
        for ours, theirs in names.items():
            mine = saved.fused_optimizer.state[
                saved.get_parameter(f"embedding_bags.{table}.weight")
            ][f"{table}.{ours}"]
            value = plain_optimizer.state[parameter][theirs]
            assert torch.equal(value.reshape(mine.shape), mine.to(value.dtype)), (table, ours)
    plain(random_kjt(0)).values().sum().backward()
    plain_optimizer.step()  # the state is one that the optimizer can go on with

    save_checkpoint(tmp_path / "plain", plain, step=4, optimizers=plain_optimizer)
    loaded = other(optimizer=spec)
    load_checkpoint(tmp_path / "plain", loaded)
    assert_same_bits(plain.state_dict(), loaded.state_dict())
    for table in ("users", "goods", "tags"):
        state = plain_optimizer.state[plain.get_parameter(f"embedding_bags.{table}.weight")]
        mine = loaded.fused_optimizer.state[loaded.get_parameter(f"embedding_bags.{table}.weight")]
        for ours, theirs in names.items():
            value = mine[f"{table}.{ours}"]
            assert torch.equal(state[theirs].reshape(value.shape).to(value.dtype), value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_dcp_reads_ours(tmp_path: Path) -> None:
    saved = trained(optimizer=adam())
    path = save_checkpoint(tmp_path, saved, step=3)
    plain, _ = eager(torch.optim.Adam)
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=path)
    assert_same_bits(saved.state_dict(), plain.state_dict())

    fresh = other(optimizer=adam())
    state = {"optimizer": {"state": fresh.fused_optimizer.state_dict()["state"]}}
    dcp.load(state, checkpoint_id=path)
    for name, value in snapshot(fresh).items():
        if not name.startswith("embedding_bags"):
            assert torch.equal(value, snapshot(saved)[name]), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("prefix", ["", "app.net."])
def test_we_read_plain_dcp_under_any_prefix(prefix: str, tmp_path: Path) -> None:
    saved = trained(optimizer=adagrad(lr=0.1))
    state: dict[str, Any] = {prefix + name: value for name, value in saved.state_dict().items()}
    state["optim"] = {"state": saved.fused_optimizer.state_dict()["state"]}
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    loaded = other(optimizer=adagrad(lr=0.1))
    restored = load_checkpoint(tmp_path / "theirs", loaded)
    assert_same_bits(snapshot(saved), snapshot(loaded))
    assert (restored.step, restored.progress) == (None, {})

    file = next((tmp_path / "theirs").glob("*.distcp"))
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(DamagedCheckpointError, match=rf"{file.name}: cut off"):
        load_checkpoint(tmp_path / "theirs", loaded)
    file.unlink()
    with pytest.raises(DamagedCheckpointError, match=rf"{file.name}: the file is missing"):
        load_checkpoint(tmp_path / "theirs", loaded)
    assert_same_bits(snapshot(saved), snapshot(loaded))


def test_fused_collections_of_torchrec_read_ours(tmp_path: Path) -> None:
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    saved = trained(optimizer=adagrad(lr=0.1, eps=1e-8))
    save_checkpoint(tmp_path, saved, step=1)
    fused = FusedEmbeddingBagCollection(
        bag_configs(), torch.optim.Adagrad, {"lr": 0.1}, device=torch.device("cpu")
    )
    load_checkpoint(tmp_path, fused)
    assert_same_bits(saved.state_dict(), dict(fused.state_dict()))
    theirs = fused.fused_optimizer().state_dict()["state"]
    assert len(theirs) == 3
    for name, state in theirs.items():
        (value,) = state.values()
        (mine,) = saved.fused_optimizer.slots(name.removesuffix(".weight"))
        assert torch.equal(value.reshape(mine.shape), mine), name


# --------------------------------------------------------------------------- what does not fit


def configs(**changes: dict[str, Any]) -> list[EmbeddingBagConfig]:
    result = bag_configs()
    for config in result:
        for name, value in changes.get(config.name, {}).items():
            setattr(config, name, value)
    return result


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: _pooled(configs(goods={"name": "wares"})),
            r"lacks 'embedding_bags.wares.weight'; it has 'embedding_bags.goods.weight', which the "
            "model lacks: renamed",
        ),
        (
            lambda: _pooled(configs(goods={"num_embeddings": 32})),
            r"'embedding_bags.goods.weight' is 32 x 12 here and 31 x 12 in the checkpoint",
        ),
        (
            lambda: _pooled(
                configs(users={"feature_names": ["item"]}, tags={"feature_names": ["user"]})
            ),
            r"looked up by other features.*users.weight' from \['user'\] to \['item'\].*reordered",
        ),
        (lambda: _pooled(bag_configs()[:2]), r"has 'embedding_bags.tags.weight', which the model"),
        (lambda: pooled(optimizer=sgd()), r"users.weight' was trained by adagrad, here it is by"),
        (lambda: pooled(optimizer=adam()), r"users.weight' was trained by adagrad, here it is by"),
        (lambda: pooled(optimizer=adagrad(eps=1e-3)), r"eps is 0.001 here and 1e-10 in the check"),
        (
            lambda: pooled(optimizer=adagrad(max_gradient=1.0)),
            r"max_gradient is 1.0 here and None in the checkpoint",
        ),
    ],
)
def test_another_model_is_refused_and_stays_as_it_was(
    make: Callable[[], SparseCoreCollection], message: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, trained(optimizer=adagrad(lr=0.1)), step=1)
    model = make()
    before = snapshot(model)
    groups = str(model.fused_optimizer.param_groups)
    with pytest.raises(CheckpointMismatchError, match=message):
        load_checkpoint(tmp_path, model)
    assert_same_bits(before, snapshot(model))
    assert str(model.fused_optimizer.param_groups) == groups


def _pooled(tables: list[EmbeddingBagConfig]) -> SparseCoreCollection:
    from torchrec_tpu import SparseCoreEmbeddingBagCollection

    return SparseCoreEmbeddingBagCollection(tables, optimizer=adagrad(lr=0.1))


def test_strict_false_loads_by_name(tmp_path: Path) -> None:
    saved = trained(optimizer=adagrad(lr=0.1))
    save_checkpoint(tmp_path, saved, step=1)
    part = _pooled(configs(users={"feature_names": ["item"]})[:2])
    load_checkpoint(tmp_path, part, strict=False)
    assert torch.equal(
        part.fused_optimizer.slots("goods")[0], saved.fused_optimizer.slots("goods")[0]
    )


def test_state_that_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    plain, _ = eager(torch.optim.Adagrad)
    save_checkpoint(tmp_path, plain, step=1)
    model = pooled(optimizer=adagrad())
    with pytest.raises(CheckpointMismatchError, match=r"users.weight': .*\[\].*with_optimizer=Fal"):
        load_checkpoint(tmp_path, model)


def test_what_could_not_be_loaded_again_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="progress cannot be saved: it may have only"):
        save_checkpoint(tmp_path, pooled(), step=1, progress={"loader": Model})
    with pytest.raises(CheckpointError, match=r"users.weight' is on the meta device"):
        save_checkpoint(tmp_path, pooled(device="meta"), step=1)
    assert latest_checkpoint(tmp_path) is None
    assert not files.torn(tmp_path)


# ----------------------------------------------------------------------------- files that go bad


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    """A folder with two checkpoints, and what the older one holds."""
    collection = trained(optimizer=adagrad(lr=0.1))
    save_checkpoint(tmp_path, collection, step=1)
    before = snapshot(collection)
    train(collection, [random_kjt(5)])
    save_checkpoint(tmp_path, collection, step=2)
    return tmp_path, before


@pytest.mark.parametrize(
    ("file", "harm", "message"),
    [
        (
            "__0_0.distcp",
            "truncate",
            r"__0_0.distcp: cut off.*bytes.*it holds model",
        ),
        ("__0_0.distcp", "flip", r"__0_0.distcp: altered.*SHA-256.*it holds model"),
        ("__0_0.distcp", "remove", r"__0_0.distcp: the file is missing.*it holds model"),
        (".metadata", "truncate", r"\.metadata: cut off"),
        (".metadata", "flip", r"\.metadata: altered"),
        (".metadata", "remove", r"\.metadata: the file is missing"),
        ("manifest.json", "truncate", r"manifest.json: unreadable"),
        ("manifest.json", "flip", r"manifest.json: (unreadable|altered)"),
        ("manifest.json", "empty", r"manifest.json: unreadable"),
    ],
)
def test_a_damaged_file_is_named_and_nothing_changes(
    file: str, harm: str, message: str, saved: tuple[Path, dict[str, Tensor]]
) -> None:
    folder, older = saved
    newest = latest_checkpoint(folder)
    assert newest is not None
    path = newest / file
    data = path.read_bytes()
    middle = len(data) // 2
    if harm == "remove":
        path.unlink()
    elif harm == "truncate":
        path.write_bytes(data[:middle])
    elif harm == "empty":
        path.write_bytes(b"")
    else:
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :])
    model = pooled(optimizer=adagrad(lr=0.1))
    before = snapshot(model)
    with pytest.raises(DamagedCheckpointError, match=message) as caught:
        load_checkpoint(folder, model)
    assert_same_bits(before, snapshot(model))
    if file != "manifest.json":
        assert "load_checkpoint(..., step=1) goes back" in str(caught.value)
    load_checkpoint(folder, model, step=1)
    assert_same_bits(older, snapshot(model))


def test_every_flipped_bit_of_the_manifest_is_seen(saved: tuple[Path, dict[str, Tensor]]) -> None:
    newest = latest_checkpoint(saved[0])
    assert newest is not None
    data = (newest / files.MANIFEST).read_bytes()
    for position in range(0, len(data), 7):
        (newest / files.MANIFEST).write_bytes(
            data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
        )
        with pytest.raises(DamagedCheckpointError):
            files.read_manifest(newest)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint; steps there: none"):
        load_checkpoint(tmp_path / "absent", pooled())


def test_steps_by_name(saved: tuple[Path, dict[str, Tensor]]) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; steps there: 1, 2"):
        load_checkpoint(saved[0], pooled(), step=7)


def test_a_newer_format_is_refused(saved: tuple[Path, dict[str, Tensor]]) -> None:
    newest = latest_checkpoint(saved[0])
    assert newest is not None
    content = json.loads((newest / files.MANIFEST).read_text())
    del content["sha256"]
    content["format"] = files.FORMAT + 1
    content["sha256"] = files._checksum(content)
    (newest / files.MANIFEST).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="install a newer torchrec_tpu"):
        load_checkpoint(saved[0], pooled(optimizer=adagrad(lr=0.1)))


def test_the_newest_are_kept_also_when_a_run_goes_back(tmp_path: Path) -> None:
    model = pooled()
    for step in (10, 20, 30, 20, 5):
        save_checkpoint(tmp_path, model, step=step, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "000003-step-30",
        "000004-step-20",
        "000005-step-5",
    ]
    assert load_checkpoint(tmp_path, model).step == 5
    with pytest.raises(ValueError, match="keep=0"):
        save_checkpoint(tmp_path, model, step=6, keep=0)


# ----------------------------------------------------------------------------------- crashes

SAVE_AND_DIE = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import torch, torchrec_tpu
from torchrec_tpu.sharding.checkpoint import files, storage
torchrec_tpu.sgd
from test_checkpoint import trained
from torchrec_tpu import adagrad, save_checkpoint
from twin import random_kjt, train

model = trained(optimizer=adagrad(lr=0.1))
save_checkpoint({folder!r}, model, step=1)
train(model, [random_kjt(5)])

def dying(owner, name, when, count=1):
    original = getattr(owner, name)
    calls = 0
    def call(*args, **kwargs):
        nonlocal calls
        calls += 1
        if when == "before" and calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if when == "after" and calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(owner, name, call)

{death}
save_checkpoint({folder!r}, model, step=2, keep=1)
"""

DEATHS = {
    "in the data": ('dying(storage._HashingStream, "write", "after", 20)', 1),
    "between data and index": ('dying(storage.Writer, "finish", "before")', 1),
    "before the manifest": ('dying(files, "write_synced", "before")', 1),
    "before the rename": ('dying(Path, "rename", "before", 2)', 1),
    "after the rename": ('dying(Path, "rename", "after", 2)', 2),
    "while old ones are removed": ('dying(files.shutil, "rmtree", "before")', 2),
}


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(m, marks=() if m in ("in the data", "before the rename") else pytest.mark.slow)
        for m in DEATHS
    ],
)
def test_killed_while_saving(moment: str, tmp_path: Path) -> None:
    death, newest_step = DEATHS[moment]
    script = SAVE_AND_DIE.format(
        tests=str(Path(__file__).parent), folder=str(tmp_path), death=death
    )
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    child = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr

    expected = trained(optimizer=adagrad(lr=0.1))
    if newest_step == 2:
        train(expected, [random_kjt(5)])
    model = pooled(optimizer=adagrad(lr=0.1))
    if newest_step == 1:
        with pytest.warns(UserWarning, match=r"000002-step-2.draft: torn, a crash interrupted"):
            restored = load_checkpoint(tmp_path, model)
    else:
        restored = load_checkpoint(tmp_path, model)
    assert restored.step == newest_step
    assert_same_bits(snapshot(expected), snapshot(model))

    save_checkpoint(tmp_path, model, step=3, keep=1)  # clears up what the crash has left
    assert [path.name.split("-", 1)[1] for path in tmp_path.iterdir()] == ["step-3"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if (
        shutil.which("mount") is None
        or subprocess.run(command, check=False, capture_output=True).returncode
    ):
        pytest.skip("mounting a file system takes root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_named_and_the_last_checkpoint_stays(small_disk: Path) -> None:
    model = trained(optimizer=adagrad(lr=0.1))
    save_checkpoint(small_disk, model, step=1)
    before = snapshot(model)
    train(model, [random_kjt(5)])
    with pytest.raises(CheckpointError, match=r"rank 0: OSError.*No space left") as caught:
        save_checkpoint(small_disk, model, step=2)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert [path.name for path in small_disk.iterdir()] == ["000001-step-1"]  # room again
    load_checkpoint(small_disk, model)
    assert_same_bits(before, snapshot(model))


# ------------------------------------------------------------------------------------ memory

PEAK = """
import sys, tempfile
import torch, torchrec, torchrec_tpu
from torchrec import EmbeddingBagConfig

def peak(function, *args, **kwargs):
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
    before = status("VmRSS")
    function(*args, **kwargs)
    print(function.__name__, status("VmHWM") - before)

def status(name):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(name)]
    return int(line.split()[1]) / 1024

rows = int(sys.argv[1])
model = torchrec_tpu.SparseCoreEmbeddingBagCollection(
    [EmbeddingBagConfig(num_embeddings=rows, embedding_dim=128, name=name, feature_names=[name])
     for name in ("a", "b")], optimizer=torchrec_tpu.adagrad())
for name in ("a", "b"):
    model.fused_optimizer.slots(name)[0].fill_(1.0)
small = torchrec_tpu.SparseCoreEmbeddingBagCollection(
    [EmbeddingBagConfig(num_embeddings=8, embedding_dim=8, name="c", feature_names=["c"])])
with tempfile.TemporaryDirectory() as folder:  # first uses import and allocate
    torchrec_tpu.save_checkpoint(folder, small, step=1)
    torchrec_tpu.load_checkpoint(folder, small)
with tempfile.TemporaryDirectory(dir=sys.argv[2]) as folder:
    peak(torchrec_tpu.save_checkpoint, folder, model, step=1)
    peak(torchrec_tpu.load_checkpoint, folder, model)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    "rows", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)], ids=["200MB", "2GB"]
)
def test_memory_grows_by_a_block_at_most(rows: int, tmp_path: Path) -> None:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    child = subprocess.run(
        [sys.executable, "-c", PEAK, str(rows), str(tmp_path)],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert child.returncode == 0, child.stderr
    growth = dict(line.split() for line in child.stdout.splitlines())
    bound = storage.BLOCK_BYTES / 2**20 + 4
    assert growth.keys() == {"save_checkpoint", "load_checkpoint"}
    assert all(float(mebibytes) <= bound for mebibytes in growth.values()), growth
