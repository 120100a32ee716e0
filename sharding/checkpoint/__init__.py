"""Checkpoints that go anywhere: any number of ranks, any placement, plain TorchRec and back.

A checkpoint is one of `torch.distributed.checkpoint`, with every table in logical rows under its
TorchRec name, in a folder that is published by one rename. See docs/checkpoints.md.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from torchrec_tpu.sharding.checkpoint import files
from torchrec_tpu.sharding.checkpoint.contents import OWN_KEY, UPSTREAM_KEY, Contents
from torchrec_tpu.sharding.checkpoint.restore import Restoration, plan_restoration
from torchrec_tpu.sharding.checkpoint.state import (
    Optimizers,
    TableFacts,
    model_state,
    optimized,
    rng_state,
    set_rng_state,
    table_name,
    tables_of,
    unwrapped,
    write_to_device,
)
from torchrec_tpu.sharding.checkpoint.storage import (
    BlockSaver,
    BoxLoader,
    KeyPath,
    Reader,
    Writer,
    keys_in,
    missing_bytes,
)
from torchrec_tpu.sharding.checkpoint.team import Team, team_of
from torchrec_tpu.sparsecore.errors import (
    CheckpointError,
    DamagedCheckpointError,
    TorchrecTpuError,
)

__all__ = ["Restored", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]

DEADLINE_SECONDS: Final = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a checkpoint says of the run it was saved in.

    Attributes:
        path: of the checkpoint.
        step: steps done; None for a checkpoint of another library.
        progress: as given to `save_checkpoint`.
        rank_state: what this rank had given; None when the number of ranks is another now.
        world_size: ranks that saved it; None for a checkpoint of another library.
    """

    path: Path
    step: int | None = None
    progress: dict[str, Any] = field(default_factory=dict)
    rank_state: Any = None
    world_size: int | None = None


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    step: int,
    optimizers: Optimizers = (),
    schedulers: Sequence[Any] = (),
    progress: Mapping[str, Any] | None = None,
    rank_state: Any = None,
    rng: bool = True,
    keep: int = 2,
    group: dist.ProcessGroup | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> Path:
    """Saves a training run. Every rank calls it; the folder is one that all of them share.

    The fused optimizers of the model's tables are always part of it. Each rank writes the rows that
    it has, without a copy of them; replicas are written once. A crash at any moment leaves the
    checkpoints that were there.

    Args:
        folder: of the run's checkpoints; made if need be.
        model: sharded by DistributedModelParallel or not.
        step: steps done.
        optimizers: the others, of the dense part; TorchRec's or torch's.
        schedulers: learning rate schedulers.
        progress: where the run is, the same on every rank: epoch, batch, position of the data.
            Plain values and tensors.
        rank_state: what only this rank knows, such as its loader's state. Plain values and tensors.
        rng: also save the CPU random generators of each rank.
        keep: checkpoints to keep.
        group: the ranks; by default all.
        deadline_seconds: how long one rank waits for another, which may have more to write.

    Returns:
        The checkpoint: a new directory in `folder`.

    Raises:
        CheckpointError: a rank could not do its part, or is missing; names it. Nothing was
            published, unless it went missing when all was written.

    >>> import tempfile, torchrec, torchrec_tpu
    >>> model = torchrec_tpu.SparseCoreEmbeddingBagCollection([torchrec.EmbeddingBagConfig(
    ...     num_embeddings=100, embedding_dim=8, name="t", feature_names=["f"])])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_checkpoint(folder, model, step=7, progress={"epoch": 1})
    ...     path.name, load_checkpoint(folder, model).progress
    ('000001-step-7', {'epoch': 1})
    """
    if keep < 1:
        raise ValueError(f"keep={keep} must be at least 1")
    team = team_of(group, deadline_seconds=deadline_seconds)
    state: dict[KeyPath, Any] = {}
    tables: dict[str, TableFacts] = {}
    with _jointly(team):
        own = {"state": rank_state, "rng": rng_state() if rng else None}
        state = {("ranks", str(team.rank)): own}
        if team.rank == 0:
            state["progress",] = dict(progress or {})
            state["schedulers",] = [scheduler.state_dict() for scheduler in schedulers]
        for path, value in state.items():
            _check_plain(".".join(path), value)
        of_model = model_state(model)
        tables = tables_of(model, of_model)
        state |= {("model", name): value for name, value in of_model.items()}
        for name, entry in optimized(model, optimizers).items():
            for slot, value in entry.state.items():
                state["optimizer", "state", name, slot] = value
            state["optimizer", "param_groups", name] = entry.hyper
    draft: Path | None = None
    try:
        with _jointly(team):
            if team.rank == 0:
                draft = files.new_draft(Path(folder), step)
        shared = team.gather(draft)[0]
        assert shared is not None
        records = _write(shared, state, team)
        published = shared
        with _jointly(team):
            if team.rank == 0:
                published = files.publish(shared, records, _facts(step, tables, team), keep=keep)
    except BaseException:
        if draft is not None:
            files.discard(draft)
        raise
    return team.gather(published)[0]


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    step: int | None = None,
    optimizers: Optimizers = (),
    schedulers: Sequence[Any] = (),
    with_optimizer: bool = True,
    rng: bool = False,
    strict: bool = True,
    group: dist.ProcessGroup | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> Restored:
    """Loads a checkpoint into a model and its optimizers, in place. Every rank calls it.

    Sharding, stacking and number of ranks may be others than when it was saved; also checkpoints of
    plain `torch.distributed.checkpoint` with TorchRec's names, and of torch_tpu's
    SparseCoreSavePlanner, are read. All files, names and shapes are checked first.

    Args:
        folder: of the run's checkpoints, of which the newest is taken; or one checkpoint.
        model: gets the values.
        step: take the newest of this step.
        optimizers: as in `save_checkpoint`.
        schedulers: as in `save_checkpoint`.
        with_optimizer: False loads the model alone.
        rng: also restore the random generators, if the number of ranks is the same.
        strict: refuse a checkpoint with tables or parameters that the model lacks, or whose tables
            were fed by other features.
        group: the ranks; by default all.
        deadline_seconds: how long one rank waits for another.

    Raises:
        DamagedCheckpointError: a file is missing, cut off or altered; nothing has been changed.
        CheckpointMismatchError: tables, shapes or optimizers differ; nothing has been changed.
        CheckpointError: there is no checkpoint, or another rank has failed; names it.
    """
    root = Path(folder)
    team = team_of(group, deadline_seconds=deadline_seconds)
    path = root
    with _jointly(team):
        if team.rank == 0:
            path = _choose(root, step)
    path = team.gather(path)[0]
    manifest: dict[str, Any] = {}
    with _jointly(team):
        if not (path / ".metadata").exists() or (path / files.MANIFEST).exists():
            manifest = files.read_manifest(path)
    _check_files(path, manifest, team)

    restoration = Restoration()
    reader = Reader(path)
    with _jointly(team):
        metadata = reader.read_metadata()
        if not manifest and (problems := missing_bytes(path, metadata)):
            raise DamagedCheckpointError(_explain_damage(path, problems))
        of_model = model_state(model)
        parameters = optimized(model, optimizers) if with_optimizer else {}
        tables = tables_of(model, of_model)
        contents = Contents.of(metadata, {name: t.size for name, t in tables.items()})
        restoration = plan_restoration(
            contents,
            metadata,
            of_model,
            tables,
            parameters,
            saved_tables=manifest.get("tables", {}),
            strict=strict,
            read_objects=lambda keys: _read(reader, metadata, BoxLoader((), keys)),
        )
    with _jointly(team):  # from here on values change
        _read(reader, metadata, BoxLoader(restoration.requests))
        restoration.finish()
        write_to_device(model, of_model, parameters)
        if restoration.extra:
            unwrapped(model).load_state_dict(restoration.extra, strict=False)

    own = f"ranks.{team.rank}"
    world_size = manifest.get("world_size")
    keys = [key for key in ("progress", "schedulers", own) if key in contents.objects]
    with _jointly(team):
        found = _read(reader, metadata, BoxLoader((), keys))
        if schedulers:
            saved = found.get("schedulers", [])
            if len(saved) != len(schedulers):
                raise CheckpointError(
                    f"the checkpoint has {len(saved)} schedulers, {len(schedulers)} are given"
                )
            for scheduler, value in zip(schedulers, saved, strict=True):
                scheduler.load_state_dict(value)
        mine = found.get(own, {}) if world_size == team.size else {}
        if rng and mine.get("rng") is not None:
            set_rng_state(mine["rng"])
    return Restored(
        path=path,
        step=manifest.get("step"),
        progress=found.get("progress", {}),
        rank_state=mine.get("state"),
        world_size=world_size,
    )


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint of a folder, or None. Its files are not checked."""
    newest = files.published(Path(folder))[-1:]
    return newest[0].path if newest else None


@contextmanager
def _jointly(team: Team) -> Iterator[None]:
    """A part of the work that all ranks have done, or none goes on."""
    failure: TorchrecTpuError | None = None
    try:
        yield
    except TorchrecTpuError as error:
        failure = error
    except Exception as error:
        failure = CheckpointError(f"rank {team.rank}: {type(error).__name__}: {error}")
        failure.__cause__ = error
    team.agree(failure)


def _write(draft: Path, state: Mapping[KeyPath, Any], team: Team) -> list[files.FileRecord]:
    """Writes everything, on every rank; the records of all files on all ranks.

    These are the steps of `torch.distributed.checkpoint.save`, with collectives that name the rank
    that is missing.
    """
    keys = {".".join(path): path for path in state}
    # torch_tpu's SparseCoreLoadPlanner takes tables for stacks of one core, which is what they are
    facts = {OWN_KEY: files.FORMAT, UPSTREAM_KEY: {"world_size": 1, "num_sc_per_device": 1}}
    planner, writer = BlockSaver(keys, facts), Writer(draft)
    with _jointly(team):
        planner.set_up_planner(
            {key: state[path] for key, path in keys.items()},
            writer.storage_meta(),
            team.rank == 0,
        )
        writer.set_up_storage_writer(team.rank == 0)
        plan = writer.prepare_local_plan(planner.create_local_plan())
    plans = team.gather(plan)
    with _jointly(team):
        plans, metadata = planner.create_global_plan(plans)
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[team.rank])
        results = writer.write_data(plan, planner).value()
    all_results = team.gather(results)
    with _jointly(team):
        if team.rank == 0:
            writer.finish(metadata, all_results)
    return [record for records in team.gather(writer.written) for record in records]


def _facts(step: int, tables: Mapping[str, TableFacts], team: Team) -> dict[str, Any]:
    return {
        "step": step,
        "world_size": team.size,
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "tables": {name: asdict(table) for name, table in tables.items()},
    }


def _check_plain(name: str, value: Any) -> None:
    """Refuses what could be saved but not be loaded again without running its code."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{name} cannot be saved: it may have only numbers, strings, tensors, and lists, "
            "tuples and dicts of them"
        ) from error


