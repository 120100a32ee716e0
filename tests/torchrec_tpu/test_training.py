"""Whole runs, small: equal to plain TorchRec, resumable to the bit, honest when they fail."""

import argparse
import dataclasses
import json
import signal
import socket
import threading
from pathlib import Path

import pytest
import torch
from criteo_format import criteo_lines, write_criteo
from torchrec import KeyedTensor
from torchrec.models.dlrm import DLRMTrain

from torchrec_tpu.recipes import (
    Recipe,
    SparseFeature,
    dlrm_v2_criteo_sample,
    dlrm_v2_ml_100k,
    dlrm_v2_mlperf,
)
from torchrec_tpu.report import RunRecord
from torchrec_tpu.snapshots import SnapshotError, Snapshots
from torchrec_tpu.sparsecore.errors import OptimizerError, StateDictError
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec, adagrad, adam, rowwise_adagrad, sgd
from torchrec_tpu.training import Options, TrainingError, UsageError, command, run, torch_optimizer
from torchrec_tpu.training.sides import OURS, PLAIN, Side, our_side, plain_side


def tiny(**changes: object) -> Recipe:
    """Three tables, two of them multi-hot with many duplicates; ten steps an epoch."""
    recipe = Recipe(
        name="tiny",
        data="synthetic",
        features=(
            SparseFeature(key="a", num_embeddings=50, num_ids=4),
            SparseFeature(key="b", num_embeddings=7, num_ids=3, pooling="mean"),
            SparseFeature(key="c", num_embeddings=300),
        ),
        num_dense=4,
        embedding_dim=8,
        dense_arch=(16, 8),
        over_arch=(16, 1),
        dcn_layers=2,
        dcn_rank=4,
        table_optimizer=adagrad(lr=0.05, eps=1e-8),
        dense_optimizer=adagrad(lr=0.02, eps=1e-8),
        batch_size=64,
        epochs=2,
        init_std=0.01,
        steps_per_epoch=12,
        seed=3,
    )
    return dataclasses.replace(recipe, **changes)


def options(out: Path, recipe: Recipe | None = None, **changes: object) -> Options:
    settings = {"plot": False, "progress": False, **changes}
    return Options(recipe=recipe or tiny(), out=out, **settings)


def record(out: Path) -> RunRecord:
    return RunRecord.read(out / "record.json")


def final_state(out: Path) -> dict[str, object]:
    """Weights and optimizer states of the newest snapshot."""
    return Snapshots(out / "snapshots").load()[1]["sides"]


def assert_same_bits(a: object, b: object) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same_bits(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same_bits(x, y)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


@pytest.mark.parametrize(
    "spec",
    [
        sgd(lr=0.5),
        adagrad(lr=0.05, eps=1e-8),
        adagrad(lr=0.05, initial_accumulator_value=0.1),
        rowwise_adagrad(lr=0.05, eps=1e-8),
    ],
    ids=repr,
)
def test_training_is_that_of_plain_torchrec(tmp_path: Path, spec: OptimizerSpec) -> None:
    assert run(options(tmp_path, tiny(table_optimizer=spec), compare=True)) == 0
    compared = record(tmp_path).comparison
    assert compared.early_steps == 20
    assert compared.early_loss < 1e-5
    figures = compared.figures()
    assert figures["first_state"] < 1e-5
    assert figures["early_weights"] < 1e-2
    assert figures["early_state"] < 1e-2
    assert figures["auc"] < 0.005
    assert list(compared.tables) == ["step 1", "step 20", "end"]
    assert list(compared.tables["end"]) == ["t_a", "t_b", "t_c"]


@pytest.mark.parametrize(
    ("plain", "figure"),
    [
        (adagrad(lr=0.06, eps=1e-8), "early_weights"),
        (adagrad(lr=0.05, eps=1e-8, initial_accumulator_value=1e-3), "first_state"),
    ],
)
def test_comparison_fails_when_the_two_optimizers_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: OptimizerSpec, figure: str
) -> None:
    def other(recipe: Recipe, model: DLRMTrain) -> Side:
        return plain_side(dataclasses.replace(recipe, table_optimizer=plain), model)

    monkeypatch.setattr("torchrec_tpu.training.loop.plain_side", other)
    assert run(options(tmp_path, compare=True)) == 1
    assert figure in record(tmp_path).comparison.failures()


