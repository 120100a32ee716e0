"""Snapshots survive crashes and notice damage."""

from pathlib import Path

import pytest
import torch

from torchrec_tpu.snapshots import SnapshotError, Snapshots


def saved(folder: Path, *steps: int) -> Snapshots:
    snapshots = Snapshots(folder)
    for step in steps:
        snapshots.save({"step": step, "weights": torch.full((1000,), float(step))}, step=step)
    return snapshots


def newest(folder: Path) -> Path:
    return max(folder.glob("*.pt"))


def test_the_newest_comes_back_and_two_are_kept(tmp_path: Path) -> None:
    step, state = saved(tmp_path, 1, 20, 3).load()
    assert step == state["step"] == 20
    assert state["weights"].equal(torch.full((1000,), 20.0))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"step-{n:09d}.{end}" for n in (3, 20) for end in ("json", "pt")]


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def break_the_manifest(path: Path) -> None:
    path.with_suffix(".json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (tear, "torn"),
        (flip_a_bit, "corrupt"),
        (Path.unlink, "missing"),
        (break_the_manifest, "manifest"),
    ],
)
def test_a_damaged_snapshot_is_named_and_the_one_before_is_used(
    tmp_path: Path, damage, word: str
) -> None:
    snapshots = saved(tmp_path, 1, 2)
    damage(newest(tmp_path))
    with pytest.warns(
        UserWarning, match=f"step-000000002.pt: .*{word}.*going on from step-000000001"
    ):
        step, state = snapshots.load()
    assert step == state["step"] == 1


def test_without_a_sound_snapshot_the_error_names_all(tmp_path: Path) -> None:
    snapshots = saved(tmp_path, 1, 2)
    for path in tmp_path.glob("*.pt"):
        tear(path)
    with pytest.raises(SnapshotError, match=r"step-000000002\.pt: torn.*step-000000001\.pt: torn"):
        snapshots.load()
    with pytest.raises(SnapshotError, match="nothing was saved here"):
        Snapshots(tmp_path / "empty").load()


def test_a_crash_while_saving_leaves_the_old_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = saved(tmp_path, 1)

    def half(state: object, file) -> None:
        file.write(b"half a file")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", half)
        with pytest.raises(OSError, match="disk full"):
            snapshots.save({}, step=2)
    assert snapshots.load()[0] == 1
    saved(tmp_path, 3)
    snapshots.clear()
    assert list(tmp_path.iterdir()) == []
