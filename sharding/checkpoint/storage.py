"""The parts of torch.distributed.checkpoint that stream: planners, writer and reader.

A tensor is written in blocks of rows and read in pieces of such blocks, straight from and into its
own memory: neither side ever holds a second copy of a table.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Final

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor
from torch.futures import Future

from torchrec_tpu.sharding.checkpoint.files import FileRecord
from torchrec_tpu.sparsecore.errors import DamagedCheckpointError

BLOCK_BYTES: Final = 16 << 20
"""Rows of a table are written and read in blocks of about this many bytes."""

KeyPath = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of a logical tensor that is in this process."""

    offsets: tuple[int, ...]
    tensor: Tensor  # aliases the live values


def blocks_of(value: Tensor) -> list[Block]:
    """The local parts of a tensor: of a ShardedTensor or DTensor its shards, else all of it."""
    if isinstance(value, ShardedTensor):
        return [
            Block(offsets=tuple(shard.metadata.shard_offsets), tensor=shard.tensor.detach())
            for shard in value.local_shards()
        ]
    if isinstance(value, DTensor):
        local: Any = value  # DTensor's part of DCP's protocol is not in its type
        return [
            Block(
                offsets=tuple(chunk.offsets),
                tensor=local.__get_tensor_shard__(MetadataIndex("", chunk.offsets)).detach(),
            )
            for chunk in local.__create_chunk_list__()
        ]
    return [Block(offsets=(0,) * value.dim(), tensor=value.detach())]


