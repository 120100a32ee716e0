"""Data sets: what is read, in which order, and what is refused."""

import itertools
import tracemalloc
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from criteo_format import criteo_lines, write_criteo
from hypothesis import given
from hypothesis import strategies as st
from torchrec.datasets.utils import Batch

from torchrec_tpu.datasets import (
    CRITEO_KEYS,
    Bags,
    BatchStream,
    CriteoFile,
    DataFormatError,
    DataNotFoundError,
    InMemory,
    MultiHot,
    Synthetic,
    hash_to_row,
    ml_100k,
    part_of,
)
from torchrec_tpu.sparsecore.errors import StateDictError


def tensors(batch: Batch) -> list[torch.Tensor]:
    kjt = batch.sparse_features
    return [batch.dense_features, kjt.values(), kjt.lengths(), batch.labels]


def same(a: list[Batch], b: list[Batch]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y)
        for one, other in zip(a, b, strict=True)
        for x, y in zip(tensors(one), tensors(other), strict=True)
    )


# ------------------------------------------------------------------------------------------ Criteo


def slowly(line: str, separator: str = "\t") -> tuple[float, list[float], list[int]]:
    """What a line means, one field at a time."""
    label, *rest = line.split(separator)
    dense = [np.log(np.float64(x or 0) + 3).astype(np.float32) for x in rest[:13]]
    categories = [int(x, 16) if x else -1 for x in rest[13:]]
    return float(label), dense, categories


def read_all(file: CriteoFile) -> tuple[list[float], np.ndarray, np.ndarray]:
    batches = list(file.batches(0))
    labels = torch.cat([batch.labels for batch in batches]).tolist()
    dense = torch.cat([batch.dense_features for batch in batches]).numpy()
    ids = [
        np.stack([batch.sparse_features[key].values().numpy() for key in CRITEO_KEYS], axis=1)
        for batch in batches
    ]
    return labels, dense, np.concatenate(ids)


@pytest.mark.parametrize(
    ("name", "separator", "header"),
    [("a.tsv", "\t", False), ("a.csv", ",", True), ("a.gz", "\t", False)],
)
def test_criteo_reads_what_a_field_by_field_reader_reads(
    tmp_path: Path, name: str, separator: str, header: bool
) -> None:
    lines = criteo_lines(100, separator=separator)
    path = write_criteo(tmp_path / name, lines, header=header)
    labels, dense, ids = read_all(
        CriteoFile(path, num_embeddings=1000, batch_size=32, shuffle=False)
    )
    expected = [slowly(line, separator) for line in lines]
    assert labels == [label for label, _, _ in expected]
    np.testing.assert_array_equal(dense, [row for _, row, _ in expected])
    values = np.array([row for _, _, row in expected])
    rows = hash_to_row(values.reshape(-1), num_embeddings=1000).reshape(values.shape)
    np.testing.assert_array_equal(ids, rows)
    assert (ids[values < 0] == 0).all()
    assert (ids[values >= 0] > 0).all()


@given(
    number=st.one_of(
        st.integers(-2, 10**15).map(str),
        st.floats(-2.9, 1e30, allow_nan=False).map(repr),
        st.sampled_from(["", "0.0", "-1", "-0", "007", "+5", "1e3", "12345678", "123456789"]),
    ),
    category=st.text("0123456789abcdefABCDEF", max_size=8),
)
def test_criteo_fields_mean_what_python_makes_of_them(
    tmp_path_factory: pytest.TempPathFactory, number: str, category: str
) -> None:
    path = tmp_path_factory.mktemp("criteo") / "one.tsv"
    line = "\t".join(["1", number, *["0"] * 12, category, *["ff"] * 25])
    write_criteo(path, [line])
    _, dense, ids = read_all(CriteoFile(path, num_embeddings=10**6, batch_size=1))
    assert dense[0, 0] == np.float32(np.log(float(number or 0) + 3))
    value = np.array([int(category, 16) if category else -1])
    assert ids[0, 0] == hash_to_row(value, num_embeddings=10**6)[0]


