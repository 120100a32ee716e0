"""What is installed beside us."""

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchrec_tpu.sharding import _compat

REPOSITORY = Path(__file__).parents[2]


def test_the_versions_that_errors_recommend_are_the_pinned_ones() -> None:
    pins = "".join(path.read_text() for path in (REPOSITORY / "requirements").glob("*.txt"))
    for name, version in _compat.KNOWN_GOOD.items():
        assert re.search(rf"^{re.escape(name)}=={re.escape(version)}$", pins, re.MULTILINE), name


def test_missing_operators_are_named_with_the_versions_that_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _compat.require_torchrec()
    monkeypatch.setattr(_compat, "_FBGEMM_OPS", ("no_such_operator",))
    with pytest.raises(ImportError, match=r"lacks no_such_operator\. Found: torch 2.*torchrec==1"):
        _compat.require_torchrec()


def test_a_torchrec_that_does_not_import_is_explained_at_the_front_door(tmp_path: Path) -> None:
    (tmp_path / "torchrec.py").write_text("raise AttributeError('no attribute jagged_2d_to_dense')")
    result = subprocess.run(
        [sys.executable, "-c", "import torchrec_tpu; torchrec_tpu.swap_embeddings"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ImportError: torchrec does not import: no attribute jagged_2d" in result.stderr
    assert "--no-deps" in result.stderr


def _refuse() -> bool:
    raise RuntimeError("is_available is internal to TorchTPU")


def test_asking_for_a_tpu_is_answered_where_torch_tpu_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tpu = SimpleNamespace(is_available=_refuse)
    monkeypatch.setattr(torch, "tpu", tpu, raising=False)
    monkeypatch.setattr(_compat, "_has_google_device", lambda: False)
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    _compat.live_beside_torch_tpu()
    assert tpu.is_available() is False
    assert os.environ.pop("TPU_SKIP_MDS_QUERY") == "1"


def test_a_tpu_module_that_answers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tpu = SimpleNamespace(is_available=lambda: True)
    monkeypatch.setattr(torch, "tpu", tpu, raising=False)
    monkeypatch.setattr(_compat, "_has_google_device", lambda: True)
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    answer = tpu.is_available
    _compat.live_beside_torch_tpu()
    assert tpu.is_available is answer
    assert "TPU_SKIP_MDS_QUERY" not in os.environ


@pytest.mark.skipif(importlib.util.find_spec("torch_tpu") is None, reason="torch_tpu is absent")
@pytest.mark.parametrize(
    "imports",
    ["import torch, torchrec_tpu", "import torchrec_tpu, torch; torchrec_tpu.Options"],
)
def test_training_on_cpu_works_beside_an_autoloaded_torch_tpu(imports: str) -> None:
    program = f"""
        {imports}
        import sys
        from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

        assert "torch_tpu" in sys.modules
        assert torch.tpu.is_available() is False
        ebc = torchrec_tpu.SparseCoreEmbeddingBagCollection([EmbeddingBagConfig(8, 4, "t")])
        kjt = KeyedJaggedTensor(["t"], torch.tensor([1]), lengths=torch.tensor([1]))
        before = ebc(kjt).values().clone()
        ebc(kjt).values().sum().backward()
        assert not torch.equal(before, ebc(kjt).values())
    """
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_a_new_kjt_is_no_reason_for_torch_to_warn_of_torch() -> None:
    script = (
        "import logging, torch, torchrec_tpu.sharding\n"
        "from torchrec import KeyedJaggedTensor\n"
        "log = logging.getLogger('torch.fx._symbolic_trace')\n"
        "KeyedJaggedTensor(keys=['f'], values=torch.tensor([1]), lengths=torch.tensor([1]))\n"
        "log.warning('heard')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "heard" in result.stderr
    assert "is_fx_tracing" not in result.stderr
