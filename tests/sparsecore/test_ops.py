"""The torch ops: schema, fake, autograd."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from torchrec_tpu.sparsecore import ops
from torchrec_tpu.sparsecore.errors import BackwardError
from torchrec_tpu.sparsecore.layout import Combiner, Table
from torchrec_tpu.sparsecore.preprocess import Preprocessor
from torchrec_tpu.sparsecore.stacking import make_layout

LAYOUT = make_layout(
    [
        Table(name="a", num_embeddings=20, embedding_dim=4, combiner=Combiner.SUM, features=("f",)),
        Table(
            name="b", num_embeddings=9, embedding_dim=3, combiner=Combiner.MEAN, features=("g", "f")
        ),
    ]
)
BATCH = Preprocessor(LAYOUT)(
    ["f", "g"], np.array([1, 1, 8, 3, 0, 0]), lengths=np.array([2, 0, 1, 1, 1, 1])
)
GEOMETRY = LAYOUT.geometry(BATCH)
ORDER = [stacked.table.name for stacked in LAYOUT.stack_order_tables]
SHAPE = (3, 4 + 3 + 3)


def tables() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (20, 4), "b": (9, 3)}
    return [torch.randn(shapes[name], generator=generator) for name in ORDER]


def slots() -> list[Tensor]:
    return [torch.full_like(table, 0.1) for table in tables()]


def sgd_step(weights: list[Tensor], grad: Tensor) -> None:
    ops.sparse_dense_matmul_update_(
        grad,
        ops.as_tensors(BATCH),
        weights,
        [],
        torch.full((2, 1), 0.5),
        GEOMETRY.encode(),
        "sgd",
        0.0,
    )


def look_up(weights: list[Tensor], update: Callable[[Tensor], None] | None) -> Tensor:
    return ops.lookup(ops.as_tensors(BATCH), weights, GEOMETRY, SHAPE, update=update)


def dense(weights: list[Tensor]) -> Tensor:
    """The lookup as sums of rows, for autograd to differentiate."""
    a, b = (weights[ORDER.index(name)] for name in "ab")
    zero = torch.zeros(3)
    rows = [
        [a[1] + a[1], b[3], (b[1] + b[1]) / 2],
        [torch.zeros(4), b[0], zero],
        [a[8], b[0], b[8]],
    ]
    return torch.stack([torch.cat(row) for row in rows])


def test_lookup_and_update_are_a_sum_of_rows_and_its_gradient() -> None:
    weights = tables()
    grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    expected = [table.clone().requires_grad_() for table in weights]
    result = look_up(weights, lambda g: sgd_step(weights, g))
    torch.testing.assert_close(result, dense(expected))
    result.backward(grad)
    dense(expected).backward(grad)
    for weight, table in zip(weights, expected, strict=True):
        assert table.grad is not None
        torch.testing.assert_close(weight, table.detach() - 0.5 * table.grad)


def test_lookup_op_passes_torchs_checks() -> None:
    arguments = (ops.as_tensors(BATCH), tables(), GEOMETRY.encode(), list(SHAPE))
    torch.library.opcheck(ops.sparse_dense_matmul, arguments)


@pytest.mark.parametrize(("rule", "num_operands"), [("sgd", 1), ("adagrad", 2)])
def test_update_op_passes_torchs_checks(rule: str, num_operands: int) -> None:
    arguments = (
        torch.ones(SHAPE),
        ops.as_tensors(BATCH),
        tables(),
        slots() if rule == "adagrad" else [],
        torch.full((2, num_operands), 0.1),
        GEOMETRY.encode(),
        rule,
        0.0,
    )
    torch.library.opcheck(ops.sparse_dense_matmul_update_, arguments)


def test_update_works_in_place_and_tells_autograd() -> None:
    weights = tables()
    versions = [weight._version for weight in weights]
    before = [weight.clone() for weight in weights]
    addresses = [weight.data_ptr() for weight in weights]
    sgd_step(weights, torch.ones(SHAPE))
    assert [weight.data_ptr() for weight in weights] == addresses
    assert all(weight._version > version for weight, version in zip(weights, versions, strict=True))
    a = ORDER.index("a")
    moved = (weights[a] != before[a]).any(1).nonzero().flatten().tolist()
    assert moved == [1, 8]


def test_backward_always_runs_although_no_table_asks_for_a_gradient() -> None:
    seen: list[Tensor] = []
    result = look_up(tables(), seen.append)
    assert result.requires_grad
    (2 * result).sum().backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], torch.full(SHAPE, 2.0))
    assert seen[0].is_contiguous()


def test_the_tables_may_change_between_forward_and_backward() -> None:
    """They are not saved: the other of two lookups may have updated them."""
    weights = tables()
    order: list[int] = []
    first = look_up(weights, lambda g: (order.append(1), sgd_step(weights, g)))
    second = look_up(weights, lambda g: (order.append(2), sgd_step(weights, g)))
    (first.sum() + second.sum()).backward()
    assert sorted(order) == [1, 2]
    twice = tables()
    sgd_step(twice, torch.ones(SHAPE))
    sgd_step(twice, torch.ones(SHAPE))
    assert all(map(torch.equal, weights, twice))


def test_backward_twice_raises_and_updates_once() -> None:
    weights, once = tables(), tables()
    result = look_up(weights, lambda g: sgd_step(weights, g))
    result.sum().backward(retain_graph=True)
    with pytest.raises(BackwardError, match="backward ran twice"):
        result.sum().backward()
    sgd_step(once, torch.ones(SHAPE))
    assert all(map(torch.equal, weights, once))


def test_double_backward_raises_before_any_update() -> None:
    weights = tables()
    result = look_up(weights, lambda g: sgd_step(weights, g))
    with pytest.raises(BackwardError, match="no second derivative"):
        result.square().sum().backward(create_graph=True)
    assert all(map(torch.equal, weights, tables()))


def test_gradients_of_other_inputs_alone_do_not_update() -> None:
    weights = tables()
    scale = torch.tensor(2.0, requires_grad=True)
    result = look_up(weights, lambda g: sgd_step(weights, g))
    (gradient,) = torch.autograd.grad((scale * result).sum(), [scale])
    torch.testing.assert_close(gradient, result.sum())
    assert all(map(torch.equal, weights, tables()))


def test_without_an_update_or_in_no_grad_there_is_nothing_to_differentiate() -> None:
    assert not look_up(tables(), None).requires_grad
    with torch.no_grad():
        assert not look_up(tables(), lambda _: None).requires_grad


def test_a_meta_device_trace_knows_shape_and_dtype() -> None:
    with torch.device("meta"):
        on_meta = [table.to("meta") for table in tables()]
        buffers = [buffer.to("meta") for buffer in ops.as_tensors(BATCH)]
    result = ops.sparse_dense_matmul(buffers, on_meta, GEOMETRY.encode(), list(SHAPE))
    assert result.shape == SHAPE
    assert result.dtype == torch.float32
    assert result.is_meta