@pytest.mark.parametrize(
    ("column", "text", "name", "problem"),
    [
        (0, "2", "label", "is no label"),
        (0, "", "label", "is no label"),
        (3, "abc", "I3", "is no number"),
        (3, "-", "I3", "is no number"),
        (3, "nan", "I3", "is no number"),
        (3, "1_000", "I3", "is no number"),
        (13, "-3", "I13", "has no log"),
        (14, "12345678g", "C1", "is no hexadecimal"),
        (39, "123456789", "C26", "is no hexadecimal"),
        (39, "-1", "C26", "is no hexadecimal"),
        (39, "68fd\u00e9", "C26", "is no hexadecimal"),
    ],
)
def test_criteo_names_file_line_and_column_of_a_bad_field(
    tmp_path: Path, column: int, text: str, name: str, problem: str
) -> None:
    lines = criteo_lines(7)
    fields = lines[4].split("\t")
    fields[column] = text
    lines[4] = "\t".join(fields)
    path = write_criteo(tmp_path / "bad.tsv", lines)
    with pytest.raises(DataFormatError, match=problem) as caught:
        list(CriteoFile(path, num_embeddings=10, batch_size=2).batches(0))
    assert (caught.value.file, caught.value.line, caught.value.column) == (str(path), 5, name)


@pytest.mark.parametrize("num_fields", [1, 39, 41])
def test_criteo_names_the_line_with_too_few_or_too_many_fields(
    tmp_path: Path, num_fields: int
) -> None:
    lines = criteo_lines(5, separator=",")
    lines[2] = ",".join((lines[2].split(",") * 2)[:num_fields])
    path = write_criteo(tmp_path / "bad.csv", lines, header=True)
    with pytest.raises(DataFormatError, match=f"line 4: {num_fields} fields, expected 40"):
        list(CriteoFile(path, num_embeddings=10, batch_size=2).batches(0))


def test_criteo_reads_windows_line_ends_and_a_last_line_without_end(tmp_path: Path) -> None:
    lines = criteo_lines(9)
    plain = write_criteo(tmp_path / "a.tsv", lines)
    other = tmp_path / "b.tsv"
    other.write_bytes("\r\n".join(lines).encode())
    one, two = (
        list(CriteoFile(path, num_embeddings=99, batch_size=4).batches(0))
        for path in (plain, other)
    )
    assert same(one, two)


@pytest.mark.parametrize(
    ("change", "column"),
    [
        (lambda names: [names[0], names[2], names[1], *names[3:]], "I1"),
        (lambda names: names[:-1], "C26"),
        (lambda names: [*names, "C27"], ""),
    ],
)
def test_criteo_refuses_a_header_in_another_order(tmp_path: Path, change, column: str) -> None:
    names = ["label", *(f"I{i}" for i in range(1, 14)), *CRITEO_KEYS]
    path = write_criteo(
        tmp_path / "a.csv", [",".join(change(names)), *criteo_lines(2, separator=",")]
    )
    with pytest.raises(DataFormatError, match="the header has") as caught:
        list(CriteoFile(path, num_embeddings=10, batch_size=2).batches(0))
    assert (caught.value.line, caught.value.column) == (1, column)


