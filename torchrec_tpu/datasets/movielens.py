"""MovieLens-100k from the installed recbole wheel or from a folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from torchrec_tpu.datasets.stream import (
    Bags,
    DataFormatError,
    DataNotFoundError,
    FloatArray,
    InMemory,
    IntArray,
)

_HOW_TO_GET = (
    "install the wheel that carries the data, `pip install --no-deps recbole==1.2.1`, or pass the "
    "folder of a copy that you have (GroupLens: https://grouplens.org/datasets/movielens/100k/)"
)

_GENRES = [
    "unknown",
    "Action",
    "Adventure",
    "Animation",
    "Children's",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Film-Noir",
    "Horror",
    "Musical",
    "Mystery",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "War",
    "Western",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ratings:
    """The three tables of MovieLens-100k; users and items are indexed by their 1-based number."""

    user_N: IntArray
    item_N: IntArray
    rating_N: IntArray
    timestamp_N: IntArray  # seconds since 1970, UTC
    age: Mapping[int, int]
    gender: Mapping[int, str]
    occupation: Mapping[int, str]
    year: Mapping[int, int | None]  # release year of an item
    genres: Mapping[int, Sequence[str]]


def ml_100k(
    path: str | Path | None = None,
    *,
    batch_size: int = 512,
    seed: int = 0,
    split: Literal["random", "time"] = "random",
    test_fraction: float = 0.2,
) -> tuple[InMemory, InMemory]:
    """MovieLens-100k as (train, test) streams; label = rating >= 4.

    Sparse features (rows): user (944), item (1683), age (decade, 8), gender (2), occupation (21),
    and genres (19), a bag of one or more ids meant for MEAN pooling. Dense features, standardized
    with the mean and deviation of the train split: age, release year, hour (sine, cosine) and
    weekday (sine, cosine) of the rating, number of genres, and log(1 + other train ratings) of the
    user and of the item. A rating's own row is left out of its counts, and no label enters a
    feature.

    Args:
        path: folder with recbole's `ml-100k.inter/.user/.item` or GroupLens' `u.data/.user/.item`;
            None reads the installed recbole wheel (without importing it).
        batch_size: samples of a batch, in both streams.
        seed: of the split and of the epochs' order.
        split: "random", or "time": the newest ratings are the test split.
        test_fraction: share of the ratings that is held out.

    Raises:
        DataNotFoundError: no such files; says how to get them.
        DataFormatError: a line that is not in the format.
    """
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction={test_fraction}: must be between 0 and 1")
    ratings = _read(_find(path))
    num = len(ratings.user_N)
    if split == "time":
        order = np.argsort(ratings.timestamp_N, kind="stable")
    elif split == "random":
        order = np.random.default_rng([seed, 0x5917]).permutation(num)
    else:
        raise ValueError(f'split={split!r}: must be "random" or "time"')
    num_train = num - round(num * test_fraction)
    train_rows, test_rows = np.sort(order[:num_train]), np.sort(order[num_train:])

    dense_ND = _dense(ratings, train_rows)
    bags = _bags(ratings)
    labels_N = (ratings.rating_N >= 4).astype(np.float32)

    def stream(rows: IntArray, *, shuffle: bool) -> InMemory:
        taken = {}
        for key, column in bags.items():
            values, lengths = column.take(rows)
            offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            taken[key] = Bags(values=values, offsets=None if column.offsets is None else offsets)
        return InMemory(
            dense_ND[rows], taken, labels_N[rows], batch_size=batch_size, seed=seed, shuffle=shuffle
        )

    return stream(train_rows, shuffle=True), stream(test_rows, shuffle=False)


def _find(path: str | Path | None) -> Path:
    if path is not None:
        folder = Path(path)
        if any((folder / name).is_file() for name in ("ml-100k.inter", "u.data")):
            return folder
        raise DataNotFoundError(
            f"{folder}: neither ml-100k.inter nor u.data is in this folder; {_HOW_TO_GET}"
        )
    spec = importlib.util.find_spec("recbole")  # importing recbole needs its whole world
    for root in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(root) / "dataset_example" / "ml-100k"
        if (folder / "ml-100k.inter").is_file():
            return folder
    raise DataNotFoundError(f"MovieLens-100k is not installed: {_HOW_TO_GET}")


def _read(folder: Path) -> _Ratings:
    """The three tables, in recbole's or in GroupLens' format."""
    if (folder / "ml-100k.inter").is_file():
        events = _Table(folder / "ml-100k.inter", separator="\t", num_fields=4, has_header=True)
        users = _Table(folder / "ml-100k.user", separator="\t", num_fields=5, has_header=True)
        items = _Table(folder / "ml-100k.item", separator="\t", num_fields=4, has_header=True)
        genres = [text.split() for text in items.column(3)]
        years = items.column(2)
    else:
        events = _Table(folder / "u.data", separator="\t", num_fields=4)
        users = _Table(folder / "u.user", separator="|", num_fields=5)
        items = _Table(folder / "u.item", separator="|", num_fields=24)
        genres = [
            [name for name, flag in zip(_GENRES, fields[5:], strict=True) if flag == "1"]
            for fields in items.rows
        ]
        years = [date[-4:] for date in items.column(2)]  # 01-Jan-1995, or nothing
    for index, (item, names) in enumerate(zip(items.column(0), genres, strict=True)):
        if unknown := set(names) - set(_GENRES):
            raise items.error(index, "genres", f"item {item} has unknown genres {sorted(unknown)}")

    user_ids = users.integers(0, "user_id")
    item_ids = items.integers(0, "item_id")
    user_N = events.integers(0, "user_id")
    item_N = events.integers(1, "item_id")
    for name, ids_N, known in (("user", user_N, user_ids), ("item", item_N, item_ids)):
        unknown_N = np.flatnonzero(~np.isin(ids_N, known))
        if len(unknown_N):
            problem = f"{ids_N[unknown_N[0]]} is not in the table of {name}s"
            raise events.error(int(unknown_N[0]), f"{name}_id", problem)
    return _Ratings(
        user_N=user_N,
        item_N=item_N,
        rating_N=events.integers(2, "rating"),
        timestamp_N=events.integers(3, "timestamp"),
        age=dict(zip(user_ids.tolist(), users.integers(1, "age").tolist(), strict=True)),
        gender=dict(zip(user_ids.tolist(), users.column(2), strict=True)),
        occupation=dict(zip(user_ids.tolist(), users.column(3), strict=True)),
        year={
            item: int(year) if year.isdigit() else None
            for item, year in zip(item_ids.tolist(), years, strict=True)
        },
        genres=dict(zip(item_ids.tolist(), genres, strict=True)),
    )


class _Table:
    """A small text table; knows the line of every row, for errors."""

    def __init__(
        self, file: Path, *, separator: str, num_fields: int, has_header: bool = False
    ) -> None:
        if not file.is_file():
            raise DataNotFoundError(f"{file} is missing; {_HOW_TO_GET}")
        self.file = file
        self.line_numbers: list[int] = []
        self.rows: list[list[str]] = []
        text = file.read_text("utf-8" if has_header else "latin-1")
        for number, line in enumerate(text.split("\n"), start=1):
            if not line or (has_header and number == 1):
                continue
            fields = line.rstrip("\r").split(separator)
            if len(fields) != num_fields:
                problem = f"{len(fields)} fields, expected {num_fields}"
                raise DataFormatError(file, number, "", problem)
            self.line_numbers.append(number)
            self.rows.append(fields)

    def column(self, index: int) -> list[str]:
        return [fields[index] for fields in self.rows]

    def integers(self, index: int, name: str) -> IntArray:
        column = self.column(index)
        try:
            return np.array(column).astype(np.int64)
        except ValueError:
            row = next(i for i, text in enumerate(column) if not text.lstrip("-").isdigit())
            raise self.error(row, name, f"{column[row]!r} is no whole number") from None

    def error(self, row: int, column: str, problem: str) -> DataFormatError:
        return DataFormatError(self.file, self.line_numbers[row], column, problem)


def _lookup(values: Mapping[int, int], ids_N: IntArray) -> IntArray:
    ids, index_N = np.unique(ids_N, return_inverse=True)
    return np.array([values[number] for number in ids.tolist()], np.int64)[index_N]


def _bags(ratings: _Ratings) -> dict[str, Bags]:
    def single(ids_N: IntArray) -> Bags:
        return Bags(values=ids_N.astype(np.int32))

    def per_user(names: Mapping[int, str]) -> Bags:
        rows = {name: row for row, name in enumerate(sorted(set(names.values())))}
        return single(_lookup({user: rows[name] for user, name in names.items()}, ratings.user_N))

    # The genres of every item laid end to end; a rating takes the bag of its item.
    lists = [ratings.genres.get(item, ()) for item in range(max(ratings.genres) + 1)]
    item_bags = Bags(
        values=np.array([_GENRES.index(name) for names in lists for name in names], np.int32),
        offsets=np.cumsum([0, *map(len, lists)], dtype=np.int64),
    )
    genres, lengths_N = item_bags.take(ratings.item_N)
    return {
        "user": single(ratings.user_N),
        "item": single(ratings.item_N),
        "age": single(np.minimum(_lookup(ratings.age, ratings.user_N) // 10, 7)),
        "gender": per_user(ratings.gender),
        "occupation": per_user(ratings.occupation),
        "genres": Bags(values=genres, offsets=np.cumsum([0, *lengths_N], dtype=np.int64)),
    }


def _dense(ratings: _Ratings, train_rows: IntArray) -> FloatArray:
    """(N, 9) float32, standardized on the train split."""
    in_train_N = np.zeros(len(ratings.user_N), np.int64)
    in_train_N[train_rows] = 1

    def log_others(ids_N: IntArray) -> npt.NDArray[np.float64]:
        counts_N = np.bincount(ids_N, weights=in_train_N)[ids_N]
        return np.asarray(np.log1p(counts_N - in_train_N), np.float64)  # without the rating itself

    known_years = [year for year in ratings.year.values() if year is not None]
    median_year = int(np.median(known_years)) if known_years else 0
    years = {item: median_year if year is None else year for item, year in ratings.year.items()}
    num_genres = {item: len(names) for item, names in ratings.genres.items()}
    hour_angle_N = ratings.timestamp_N % 86_400 * (2 * np.pi / 86_400)
    week_angle_N = ratings.timestamp_N % 604_800 * (2 * np.pi / 604_800)
    dense_ND = np.stack(
        (
            _lookup(ratings.age, ratings.user_N).astype(np.float64),
            _lookup(years, ratings.item_N),
            np.sin(hour_angle_N),
            np.cos(hour_angle_N),
            np.sin(week_angle_N),
            np.cos(week_angle_N),
            _lookup(num_genres, ratings.item_N),
            log_others(ratings.user_N),
            log_others(ratings.item_N),
        ),
        axis=1,
    )
    train_ND = dense_ND[train_rows]
    deviation_D = train_ND.std(axis=0)
    deviation_D[deviation_D == 0] = 1
    return np.asarray((dense_ND - train_ND.mean(axis=0)) / deviation_D, np.float32)