def _choose(root: Path, step: int | None) -> Path:
    """The checkpoint to load; torn ones are named in a warning."""
    if (root / ".metadata").exists() or (root / files.MANIFEST).exists():
        return root
    found = files.published(root)
    for draft in files.torn(root):
        warnings.warn(
            f"{draft}: torn, a crash interrupted this save (or a job is at it right now); it is "
            "ignored, and removed at the next save",
            stacklevel=4,
        )
    chosen = [c for c in found if step is None or c.step == step]
    if not chosen:
        there = ", ".join(str(c.step) for c in found) or "none"
        raise CheckpointError(
            f"{root}: no checkpoint{'' if step is None else f' of step {step}'}; steps there: "
            f"{there}"
        )
    return chosen[-1].path


def _check_files(path: Path, manifest: Mapping[str, Any], team: Team) -> None:
    """Checks every file once; the ranks share the work.

    Raises:
        DamagedCheckpointError: on every rank, naming the files and what they hold.
    """
    records = files.records(manifest) if manifest else []
    load = [0] * team.size
    problems: dict[str, str] = {}
    for record in sorted(records, key=lambda record: -record.num_bytes):
        rank = load.index(min(load))
        load[rank] += record.num_bytes + 1
        if rank == team.rank and (problem := files.damage(path, record)):
            problems[record.name] = problem
    for found in team.gather(problems):
        problems |= found
    if problems:
        raise DamagedCheckpointError(_explain_damage(path, problems))


def _explain_damage(path: Path, problems: Mapping[str, str]) -> str:
    texts = []
    metadata: Metadata | None = None
    if ".metadata" not in problems:
        metadata = Reader(path).read_metadata()
    for name, problem in sorted(problems.items()):
        keys = keys_in(metadata, name) if metadata is not None else []
        keys.sort(key=lambda key: table_name(key) is None)  # tables first
        shown = f" (it holds {', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''})"
        texts.append(f"{path / name}: {problem}{shown if keys else ''}")
    older = [c.step for c in files.published(path.parent) if c.path.name < path.name]
    advice = (
        f"load_checkpoint(..., step={older[-1]}) goes back to the one before"
        if older
        else "there is no older one here: restore the files from a copy"
    )
    return "; ".join(texts) + f". Nothing was changed; {advice}"


def _read(reader: Reader, metadata: Metadata, planner: BoxLoader) -> dict[str, Any]:
    """Fills the planner's requests; returns its objects. Each rank reads what it needs itself."""
    planner.set_up_planner({}, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return planner.objects