def test_criteo_damaged_gzip_is_a_typed_error(tmp_path: Path) -> None:
    path = write_criteo(tmp_path / "a.gz", criteo_lines(500))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataFormatError, match="compressed data is damaged"):
        list(CriteoFile(path, num_embeddings=10, batch_size=2).batches(0))
    broken = bytearray(whole)
    broken[len(whole) // 2] ^= 255
    path.write_bytes(broken)
    with pytest.raises(DataFormatError):
        list(CriteoFile(path, num_embeddings=10, batch_size=2).batches(0))


def test_criteo_refuses_a_file_without_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "image.raw"
    path.write_bytes(b"\0" * (6 << 20))
    with pytest.raises(DataFormatError, match="no end of line"):
        list(CriteoFile(path, num_embeddings=10, batch_size=2).batches(0))


def test_criteo_file_that_is_empty_or_only_a_header_has_no_batches(tmp_path: Path) -> None:
    for header in (False, True):
        path = tmp_path / "empty"
        write_criteo(path, [], header=True) if header else path.write_bytes(b"")
        assert list(CriteoFile(path, num_embeddings=10, batch_size=2).batches(0)) == []


def test_criteo_batches_do_not_depend_on_where_chunks_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_criteo(tmp_path / "a.tsv", criteo_lines(50))

    def read() -> list[Batch]:
        file = CriteoFile(path, num_embeddings=99, batch_size=8, split="train", test_fraction=0.3)
        return list(file.batches(1))

    whole = read()
    for num_bytes in (1, 100, 1000):
        monkeypatch.setattr("torchrec_tpu.datasets.criteo._CHUNK_BYTES", num_bytes)
        assert same(read(), whole)


def test_criteo_splits_are_disjoint_and_complete(tmp_path: Path) -> None:
    # The first dense number of a line is its own number.
    lines = ["\t".join(["0", str(i), *["1"] * 12, *["a"] * 26]) for i in range(1000)]
    path = write_criteo(tmp_path / "a.tsv", lines)

    def members(split: str, seed: int = 0) -> set[int]:
        file = CriteoFile(
            path, num_embeddings=9, batch_size=64, split=split, test_fraction=0.2, seed=seed
        )
        return {round(float(np.exp(x)) - 3) for x in read_all(file)[1][:, 0]}

    train, test = members("train"), members("test")
    assert train | test == set(range(1000))
    assert not train & test
    assert 150 < len(test) < 250
    assert members("test", seed=1) != test


def test_criteo_collisions_are_counted_exactly(tmp_path: Path) -> None:
    lines = criteo_lines(200, seed=3)
    path = write_criteo(tmp_path / "a.tsv", lines)
    file = CriteoFile(path, num_embeddings=50, batch_size=16, shuffle=False)
    list(file.batches(0))
    for column in range(26):
        owner: dict[int, int] = {}
        lookups = collisions = 0
        for line in lines:
            value = slowly(line)[2][column]
            if value < 0:
                continue
            row = int(hash_to_row(np.array([value]), num_embeddings=50)[0])
            lookups += 1
            collisions += owner.setdefault(row, value) != value
        assert (file.num_lookups[column], file.num_collisions[column]) == (lookups, collisions)
    assert file.num_collisions.sum() > 0


def test_criteo_memory_does_not_grow_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrec_tpu.datasets.criteo._CHUNK_BYTES", 100_000)
    line = (criteo_lines(1)[0] + "\n").encode()
    path = tmp_path / "long.tsv"
    path.write_bytes(line * 10_000)  # 3 MB
    file = CriteoFile(path, num_embeddings=9, batch_size=16, window_batches=16)

    def peak(num_batches: int) -> int:
        tracemalloc.start()
        deque(itertools.islice(file.batches(0), num_batches), maxlen=0)  # reads, keeps nothing
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(1)
    assert peak(600) < peak(60) * 1.2
    assert peak(60) < 2_000_000


@pytest.mark.parametrize("wrong", [[5] * 25, [5] * 25 + [0], 0, 2**31])
def test_criteo_refuses_impossible_tables(tmp_path: Path, wrong: int | list[int]) -> None:
    path = write_criteo(tmp_path / "a.tsv", criteo_lines(1))
    with pytest.raises(ValueError, match="26 numbers"):
        CriteoFile(path, num_embeddings=wrong, batch_size=1)


def test_criteo_file_that_is_absent_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match="no such file"):
        CriteoFile(tmp_path / "none", num_embeddings=1, batch_size=1)


# ------------------------------------------------------------------------------------------ hashing


@given(st.lists(st.integers(-1, 2**32 - 1)), st.integers(1, 2**31 - 1))
def test_hashed_rows_are_inside_the_table(values: list[int], num_embeddings: int) -> None:
    rows = hash_to_row(np.array(values, np.int64), num_embeddings=num_embeddings)
    assert rows.dtype == np.int32
    assert all(0 <= row < num_embeddings for row in rows.tolist())


def test_hashed_rows_are_even() -> None:
    counts = np.bincount(hash_to_row(np.arange(100_000), num_embeddings=101), minlength=101)
    assert counts[0] == 0  # kept for blanks
    assert 850 < counts[1:].min() <= counts[1:].max() < 1150  # 1000 +- 5 sigma


# ---------------------------------------------------------------------------------------- streams


def in_memory(num: int = 23, **options: int) -> InMemory:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 4, num)
    bags = {
        "one": Bags(values=rng.integers(0, 9, num).astype(np.int32)),
        "many": Bags(
            values=rng.integers(0, 9, lengths.sum()).astype(np.int32),
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
        ),
    }
    dense = np.arange(num, dtype=np.float32)[:, None]
    labels = (dense[:, 0] % 2).astype(np.float32)
    return InMemory(dense, bags, labels, **{"batch_size": 5, "seed": 1, **options})