def _row_blocks(block: Block) -> Iterator[Block]:
    """A block cut into some of at most BLOCK_BYTES, or of one row."""
    tensor = block.tensor
    if tensor.dim() == 0:
        yield block
        return
    row_bytes = max(1, tensor[:1].nbytes)
    step = max(1, BLOCK_BYTES // row_bytes)
    for start in range(0, len(tensor), step):
        yield Block(
            offsets=(block.offsets[0] + start, *block.offsets[1:]),
            tensor=tensor[start : start + step],
        )


class BlockSaver(DefaultSavePlanner):
    """Writes tensors in blocks of rows; what several ranks have alike is written by one of them.

    Args:
        paths: key -> its place in the nested dict that other readers rebuild.
        planner_data: what else the checkpoint's metadata shall say.
    """

    def __init__(self, paths: Mapping[str, KeyPath], planner_data: Mapping[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner_data = {**paths, **planner_data}
        self._blocks: dict[MetadataIndex, Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        """One item a block."""
        items = []
        for key, value in self.state_dict.items():
            if not isinstance(value, Tensor):
                items.append(WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO))
                continue
            for block in blocks_of(value):
                for part in _row_blocks(block):
                    index = MetadataIndex(key, part.offsets)
                    self._blocks[index] = part.tensor
                    data = TensorWriteData(
                        chunk=ChunkStorageMetadata(
                            offsets=torch.Size(part.offsets), sizes=part.tensor.size()
                        ),
                        properties=TensorProperties.create_from_tensor(part.tensor),
                        size=value.size(),
                    )
                    items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Drops what is written twice, and adds `planner_data`."""
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data=self._planner_data)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The block itself, or the bytes of an object."""
        if write_item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save(self.state_dict[write_item.index.fqn], stream)
            return stream
        return _own_storage(self._blocks[write_item.index])


def _own_storage(tensor: Tensor) -> Tensor:
    """The tensor as one with a storage of just its size, which the writer does not clone.

    It would clone views of larger storages, and keep the last one of each tensor to the end.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return tensor
    array = tensor.reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(array).view(tensor.dtype).view(tensor.shape)


class _Hashing(FileSystem):
    """Hashes files while they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        with super().create_stream(path, mode) as raw:
            if mode != "wb":
                yield raw
                return
            stream = _HashingStream(raw)
            yield stream
            name = Path(path).name
            self.written[name] = FileRecord(
                name=name, num_bytes=stream.num_bytes, sha256=stream.sha256.hexdigest()
            )

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        record = self.written.pop(Path(path).name)
        self.written[Path(new_path).name] = replace(record, name=Path(new_path).name)


class _HashingStream(io.RawIOBase):
    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.sha256 = hashlib.sha256()
        self.num_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._raw.write(view)
        self.sha256.update(view)
        self.num_bytes += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        self._raw.flush()

    def fileno(self) -> int:
        self._raw.flush()  # whoever asks is going to sync
        return int(self._raw.fileno())


class Writer(FileSystemWriter):
    """DCP's writer: one synced file a rank, hashed on the way."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            path,
            single_file_per_rank=True,
            sync_files=True,
            per_thread_copy_ahead=0,  # no streams: a block at a time, and most are here already
            overwrite=False,
        )
        self.fs = self._hashing = _Hashing()

    @property
    def written(self) -> list[FileRecord]:
        """The files that this rank has written."""
        return list(self._hashing.written.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A box of a stored tensor, and the memory that shall have its values.

    Attributes:
        key: in the checkpoint.
        offsets: of the box in the stored tensor.
        target: its shape is the box's; any strides.
    """

    key: str
    offsets: tuple[int, ...]
    target: Tensor


class BoxLoader(DefaultLoadPlanner):
    """Fills boxes of memory from a checkpoint, and loads small objects."""

    def __init__(self, requests: Sequence[Request], keys: Sequence[str] = ()) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.objects: dict[str, Any] = {}
        self._requests = list(requests)
        self._keys = list(keys)
        self._targets: dict[str, Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        """Which stored blocks hold which part of which box.

        Raises:
            DamagedCheckpointError: the stored blocks leave a gap.
        """
        assert self.metadata is not None
        by_key: dict[str, list[Request]] = defaultdict(list)
        for request in self._requests:
            by_key[request.key].append(request)
        items = [_object_item(key) for key in self._keys]
        for key, requests in by_key.items():
            stored = self.metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            boxes = [
                ChunkStorageMetadata(
                    offsets=torch.Size(request.offsets), sizes=request.target.size()
                )
                for request in requests
            ]
            found = 0
            for item in create_read_items_for_chunk_list(key, stored, boxes):
                assert item.dest_index.index is not None
                target = requests[item.dest_index.index].target
                for dim, (start, length) in enumerate(
                    zip(item.dest_offsets, item.lengths, strict=True)
                ):
                    target = target.narrow(dim, start, length)
                name = str(len(items))
                self._targets[name] = target
                items.append(replace(item, dest_index=MetadataIndex(name)))
                found += target.numel()
            if found != sum(request.target.numel() for request in requests):
                raise DamagedCheckpointError(
                    f"{key!r}: the checkpoint lacks parts of it; it was not saved by all ranks"
                )
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keeps an object; nothing but plain values and tensors is unpickled."""
        self.objects[read_item.storage_index.fqn] = torch.load(value, weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The memory that an item fills."""
        return self._targets[read_item.dest_index.fqn]


def _object_item(key: str) -> ReadItem:
    nowhere = torch.Size((0,))
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(key),
        dest_offsets=nowhere,
        storage_index=MetadataIndex(key),
        storage_offsets=nowhere,
        lengths=nowhere,
    )


class Reader(FileSystemReader):
    """DCP's reader, except that a tensor is read in blocks of rows, and no further than needed."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's index of the checkpoint.

        Raises:
            DamagedCheckpointError: it is missing or unreadable.
        """
        try:
            return super().read_metadata(*args, **kwargs)
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{error.filename}: the file is missing") from error
        except (pickle.UnpicklingError, EOFError, AttributeError, ValueError) as error:
            raise DamagedCheckpointError(
                f"{Path(self.path) / '.metadata'}: unreadable ({error})"
            ) from error

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads file by file, forward."""
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self.storage_data[item.storage_index].relative_path].append(item)
        for name, items in by_file.items():
            with (Path(self.path) / name).open("rb", buffering=0) as file:
                for item in sorted(items, key=lambda i: self.storage_data[i.storage_index].offset):
                    if not self._read_item(file, item, planner):
                        super().read_data(LoadPlan([item]), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, file: IO[bytes], item: ReadItem, planner: LoadPlanner) -> bool:
        """Whether the item was read: not when it is compressed or has strides of its own."""
        info = self.storage_data[item.storage_index]
        if info.transform_descriptors or item.type == LoadItemType.BYTE_IO:
            return False
        stored = torch.load(self._slice_file(file, info), map_location="meta", weights_only=True)
        start = getattr(stored.untyped_storage(), "_checkpoint_offset", None)
        if start is None or not stored.is_contiguous():
            return False
        start += info.offset + stored.storage_offset() * stored.itemsize
        target = planner.resolve_tensor(item).detach()
        if target.dim() == 0:
            stored, target = stored.view(1), target.view(1)
            offsets, lengths = [0], [1]
        else:
            offsets, lengths = list(item.storage_offsets), list(item.lengths)
        row_bytes = stored[:1].nbytes
        step = max(1, BLOCK_BYTES // max(1, row_bytes))
        scratch = torch.empty((0,), dtype=stored.dtype)
        for done in range(0, lengths[0], step):
            count = min(step, lengths[0] - done)
            file.seek(start + (offsets[0] + done) * row_bytes)
            part = target[done : done + count]
            is_direct = (
                part.dtype == stored.dtype
                and part.device.type == "cpu"
                and part.is_contiguous()
                and part.shape[1:] == stored.shape[1:]
            )
            if not is_direct and not len(scratch):
                scratch = torch.empty(
                    (min(step, lengths[0]), *stored.shape[1:]), dtype=stored.dtype
                )
            rows = part if is_direct else scratch[:count]
            _read_into(file, rows)
            if not is_direct:
                for dim in range(1, rows.dim()):
                    rows = rows.narrow(dim, offsets[dim], lengths[dim])
                part.copy_(rows)
        planner.commit_tensor(item, target)
        return True


def _read_into(file: IO[bytes], rows: Tensor) -> None:
    if not rows.numel():
        return
    memory = rows.reshape(-1).view(torch.uint8).numpy()
    while len(memory):
        count = file.readinto(memory)  # type: ignore[attr-defined]  # raw files have it
        if not count:
            raise DamagedCheckpointError(f"{file.name}: ends {len(memory):,} bytes too early")
        memory = memory[count:]


def missing_bytes(path: Path, metadata: Metadata) -> dict[str, str]:
    """File name -> what is wrong, for files that are shorter than the index says, or absent."""
    ends: dict[str, int] = defaultdict(int)
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends[info.relative_path], info.offset + info.length)
    problems = {}
    for name, end in ends.items():
        if not (path / name).is_file():
            problems[name] = "the file is missing"
        elif (size := (path / name).stat().st_size) < end:
            problems[name] = f"cut off: {size:,} bytes of at least {end:,}"
    return problems


def keys_in(metadata: Metadata, file: str) -> list[str]:
    """What a file holds parts of."""
    return sorted(
        {index.fqn for index, info in metadata.storage_data.items() if info.relative_path == file}
    )
