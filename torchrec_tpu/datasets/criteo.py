"""Criteo display-advertising files, streamed in bounded memory.

Shapes: N lines, C columns, F = 26 categorical features, D = 13 dense features.
"""

from __future__ import annotations

import contextlib
import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import IO, Literal, cast

import numpy as np
import numpy.typing as npt
from torchrec.datasets.utils import Batch

from torchrec_tpu.datasets.stream import (
    BatchStream,
    DataFormatError,
    DataNotFoundError,
    FloatArray,
    IntArray,
    hash_to_row,
    make_batch,
    mix,
)

CRITEO_DENSE_KEYS = tuple(f"I{i}" for i in range(1, 14))
CRITEO_KEYS = tuple(f"C{i}" for i in range(1, 27))
_CRITEO_COLUMNS = ("label", *CRITEO_DENSE_KEYS, *CRITEO_KEYS)
_CHUNK_BYTES = 4 << 20
_MAX_LINE_BYTES = 1 << 20  # real lines have a few hundred


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Parsed lines."""

    labels_N: FloatArray
    dense_ND: FloatArray  # log(x + 3), a blank counts as 0
    values_NF: IntArray  # the hexadecimal value, -1 for a blank

    def __len__(self) -> int:
        return len(self.labels_N)

    def take(self, index: IntArray | slice | npt.NDArray[np.bool_]) -> _Rows:
        return _Rows(
            labels_N=self.labels_N[index],
            dense_ND=self.dense_ND[index],
            values_NF=self.values_NF[index],
        )


class CriteoFile(BatchStream):
    """A Criteo display-advertising file: TSV without header or CSV with one, plain or .gz.

    A line is a 0/1 label, 13 numbers and 26 hexadecimal categories. Blank numbers count as 0, then
    every number x becomes log(x + 3) (the data's smallest is -2). Categories become table rows by
    `hash_to_row`; a blank has row 0 to itself.

    The file is streamed. Shuffling happens inside windows of `window_batches` batches, with a new
    permutation every epoch; one window bounds the memory. Starting in the middle of an epoch reads
    the lines before it without parsing them.

    Args:
        path: the file.
        num_embeddings: rows of the 26 tables, or one number for all.
        batch_size: samples of a batch; the last batch of an epoch may be smaller.
        seed: of the order, and of the split.
        shuffle: reorder the lines inside a window.
        split: "all", or "train" / "test": a line belongs to the test split when a hash of its line
            number and the seed falls under `test_fraction`.
        test_fraction: expected share of the test split.
        window_batches: batches of one shuffle window.

    Attributes:
        num_lookups: (26,) int64, categories seen that are not blank, since this object was made.
        num_collisions: (26,) int64, those of them whose row was first taken by another value.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        num_embeddings: int | Sequence[int],
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        split: Literal["all", "train", "test"] = "all",
        test_fraction: float = 0.1,
        window_batches: int = 64,
    ) -> None:
        super().__init__(batch_size=batch_size, seed=seed)
        self.path = Path(path)
        if not self.path.is_file():
            raise DataNotFoundError(f"{self.path}: no such file; pass a Criteo TSV or CSV file")
        rows = [num_embeddings] * 26 if isinstance(num_embeddings, int) else list(num_embeddings)
        if len(rows) != len(CRITEO_KEYS) or not 1 <= min(rows) <= max(rows) < 2**31:
            raise ValueError(f"num_embeddings: need 26 numbers from 1 to 2^31 - 1, got {rows}")
        if split not in ("all", "train", "test"):
            raise ValueError(f'split={split!r}: must be "all", "train" or "test"')
        self.num_embeddings = tuple(rows)
        self.shuffle = shuffle
        self.split = split
        self.test_fraction = test_fraction
        self.window_batches = window_batches
        self.num_lookups = np.zeros(26, np.int64)
        self.num_collisions = np.zeros(26, np.int64)
        # The value that first took each row, plus one; zeros are not paged in until touched.
        self._owners = [np.zeros(num, np.int64) for num in rows]

    @property
    def keys(self) -> tuple[str, ...]:
        """KJT keys, in order."""
        return CRITEO_KEYS

    @property
    def num_dense(self) -> int:
        """Width D of `dense_features`."""
        return len(CRITEO_DENSE_KEYS)

    def batches(self, epoch: int, *, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from batch `start` on."""
        first_window, first_batch = divmod(start, self.window_batches)
        window_rows = self.window_batches * self.batch_size
        for number, window in enumerate(
            self._windows(window_rows, skip_rows=first_window * window_rows), start=first_window
        ):
            rows = window
            if self.shuffle:
                rng = np.random.default_rng([self.seed, epoch, number])
                rows = window.take(rng.permutation(len(window)))
            skip = first_batch if number == first_window else 0
            for first in range(skip * self.batch_size, len(rows), self.batch_size):
                yield self._to_batch(rows.take(slice(first, first + self.batch_size)))

    def _to_batch(self, rows: _Rows) -> Batch:
        ids_FB = np.empty((26, len(rows)), np.int32)
        for feature, (num, owner) in enumerate(zip(self.num_embeddings, self._owners, strict=True)):
            values = rows.values_NF[:, feature]
            ids_FB[feature] = hash_to_row(values, num_embeddings=num)
            present = values >= 0
            ids, tags = ids_FB[feature][present], values[present] + 1
            free = np.flatnonzero(owner[ids] == 0)
            owner[ids[free[::-1]]] = tags[free[::-1]]  # reversed: the first of equal ids stays
            self.num_lookups[feature] += len(ids)
            self.num_collisions[feature] += np.count_nonzero(owner[ids] != tags)
        return make_batch(
            rows.dense_ND,
            CRITEO_KEYS,
            ids_FB.reshape(-1),
            np.ones(ids_FB.size, np.int32),
            rows.labels_N,
        )

    def _windows(self, window_rows: int, *, skip_rows: int) -> Iterator[_Rows]:
        """The split's lines in file order, `window_rows` at a time, after `skip_rows` of them."""
        pending: list[_Rows] = []
        num_pending = 0
        for rows in self._parsed(skip_rows):
            pending.append(rows)
            num_pending += len(rows)
            while num_pending >= window_rows:
                joined = _join(pending)
                yield joined.take(slice(window_rows))
                pending = [joined.take(slice(window_rows, None))]
                num_pending -= window_rows
        if num_pending:
            yield _join(pending)

    def _parsed(self, skip_rows: int) -> Iterator[_Rows]:
        with _open(self.path) as file:
            with self._reading(1):
                head = file.readline(_MAX_LINE_BYTES)
            separator = b"\t" if b"\t" in head else b","
            has_header = head.split(separator)[0].strip().lower() == b"label"
            if has_header:
                self._check_header(head.strip().split(separator))
            line = 2 if has_header else 1  # number of the next line
            row = 0  # 0-based number of the next data line, over all splits
            rest = b"" if has_header else head
            while True:
                with self._reading(line):
                    chunk = file.read(_CHUNK_BYTES)
                text = rest + chunk
                if not text:
                    return
                if chunk:
                    end = text.rfind(b"\n") + 1
                    text, rest = text[:end], text[end:]
                else:
                    text, rest = text.rstrip(b"\r\n") + b"\n", b""
                    if text == b"\n":
                        return
                if len(rest) > _MAX_LINE_BYTES:
                    problem = f"no end of line in {len(rest):,} bytes; is this a Criteo file?"
                    raise DataFormatError(self.path, line + text.count(b"\n"), "", problem)
                if not text:
                    continue
                num_lines = text.count(b"\n")
                wanted = self._in_split(np.arange(row, row + num_lines, dtype=np.uint64))
                num_wanted = int(np.count_nonzero(wanted))
                if skip_rows >= num_wanted:
                    skip_rows -= num_wanted
                else:
                    rows = parse_criteo(text, separator=separator, file=self.path, line=line)
                    yield rows.take(np.flatnonzero(wanted)[skip_rows:])
                    skip_rows = 0
                line += num_lines
                row += num_lines
                if not chunk:
                    return

    @contextlib.contextmanager
    def _reading(self, line: int) -> Iterator[None]:
        try:
            yield
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            problem = f"the compressed data is damaged from here on: {error}"
            raise DataFormatError(self.path, line, "", problem) from None

    def _check_header(self, names: Sequence[bytes]) -> None:
        for found, wanted in zip_longest(names, _CRITEO_COLUMNS, fillvalue=""):
            name = found.decode("latin-1").strip() if isinstance(found, bytes) else found
            if name.lower() != wanted.lower():
                problem = (
                    f"the header has {name!r} in place of {wanted!r}; expected are label, I1..I13, "
                    "C1..C26, in this order"
                )
                raise DataFormatError(self.path, 1, wanted, problem)

    def _in_split(self, row_N: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        if self.split == "all":
            return np.ones(len(row_N), np.bool_)
        salt = np.random.SeedSequence(self.seed).generate_state(1, np.uint64)
        is_test = mix(row_N ^ salt) < np.uint64(min(self.test_fraction, 1) * (2**64 - 2048))
        return is_test if self.split == "test" else ~is_test


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    return cast("IO[bytes]", gzip.open(path, "rb") if compressed else path.open("rb"))


def _join(parts: Sequence[_Rows]) -> _Rows:
    return _Rows(
        labels_N=np.concatenate([part.labels_N for part in parts]),
        dense_ND=np.concatenate([part.dense_ND for part in parts]),
        values_NF=np.concatenate([part.values_NF for part in parts]),
    )


def parse_criteo(text: bytes, *, separator: bytes, file: str | Path, line: int) -> _Rows:
    """Whole lines of a Criteo file, each ending in a newline, as arrays.

    All fields are read together: each becomes the 8 bytes that end it, and the digits of those
    words are combined in parallel.

    Args:
        text: the lines.
        separator: tab or comma, one byte.
        file: named in errors.
        line: number of the first line, named in errors.

    Raises:
        DataFormatError: names file, line and column.
    """
    # Eight bytes in front, so that the word that ends any field starts inside the array.
    data = np.frombuffer(b"\0" * 8 + text, np.uint8)
    newlines = np.flatnonzero(data == 10)
    breaks = np.flatnonzero((data == separator[0]) | (data == 10))
    per_line = np.diff(np.searchsorted(breaks, newlines), prepend=-1)
    wrong = np.flatnonzero(per_line != len(_CRITEO_COLUMNS))
    if len(wrong):
        problem = (
            f"{per_line[wrong[0]]} fields, expected {len(_CRITEO_COLUMNS)}: a label, 13 numbers, "
            "26 categories"
        )
        if per_line[wrong[0]] == len(_CRITEO_COLUMNS) - 1:
            problem += " (a test file without labels?)"
        raise DataFormatError(file, line + int(wrong[0]), "", problem)
    ends = breaks.reshape(-1, len(_CRITEO_COLUMNS)).copy()
    starts = np.concatenate([[8], breaks[:-1] + 1]).reshape(ends.shape)
    ends[:, -1] -= data[ends[:, -1] - 1] == 13  # \r\n

    def fail(where_NC: npt.NDArray[np.bool_], first_column: int, problem: str) -> None:
        row, column = (int(axis[0]) for axis in np.nonzero(where_NC))
        column += first_column
        value = data[starts[row, column] : ends[row, column]].tobytes().decode("latin-1")
        name = _CRITEO_COLUMNS[column]
        raise DataFormatError(file, line + row, name, f"{value!r} {problem}")

    numbers_NC, is_number = _parse_decimal(data, starts[:, :14], ends[:, :14])
    if not is_number.all():
        fail(~is_number, 0, "is no number")
    labels_N = numbers_NC[:, 0]
    bad_label = (starts[:, 0] == ends[:, 0]) | ((labels_N != 0) & (labels_N != 1))
    if bad_label.any():
        fail(bad_label[:, None], 0, "is no label, expected 0 or 1")
    if (numbers_NC[:, 1:] <= -3).any():
        fail(numbers_NC[:, 1:] <= -3, 1, "has no log(x + 3), the smallest value of the data is -2")
    values_NF, is_hex = _parse_hex(data, starts[:, 14:], ends[:, 14:])
    if not is_hex.all():
        fail(~is_hex, 14, "is no hexadecimal number of at most 8 digits")
    return _Rows(
        labels_N=labels_N.astype(np.float32),
        dense_ND=np.log(numbers_NC[:, 1:] + 3).astype(np.float32),
        values_NF=values_NF,
    )


def _last_words(
    data: npt.NDArray[np.uint8], ends: IntArray, lengths: IntArray
) -> npt.NDArray[np.uint64]:
    """The 8 bytes before each end, first byte lowest; those before the field become "0"."""
    windows = np.ndarray((len(data) - 7,), np.dtype("<u8"), data, strides=(1,))
    words = windows[ends - 8]
    pad_bits = (8 * np.clip(8 - lengths, 0, 8)).astype(np.uint64)
    all_bits, zeros = np.uint64(0xFFFF_FFFF_FFFF_FFFF), np.uint64(0x3030_3030_3030_3030)
    full = pad_bits == 64  # a shift by 64 is not defined
    pad = np.where(full, all_bits, ~(all_bits << (pad_bits & np.uint64(63))))
    return cast("npt.NDArray[np.uint64]", (words & ~pad) | (zeros & pad))


def _parse_decimal(
    data: npt.NDArray[np.uint8], starts: IntArray, ends: IntArray
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Decimal fields of any shape; blank is 0. Returns (values, which are numbers)."""
    negative = (data[starts] == ord("-")) & (ends > starts)
    lengths = ends - starts - negative
    words = _last_words(data, ends, lengths)
    u64 = np.uint64
    digits = words ^ u64(0x3030_3030_3030_3030)
    # A byte is 0..9 exactly when neither it nor it + 6 reaches the high nibble.
    high = u64(0xF0F0_F0F0_F0F0_F0F0)
    plain = ((digits | (digits + u64(0x0606_0606_0606_0606))) & high) == 0
    plain &= (lengths <= 8) & ((lengths > 0) | ~negative)
    digits = (digits * u64(10) + (digits >> u64(8))) & u64(0x00FF_00FF_00FF_00FF)
    digits = (digits * u64(100) + (digits >> u64(16))) & u64(0x0000_FFFF_0000_FFFF)
    digits = (digits * u64(10_000) + (digits >> u64(32))) & u64(0xFFFF_FFFF)
    values = np.where(negative, -digits.astype(np.float64), digits.astype(np.float64))
    # Fractions, exponents and long numbers are rare or short: one by one.
    for index in zip(*np.nonzero(~plain), strict=True):
        field = data[starts[index] : ends[index]].tobytes()
        try:
            values[index] = float(field)
        except ValueError:
            continue
        plain[index] = bool(np.isfinite(values[index])) and b"_" not in field
    return values, plain


_IS_HEX = np.zeros(256, np.bool_)
_IS_HEX[np.frombuffer(b"0123456789abcdefABCDEF", np.uint8)] = True


def _parse_hex(
    data: npt.NDArray[np.uint8], starts: IntArray, ends: IntArray
) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Hexadecimal fields of at most 8 digits; blank is -1. Returns (values, which are valid)."""
    lengths = ends - starts
    words = _last_words(data, ends, lengths)
    u64 = np.uint64
    valid = _IS_HEX[np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 8)].all(
        axis=-1
    )
    valid &= lengths <= 8
    letters = (words >> u64(6)) & u64(0x0101_0101_0101_0101)
    digits = (words & u64(0x0F0F_0F0F_0F0F_0F0F)) + letters * u64(9)
    digits = ((digits << u64(4)) | (digits >> u64(8))) & u64(0x00FF_00FF_00FF_00FF)
    digits = ((digits << u64(8)) | (digits >> u64(16))) & u64(0x0000_FFFF_0000_FFFF)
    digits = ((digits << u64(16)) | (digits >> u64(32))) & u64(0xFFFF_FFFF)
    return np.where(lengths == 0, -1, digits.astype(np.int64)), valid