@pytest.fixture(params=["in_memory", "criteo", "synthetic"])
def make_stream(request: pytest.FixtureRequest, tmp_path: Path):
    path = write_criteo(tmp_path / "a.tsv", criteo_lines(43))

    def make(seed: int = 1) -> BatchStream:
        if request.param == "in_memory":
            return in_memory(seed=seed)
        if request.param == "criteo":
            return CriteoFile(path, num_embeddings=99, batch_size=5, seed=seed, window_batches=3)
        features = [
            MultiHot(key="a", num_embeddings=50, num_ids=3),
            MultiHot(key="b", num_embeddings=7),
        ]
        return Synthetic(features, batch_size=5, num_batches=8, seed=seed, num_dense=2)

    return make


def test_streams_are_deterministic_and_epochs_and_seeds_differ(make_stream) -> None:
    first = list(make_stream().batches(0))
    assert same(first, list(make_stream().batches(0)))
    assert not same(first, list(make_stream().batches(1)))
    assert not same(first, list(make_stream(seed=2).batches(0)))


def test_streams_start_at_any_batch(make_stream) -> None:
    whole = list(make_stream().batches(2))
    for start in range(len(whole) + 2):
        assert same(list(make_stream().batches(2, start=start)), whole[start:])


def test_streams_resume_where_their_state_was_saved(make_stream) -> None:
    stream = make_stream()
    list(stream)  # epoch 0
    iterator = iter(stream)
    next(iterator), next(iterator)
    other = make_stream()
    other.load_state_dict(stream.state_dict())
    assert same(list(iterator), list(other))
    assert stream.state_dict() == other.state_dict()
    assert stream.state_dict()["epoch"] == 2


def test_streams_refuse_a_position_of_another_seed(make_stream) -> None:
    with pytest.raises(StateDictError, match="seed=2"):
        make_stream().load_state_dict(make_stream(seed=2).state_dict())


def test_an_epoch_has_every_sample_once_with_its_own_bag() -> None:
    stream = in_memory()
    seen = []
    for batch in stream.batches(3):
        many = batch.sparse_features["many"]
        for index, row in enumerate(batch.dense_features[:, 0].long().tolist()):
            seen.append(row)
            bag = many.values()[many.offsets()[index] : many.offsets()[index + 1]]
            first, last = stream.bags["many"].offsets[row : row + 2]
            assert bag.tolist() == stream.bags["many"].values[first:last].tolist()
            assert batch.labels[index] == row % 2
    assert sorted(seen) == list(range(stream.num_samples))


@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
def test_parts_of_a_batch_are_the_batch(world_size: int) -> None:
    bags = {
        "f": Bags(
            values=np.arange(10, dtype=np.int32), offsets=np.int64([0, 3, 3, 4, 8, 8, 9, 10])
        ),
        "g": Bags(values=np.arange(7, dtype=np.int32)),
    }
    dense = np.arange(14, dtype=np.float32).reshape(7, 2)
    stream = InMemory(dense, bags, np.arange(7, dtype=np.float32), batch_size=7)
    [batch] = stream.batches(0)
    parts = [part_of(batch, rank, world_size) for rank in range(world_size)]
    sizes = [len(part.labels) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([part.dense_features for part in parts]), batch.dense_features)
    assert torch.equal(torch.cat([part.labels for part in parts]), batch.labels)
    for key in ("f", "g"):
        whole = batch.sparse_features[key]
        pieces = [part.sparse_features[key] for part in parts]
        assert torch.equal(torch.cat([piece.values() for piece in pieces]), whole.values())
        assert torch.equal(torch.cat([piece.lengths() for piece in pieces]), whole.lengths())


def test_batch_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size=0"):
        in_memory(batch_size=0)


# -------------------------------------------------------------------------------------- synthetic


def test_synthetic_ids_are_as_skewed_as_asked() -> None:
    def share_of_the_most_popular(exponent: float) -> float:
        stream = Synthetic(
            [MultiHot(key="a", num_embeddings=1000)],
            batch_size=20_000,
            num_batches=1,
            exponent=exponent,
        )
        (batch,) = stream.batches(0)
        counts = np.bincount(batch.sparse_features.values().numpy(), minlength=1000)
        assert len(counts) == 1000
        return counts.max() / 20_000

    assert share_of_the_most_popular(0) < 0.003
    # Share of [1, 2) under x^-1.2 on [1, 1001): (1 - 2^-.2) / (1 - 1001^-.2) = .173
    assert abs(share_of_the_most_popular(1.2) - 0.173) < 0.01
    # and under 1/x: log 2 / log 1001 = .100
    assert abs(share_of_the_most_popular(1.0) - 0.100) < 0.01