def test_comparison_fails_when_gradients_are_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adagrad's first step hides a wrong scale from weights and loss; its state shows it."""

    def scaled(recipe: Recipe, model: DLRMTrain) -> Side:
        side = our_side(recipe, model)

        def double(module: object, inputs: object, output: KeyedTensor) -> None:
            if output.values().requires_grad:
                output.values().register_hook(lambda grad: grad * 2)

        side.model.model.sparse_arch.embedding_bag_collection.register_forward_hook(double)
        return side

    monkeypatch.setattr("torchrec_tpu.training.loop.our_side", scaled)
    assert run(options(tmp_path, compare=True, max_steps=1)) == 1
    compared = record(tmp_path).comparison
    assert compared.early_loss < 1e-6
    assert compared.figures()["first_state"] > 1


@pytest.mark.parametrize(("stop", "compare"), [(7, True), (12, False), (19, False)])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(
    tmp_path: Path, stop: int, compare: bool
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(options(whole, compare=compare))
    run(options(parts, compare=compare, max_steps=stop))
    assert len(record(parts).step_samples) == stop
    run(options(parts, compare=compare, resume=True))
    assert_same_bits(final_state(parts), final_state(whole))
    a, b = record(parts), record(whole)
    assert a.step_samples == b.step_samples
    assert a.sides.keys() == b.sides.keys()
    for name, side in a.sides.items():
        assert side.losses == b.sides[name].losses
        for x, y in zip(side.epochs, b.sides[name].epochs, strict=True):
            timeless = dict.fromkeys(
                ("train_seconds", "samples_per_second", "preprocess_seconds"), 0.0
            )
            assert dataclasses.replace(x, **timeless) == dataclasses.replace(y, **timeless)
    assert a.comparison == b.comparison


def test_resume_passes_over_a_damaged_snapshot(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(options(whole))
    run(options(parts, max_steps=9, snapshot_steps=4))
    newest = max((parts / "snapshots").glob("*.pt"))
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"step-000000009.pt: torn.*going on from step-000000008"):
        run(options(parts, resume=True))
    assert_same_bits(final_state(parts), final_state(whole))


def test_an_interrupt_saves_after_the_step_and_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(options(whole, compare=True))
    step = Side.step

    def interrupted(side: Side, batch: object) -> torch.Tensor:
        if len(side.record.losses) == 4 and side.name == OURS:  # the other side is yet to step
            signal.raise_signal(signal.SIGINT)
        return step(side, batch)

    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(Side, "step", interrupted)
        assert run(options(parts, compare=True)) == 130
    assert signal.getsignal(signal.SIGINT) is handler
    assert Snapshots(parts / "snapshots").load()[0] == 5
    run(options(parts, compare=True, resume=True))
    assert_same_bits(final_state(parts), final_state(whole))


def test_resume_refuses_other_settings_and_changes_nothing(tmp_path: Path) -> None:
    run(options(tmp_path, max_steps=3))
    saved = final_state(tmp_path)
    with pytest.raises(StateDictError, match=r"batch_size=64 \(now 32\)"):
        run(options(tmp_path, tiny(batch_size=32), resume=True))
    with pytest.raises(StateDictError, match="table_optimizer"):
        run(options(tmp_path, tiny(table_optimizer=adagrad(lr=0.1)), resume=True))
    with pytest.raises(StateDictError, match="--compare-torchrec"):
        run(options(tmp_path, compare=True, resume=True))
    assert_same_bits(final_state(tmp_path), saved)


def test_resume_may_make_a_run_longer(tmp_path: Path) -> None:
    run(options(tmp_path, tiny(epochs=1)))
    run(options(tmp_path, tiny(epochs=2), resume=True))
    assert [epoch.epoch for epoch in record(tmp_path).sides[OURS].epochs] == [1, 2]


def test_resume_without_a_snapshot_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="nothing was saved here"):
        run(options(tmp_path, resume=True))


def test_a_new_run_removes_the_snapshots_of_the_old_one(tmp_path: Path) -> None:
    run(options(tmp_path))
    run(options(tmp_path, tiny(seed=9), max_steps=2))
    assert [path.stem for path in (tmp_path / "snapshots").glob("*.pt")] == ["step-000000002"]


def test_a_train_split_without_samples_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "empty.tsv"
    path.write_bytes(b"")
    with pytest.raises(TrainingError, match="no samples"):
        run(options(tmp_path, dlrm_v2_criteo_sample(), path=path))


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"the loss is (nan|inf)"):
        run(options(tmp_path, tiny(table_optimizer=sgd(lr=1e30))))
    assert not [t for t in threading.enumerate() if "prefetch" in t.name]


def test_ending_inside_an_epoch_ends_the_prefetch_thread(tmp_path: Path) -> None:
    run(options(tmp_path, max_steps=2))
    assert not [thread for thread in threading.enumerate() if "prefetch" in thread.name]


