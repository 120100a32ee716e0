"""What a checkpoint holds, by name: tensors, small objects, and upstream's stacked tables.

`torchrec.experimental.torch_tpu` saves stacks of tables in the order of its devices and says so in
`planner_data["sparsecore"]`. Here such a checkpoint looks like any other: by table, in rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchrec_tpu.sharding.checkpoint.storage import Request
from torchrec_tpu.sparsecore.errors import CheckpointMismatchError
from torchrec_tpu.sparsecore.layout import round_up

UPSTREAM_KEY: Final = "sparsecore"
OWN_KEY: Final = "torchrec_tpu"

_UPSTREAM_SLOTS: Final = {
    "accumulators": "momentum1",
    "momentums": "momentum1",
    "velocities": "exp_avg_sq",
}
"""Their names of optimizer state -> ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor that is stored as one."""

    key: str
    size: tuple[int, ...]

    def requests(self, offsets: tuple[int, ...], target: Tensor) -> Iterator[Request]:
        """What to read so that `target` becomes the box at `offsets`."""
        if len(self.size) == target.dim() + 1:  # row-wise state: (V, 1) in eager optimizers,
            yield Request(key=self.key, offsets=(*offsets, 0), target=target.unsqueeze(-1))
        elif len(self.size) == target.dim() - 1:  # (V,) in fused ones
            yield Request(key=self.key, offsets=offsets[:-1], target=target.squeeze(-1))
        else:
            yield Request(key=self.key, offsets=offsets, target=target)

    def fits(self, size: Sequence[int]) -> bool:
        """Whether the tensor has this size, but for a last dimension of 1."""
        return _without_trailing_one(self.size) == _without_trailing_one(tuple(size))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredInStack(Stored):
    """A table inside a stack that is stored core by core.

    Row r is row `core * rows_per_core + row_offset + r // num_cores` of the stack, with
    core = (r + rotation) mod num_cores.
    """

    num_cores: int
    rows_per_core: int  # of the stack
    row_offset: int
    rotation: int

    def requests(self, offsets: tuple[int, ...], target: Tensor) -> Iterator[Request]:
        """One strided box a core."""
        first, column = offsets
        for core in range(self.num_cores):
            residue = (core - self.rotation) % self.num_cores
            low = max(0, -(-(first - residue) // self.num_cores))  # rounded up
            high = -(-(first + len(target) - residue) // self.num_cores)
            if high > low:
                yield Request(
                    key=self.key,
                    offsets=(core * self.rows_per_core + self.row_offset + low, column),
                    target=target[residue + low * self.num_cores - first :: self.num_cores],
                )


@dataclass(frozen=True, slots=True)
class Contents:
    """Every name of a checkpoint.

    Attributes:
        tensors: name -> what is stored.
        objects: names of small values.
        stacks: names of upstream's stacks that cannot be told apart into tables.
    """

    tensors: dict[str, Stored] = field(default_factory=dict)
    objects: set[str] = field(default_factory=set)
    stacks: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, metadata: Metadata, tables: Mapping[str, tuple[int, int]]) -> Self:
        """Reads DCP's index.

        Args:
            metadata: the index.
            tables: FQN of every table of the model -> (num_embeddings, embedding_dim); only
                these are looked for in upstream's layout.

        Raises:
            CheckpointMismatchError: upstream's facts and tensors contradict each other.
        """
        contents = cls()
        for key, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                contents.tensors[key] = Stored(key=key, size=tuple(stored.size))
            else:
                contents.objects.add(key)
        planner_data = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        facts = planner_data.get(UPSTREAM_KEY)
        if isinstance(facts, Mapping) and OWN_KEY not in planner_data:
            num_cores = facts["world_size"] * facts["num_sc_per_device"]
            stacks = facts.get("stacked_configs") or {}
            contents._unstack(num_cores, stacks, tables)
        return contents

    def _unstack(
        self,
        num_cores: int,
        stacks: Mapping[str, Mapping[str, Any]],
        tables: Mapping[str, tuple[int, int]],
    ) -> None:
        """Replaces upstream's stacks by the tables in them."""
        sizes: dict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)
        for fqn, size in tables.items():
            *_, kind, table, _ = fqn.split(".")
            sizes[kind, table].add(size)
        for key, stored in list(self.tensors.items()):
            *outer, kind, stack, leaf = ("", "", *key.split("."))
            head = "".join(f"{part}." for part in outer[2:])
            if kind not in ("embedding_bags", "embeddings") or leaf != "weight":
                continue
            if stack in stacks:
                places = _places(key, stored, stacks[stack], num_cores)
            elif sizes[kind, stack]:  # alone in its stack; no name that the model lacks is one
                places = _place_alone(key, stored, stack, sizes[kind, stack], num_cores)
            else:
                self.stacks.append(key)
                continue
            del self.tensors[key]
            for table, place in places.items():
                self.tensors[f"{head}{kind}.{table}.weight"] = place
            self.tensors.pop(f"{head}learning_rates.{stack}", None)
            for theirs, slot in _UPSTREAM_SLOTS.items():
                source = f"{head}{theirs}.{stack}"
                if self.tensors.pop(source, None) is not None:
                    for table, place in places.items():
                        fqn = f"{head}{kind}.{table}.weight"
                        name = f"optimizer.state.{fqn}.{table}.{slot}"
                        self.tensors[name] = replace(place, key=source)

    def root_of(self, names: Iterable[str], *, within: str = "") -> str:
        """The prefix that all of `names` have among the stored tensors.

        Args:
            names: tensors of the model.
            within: what the names are, for the message.

        Raises:
            CheckpointMismatchError: some are missing, under any prefix; or several prefixes fit.
        """
        wanted = list(names)
        missing_by_root: dict[str, list[str]] = {}
        for name in wanted:
            if [] in missing_by_root.values():
                break
            for stored in self.tensors:
                root = stored.removesuffix(name)
                if _ends_with(stored, name) and root not in missing_by_root:
                    missing_by_root[root] = [n for n in wanted if root + n not in self.tensors]
        fitting = [root for root, missing in missing_by_root.items() if not missing]
        if len(fitting) == 1 or "model." in fitting:
            return "model." if "model." in fitting else fitting[0]
        if fitting:
            raise CheckpointMismatchError(
                f"the checkpoint holds several such models, under {sorted(fitting)}; load into the "
                "whole model that was saved"
            )
        best = min(missing_by_root, key=lambda root: len(missing_by_root[root]), default="")
        raise CheckpointMismatchError(self._explain(wanted, best, within))

    def _explain(self, wanted: Sequence[str], root: str, within: str) -> str:
        missing = [name for name in wanted if root + name not in self.tensors]
        unused = [
            name.removeprefix(root)
            for name in self.tensors
            if name.startswith(root) and name.removeprefix(root) not in wanted
        ]
        text = f"{within}: the checkpoint lacks {some(missing)}"
        if unused:
            text += f"; it has {some(unused)}, which the model lacks: renamed?"
        if self.stacks:
            text += (
                f". {some(self.stacks)} look like stacks of torch_tpu, saved without "
                "stacked_configs, so the tables in them cannot be told apart: save again with "
                "SparseCoreSavePlanner(stacked_configs=...)"
            )
        return text