def test_synthetic_first_id_decides_the_bag() -> None:
    stream = Synthetic(
        [MultiHot(key="a", num_embeddings=40, num_ids=5)], batch_size=500, num_batches=2
    )
    bags: dict[int, set[tuple[int, ...]]] = {}
    for batch in stream.batches(0):
        assert batch.sparse_features.lengths().tolist() == [5] * 500
        for bag in batch.sparse_features.values().reshape(-1, 5).tolist():
            bags.setdefault(bag[0], set()).add(tuple(bag))
    assert len(bags) > 10
    assert all(len(variants) == 1 for variants in bags.values())


def test_synthetic_labels_follow_one_rule_in_both_splits() -> None:
    """A linear model of the first ids and the dense features, fitted on train, ranks test."""

    def arrays(split: str) -> tuple[np.ndarray, np.ndarray]:
        features = [MultiHot(key=key, num_embeddings=20) for key in "abc"]
        stream = Synthetic(
            features, num_dense=3, batch_size=4000, num_batches=1, exponent=0.5, split=split
        )
        (batch,) = stream.batches(0)
        ids = batch.sparse_features.values().reshape(3, -1)
        one_hot = torch.nn.functional.one_hot(ids.long(), 20).permute(1, 0, 2).reshape(4000, -1)
        return np.concatenate([batch.dense_features, one_hot], axis=1), batch.labels.numpy()

    x, y = arrays("train")
    weights, *_ = np.linalg.lstsq(x, y, rcond=None)
    x, y = arrays("test")
    correlation = np.corrcoef(x @ weights, y)[0, 1]
    assert correlation > 0.3


# ---------------------------------------------------------------------------------------- ml-100k


def write_grouplens(folder: Path) -> Path:
    """Three users, three films, ten ratings in GroupLens' format."""
    ratings = [
        (1, 1, 5, 0), (1, 2, 3, 3600), (2, 1, 4, 7200), (2, 3, 1, 9), (3, 3, 5, 99),
        (3, 2, 4, 999), (1, 3, 2, 86400), (2, 2, 5, 90000), (3, 1, 3, 5), (1, 1, 4, 500),
    ]  # fmt: skip
    (folder / "u.data").write_text("".join("\t".join(map(str, r)) + "\n" for r in ratings))
    users = ["1|24|M|technician|85711", "2|53|F|other|94043", "3|7|M|writer|32067"]
    (folder / "u.user").write_text("\n".join(users) + "\n")
    flags = {1: {3, 4, 5}, 2: {16}, 3: set()}
    items = [
        f"{i}|T\u00e9st {i}|{'01-Jan-1995' if i < 3 else ''}||url|"
        + "|".join("1" if g in flags[i] else "0" for g in range(19))
        for i in flags
    ]
    (folder / "u.item").write_bytes(("\n".join(items) + "\n").encode("latin-1"))
    return folder


def write_recbole(folder: Path) -> Path:
    """The same in recbole's format."""
    source = folder / "grouplens"
    source.mkdir()
    write_grouplens(source)
    ratings = (source / "u.data").read_text()
    (folder / "ml-100k.inter").write_text("user_id\titem_id\trating\ttimestamp\n" + ratings)
    users = (source / "u.user").read_text().replace("|", "\t")
    (folder / "ml-100k.user").write_text("user_id\tage\tgender\toccupation\tzip\n" + users)
    (folder / "ml-100k.item").write_text(
        "item_id\ttitle\tyear\tclass\n1\tA\t1995\tAnimation Children's Comedy\n"
        "2\tB\t1995\tThriller\n3\tC\t\t\n"
    )
    return folder


def test_ml_100k_formats_agree(tmp_path: Path) -> None:
    folders = []
    for name, write in (("a", write_grouplens), ("b", write_recbole)):
        (tmp_path / name).mkdir()
        folders.append(write(tmp_path / name))
    one, two = (ml_100k(folder, batch_size=3) for folder in folders)
    for a, b in zip(one, two, strict=True):
        assert same(list(a.batches(0)), list(b.batches(0)))