def test_a_record_tells_what_ran_but_not_where(tmp_path: Path) -> None:
    run(options(tmp_path))
    text = (tmp_path / "record.json").read_text()
    assert str(tmp_path) not in text
    assert str(Path.cwd()) not in text
    assert f'"{socket.gethostname()}"' not in text
    told = json.loads(text)
    assert told["recipe"]["name"] == "tiny"
    assert told["versions"]["torch"] == torch.__version__.split("+")[0] or told["versions"]["torch"]
    assert told["machine"]["num_torch_threads"] >= 1
    assert len(told["sides"][OURS]["losses"]) == 24
    assert told["data"]["train_samples"] == 12 * 64
    assert all(epoch["preprocess_seconds"] > 0 for epoch in told["sides"][OURS]["epochs"])


def test_criteo_file_trains_and_reports_collisions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_criteo(tmp_path / "a.tsv", criteo_lines(200))
    recipe = dlrm_v2_criteo_sample()
    recipe = dataclasses.replace(recipe, num_threads=None)
    assert run(options(tmp_path / "out", recipe, path=path, compare=True)) == 0
    assert "hash collisions: " in capsys.readouterr().out
    assert len(record(tmp_path / "out").sides[PLAIN].epochs) == 2


# ---------------------------------------------------------------------------------- what is refused


def parsed(*argv: str) -> Options:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.options_from(parser.parse_args(argv))


def test_arguments_change_the_recipe() -> None:
    found = parsed(
        "--lr", "0.5", "--dense-lr", "0.25", "--epochs", "7", "--seed", "4", "--steps", "9"
    )
    expected = dataclasses.replace(
        dlrm_v2_ml_100k(),
        epochs=7,
        seed=4,
        table_optimizer=adagrad(lr=0.5, eps=1e-8),
        dense_optimizer=adagrad(lr=0.25, eps=1e-8),
    )
    assert found.recipe == expected
    assert found.out == Path("runs/dlrm_v2_ml_100k")
    assert found.max_steps == 9
    capped = parsed("--data", "synthetic", "--max-rows", "10").recipe
    assert max(feature.num_embeddings for feature in capped.features) == 10


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--data", "criteo", "--recipe", "dlrm_v2_ml_100k"], "is for ml-100k data"),
        (["--data", "ml-100k", "--max-rows", "5"], "--max-rows"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(argv: list[str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parsed(*argv)


@pytest.mark.parametrize(
    "argv",
    ["--steps 0", "--epochs -1", "--batch-size x", "--exponent -1", "--exponent nan", "--seed -1"],
)
def test_numbers_outside_their_range_are_refused(
    argv: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(*argv.split())
    assert f"argument {argv.split(maxsplit=1)[0]}" in capsys.readouterr().err


def test_criteo_without_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--path"):
        run(options(tmp_path, dataclasses.replace(tiny(), data="criteo")))


def test_tables_larger_than_the_machine_are_refused_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrec_tpu.training.loop._memory_bytes", lambda: 100 << 30)
    with pytest.raises(UsageError, match=r"take 194\.7 GiB, this machine has 100\.0.*--max-rows"):
        run(options(tmp_path, dlrm_v2_mlperf()))


def test_optimizers_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    for spec in (adam(lr=0.1), adagrad(weight_decay=0.1)):
        with pytest.raises(OptimizerError, match="cannot be compared"):
            run(options(tmp_path, tiny(table_optimizer=spec), compare=True))
    for spec in (sgd(max_gradient=1.0), adam(weight_decay=0.1, weight_decay_mode="decoupled")):
        with pytest.raises(OptimizerError, match="no eager optimizer"):
            torch_optimizer(spec, [torch.nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize(
    "spec", [sgd(lr=0.3, weight_decay=0.1), adagrad(), rowwise_adagrad(), adam()]
)
def test_eager_optimizers_take_the_step_of_their_rule(spec: OptimizerSpec) -> None:
    from torchrec_tpu.sparsecore.rules import apply

    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3, 8, generator=generator))
    row, grad = weight.detach().numpy().copy(), torch.randn(3, 8, generator=generator)
    slots = [
        torch.full(slot.shape(3, 8), spec.initial_value(slot)).numpy() for slot in spec.rule.slots
    ]
    optimizer = torch_optimizer(spec, [weight])
    for step in (1, 2):
        weight.grad = grad * step
        optimizer.step()
        row, *slots = apply(spec.rule, (grad * step).numpy(), row, slots, spec.operands(step))
    torch.testing.assert_close(weight.detach(), torch.from_numpy(row))