def _places(
    key: str, stored: Stored, config: Mapping[str, Any], num_cores: int
) -> dict[str, StoredInStack]:
    rows = stored.size[0]
    if rows % num_cores or rows != config["stack_num_embeddings"]:
        raise CheckpointMismatchError(
            f"{key!r}: {rows:,} rows are stored, its stacked_configs say "
            f"{config['stack_num_embeddings']:,} on {num_cores} cores"
        )
    return {
        table["name"]: StoredInStack(
            key=key,
            size=(table["num_embeddings"], table["embedding_dim"]),
            num_cores=num_cores,
            rows_per_core=rows // num_cores,
            row_offset=config["row_offsets_in_shard"][table["name"]],
            rotation=config["shard_rotations"][table["name"]] % num_cores,
        )
        for table in config["tables"]
    }


def _place_alone(
    key: str, stored: Stored, table: str, sizes: set[tuple[int, int]], num_cores: int
) -> dict[str, StoredInStack]:
    rows, dim = stored.size
    for size in sizes:
        if (round_up(size[0], 8 * num_cores), round_up(size[1], 8)) == (rows, dim):
            place = StoredInStack(
                key=key,
                size=size,
                num_cores=num_cores,
                rows_per_core=rows // num_cores,
                row_offset=0,
                rotation=0,
            )
            return {table: place}
    raise CheckpointMismatchError(
        f"table {table!r}: the checkpoint of torch_tpu has {rows:,} x {dim} for it on {num_cores} "
        f"cores, which is not the model's {sorted(sizes)} padded: a table of another size, or a "
        "stack that was saved without stacked_configs"
    )


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _without_trailing_one(size: tuple[int, ...]) -> tuple[int, ...]:
    return size[:-1] if len(size) > 1 and size[-1] == 1 else size


def some(names: Sequence[str], limit: int = 4) -> str:
    """A few names, and how many more there are."""
    shown = ", ".join(map(repr, names[:limit]))
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")


def dtype_of(metadata: Metadata, key: str) -> torch.dtype:
    """Of a stored tensor."""
    stored = metadata.state_dict_metadata[key]
    assert isinstance(stored, TensorStorageMetadata)
    return stored.properties.dtype