def test_ml_100k_features_are_those_of_the_rating(tmp_path: Path) -> None:
    train, test = ml_100k(write_grouplens(tmp_path), batch_size=100, test_fraction=0.1)
    assert (train.num_samples, test.num_samples) == (9, 1)
    age_of, gender_of = {1: 2, 2: 5, 3: 0}, {1: 1, 2: 0, 3: 1}
    genres_of = {1: [3, 4, 5], 2: [16], 3: []}
    for stream in (train, test):
        (batch,) = stream.batches(0)
        kjt = batch.sparse_features.to_dict()
        genres = kjt["genres"].to_dense()
        for i, (user, item) in enumerate(
            zip(kjt["user"].values().tolist(), kjt["item"].values().tolist(), strict=True)
        ):
            assert kjt["age"].values()[i] == age_of[user]
            assert kjt["gender"].values()[i] == gender_of[user]
            assert genres[i].tolist() == genres_of[item]
    assert sum(float(s.labels_N.sum()) for s in (train, test)) == 6  # ratings 5 4 5 4 5 4


def test_ml_100k_time_split_tests_on_the_newest(tmp_path: Path) -> None:
    _, test = ml_100k(write_grouplens(tmp_path), split="time", test_fraction=0.2)
    seen = sorted(zip(test.bags["user"].values, test.bags["item"].values, strict=True))
    assert seen == [(1, 3), (2, 2)]  # timestamps 86400 and 90000


def test_ml_100k_dense_features_know_nothing_of_the_test_split(tmp_path: Path) -> None:
    """Other ratings and other test rows: the train split's dense features stay to the bit."""
    folder = write_grouplens(tmp_path)
    before, test = ml_100k(folder, split="time", test_fraction=0.2)
    lines = (folder / "u.data").read_text().splitlines()
    lines[6], lines[7] = "3\t1\t1\t86400", "3\t1\t1\t90000"  # the two of the test split
    lines = [line.split("\t") for line in lines]
    changed = ["\t".join([user, item, "1", stamp]) for user, item, _, stamp in lines]  # ratings
    (folder / "u.data").write_text("\n".join(changed) + "\n")
    after, other_test = ml_100k(folder, split="time", test_fraction=0.2)
    np.testing.assert_array_equal(before.dense_ND, after.dense_ND)
    assert not np.array_equal(test.dense_ND, other_test.dense_ND)
    assert before.labels_N.sum() == 5
    assert after.labels_N.sum() == 0


def test_ml_100k_counts_leave_the_rating_itself_out(tmp_path: Path) -> None:
    train, _ = ml_100k(write_grouplens(tmp_path), split="time", test_fraction=0.2)
    users = train.bags["user"].values
    others = np.log1p([np.count_nonzero(users == user) - 1 for user in users])
    expected = (others - others.mean()) / others.std()
    np.testing.assert_allclose(train.dense_ND[:, 7], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("file", "line", "text", "column"),
    [
        ("u.data", 2, "1\t2\tgood\t3", "rating"),
        ("u.data", 3, "9\t2\t1\t3", "user_id"),
        ("u.data", 4, "1\t9\t1\t3", "item_id"),
        ("u.user", 1, "1|young|M|technician|8", "age"),
        ("u.user", 2, "2|53|F", ""),
    ],
)
def test_ml_100k_names_file_line_and_column_of_a_bad_field(
    tmp_path: Path, file: str, line: int, text: str, column: str
) -> None:
    folder = write_grouplens(tmp_path)
    lines = (folder / file).read_text().splitlines()
    lines[line - 1] = text
    (folder / file).write_text("\n".join(lines) + "\n")
    with pytest.raises(DataFormatError) as caught:
        ml_100k(folder)
    found = (Path(caught.value.file).name, caught.value.line, caught.value.column)
    assert found == (file, line, column)


def test_ml_100k_absent_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataNotFoundError, match="pip install --no-deps recbole"):
        ml_100k(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataNotFoundError, match="pip install --no-deps recbole"):
        ml_100k()


def test_ml_100k_of_the_wheel_is_the_whole_data_set() -> None:
    try:
        train, test = ml_100k(batch_size=512)
    except DataNotFoundError as error:
        pytest.skip(str(error))
    assert (train.num_samples, test.num_samples) == (80_000, 20_000)
    sizes = {
        key: 1 + max(int(stream.bags[key].values.max()) for stream in (train, test))
        for key in train.keys
    }
    expected = {"user": 944, "item": 1683, "age": 8, "gender": 2, "occupation": 21, "genres": 19}
    assert sizes == expected
    num_genres = sum(len(stream.bags["genres"].values) for stream in (train, test))
    positives = sum(float(stream.labels_N.sum()) for stream in (train, test))
    assert (num_genres, positives) == (212_595, 55_375)
    assert "recbole" not in __import__("sys").modules
