"""A whole training step traced from torch models: its facts, its guards, and what it refuses."""

import dataclasses
import importlib.metadata
import re
import subprocess
import sys

import numpy as np
import pytest

from torchrec_tpu.sparsecore.aot import adapter, lowering
from torchrec_tpu.sparsecore.aot.pipeline import Driver, Feed
from torchrec_tpu.sparsecore.aot.program import ACTIVE, Program, program_layout
from torchrec_tpu.sparsecore.capacity import Capacity
from torchrec_tpu.sparsecore.errors import DependencyError, ProgramError
from torchrec_tpu.sparsecore.optimizers import adagrad, adam, rowwise_adagrad, sgd

torch = pytest.importorskip("torch", reason="pip install -r requirements/cpu.txt")
pytest.importorskip("torchrec", reason="pip install -r requirements/cpu.txt")
if reason := adapter.why_unavailable():
    pytest.skip(reason, allow_module_level=True)

from torch import nn  # noqa: E402
from torchrec import (  # noqa: E402
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.datasets.utils import Batch  # noqa: E402
from torchrec.models.dlrm import DLRM_DCN, DLRMTrain  # noqa: E402

from torchrec_tpu import aot, recipes  # noqa: E402
from torchrec_tpu.placement import Placement  # noqa: E402
from torchrec_tpu.sharding.swap import swap_embeddings  # noqa: E402
from torchrec_tpu.sparsecore.aot.emulate import Emulator  # noqa: E402

DEVICES, CORES, BATCH, DIM = 2, 2, 12, 8
TABLES = {"a": (40, "adagrad"), "b": (100, "adagrad"), "c": (24, "rowwise_adagrad")}


def dlrm(device="meta", *, batch_norm=False):
    """A DLRM v2 with two stacks."""
    device = torch.device(device)
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
        for name, (rows, _) in TABLES.items()
    ]
    model = DLRM_DCN(
        EmbeddingBagCollection(tables=tables, device=device),
        dense_in_features=3,
        dense_arch_layer_sizes=[16, DIM],
        over_arch_layer_sizes=[16, 1],
        dcn_num_layers=2,
        dcn_low_rank_dim=4,
        dense_device=device,
    )
    if batch_norm:
        model.over_arch = nn.Sequential(
            nn.BatchNorm1d(DIM * 4, device=device), nn.Linear(DIM * 4, 1, device=device)
        )
    make = {"adagrad": adagrad(lr=0.1), "rowwise_adagrad": rowwise_adagrad(lr=0.1)}
    model = DLRMTrain(model)
    swap_embeddings(model, optimizer={name: make[rule] for name, (_, rule) in TABLES.items()})
    return model


def dlrm_batch(seed=0, size=BATCH):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, len(TABLES) * size)
    rows = [rows for rows, _ in TABLES.values()]
    ids = [rng.integers(0, rows[f], lengths[f * size :][:size].sum()) for f in range(len(rows))]
    return Batch(
        dense_features=torch.randn(size, 3),
        sparse_features=KeyedJaggedTensor(
            keys=list(TABLES),
            values=torch.from_numpy(np.concatenate(ids)),
            lengths=torch.from_numpy(lengths),
        ),
        labels=torch.randint(2, (size,)).float(),
    )


def trace(model, batch, **options):
    options = {"num_devices": DEVICES, "cores_per_device": CORES, **options}
    return aot.trace(model, batch, dense_optimizer=options.pop("dense", adam(lr=0.01)), **options)


@pytest.fixture(scope="module", params=["exact", "pipelined"])
def program(request):
    return trace(dlrm(), dlrm_batch(), mode=request.param)


# ------------------------------------------------------------------------------------------- facts


def test_arguments_come_in_the_promised_order(program):
    kinds = list(dict.fromkeys(argument.kind for argument in program.arguments))
    order = ["table", "slot", "operand", "buffer", "dense", "dense_slot", "dense_operand", "input"]
    assert kinds == order + ["carry"] * (program.mode == "pipelined")
    names = [argument.name for argument in program.arguments]
    assert len(set(names)) == len(names)
    prefix = "model.sparse_arch.embedding_bag_collection/a+b"
    assert names[:4] == [
        f"{prefix}/table", f"{prefix}/slot:sum", f"{prefix}/operand:lr", f"{prefix}/operand:eps",
    ]  # fmt: skip
    buffers = ["row_pointers", "embedding_ids", "sample_ids", "gains"]
    assert [f"{prefix}/buffer:{name}" for name in buffers] == names[8:12]
    assert "dense/model.over_arch.model.1.weight" in names
    assert "dense_slot/exp_avg_sq/model.over_arch.model.1.weight" in names
    assert "input/dense_features" in names
    assert (ACTIVE in names) == (program.mode == "pipelined")


def test_a_device_gets_its_share_of_rows_samples_and_slots(program):
    big, small = program.stacks
    assert (big.tables, small.tables) == (("a", "b"), ("c",))
    cores = DEVICES * CORES
    assert big.rows == CORES * (-(-40 // (8 * cores)) + -(-100 // (8 * cores))) * 8
    assert (big.samples, small.samples) == (2 * BATCH, BATCH)
    assert (big.rule, small.rule) == ("adagrad", "rowwise_adagrad")
    shapes = {a.name.split("/", 1)[-1]: a.shape for a in program.arguments}
    assert shapes["a+b/table"] == (big.rows, DIM)
    assert shapes["c/slot:sum"] == (small.rows,)
    assert shapes["a+b/buffer:gains"] == (big.slots_per_device,)
    assert shapes["a+b/buffer:row_pointers"] == (CORES * 8,)


def test_all_state_is_updated_in_place_and_the_rest_is_not(program):
    aliased = {result.aliases for result in program.results} - {None}
    in_place = {"table", "slot", "dense", "dense_slot", "carry"}
    for index, argument in enumerate(program.arguments):
        assert argument.donated == (argument.kind in in_place), argument
        assert argument.donated == (index in aliased)
    state = [a for a in program.arguments if a.kind in in_place]
    assert program.expected.alias_bytes == sum(4 * int(np.prod(a.shape)) for a in state)


def test_one_all_reduce_carries_all_dense_gradients_and_the_loss(program):
    parameters = sum(p.numel() for n, p in dlrm().named_parameters() if "embedding_bags" not in n)
    assert program.expected.collectives == (("all_reduce", 4 * (parameters + 1)),)
    assert program.text.count("stablehlo.all_reduce") == 1
    assert f"replica_groups = dense<[[{', '.join(map(str, range(DEVICES)))}]]>" in program.text


def test_features_are_joined_flat(program):
    joined = [line for line in program.text.splitlines() if "stablehlo.concatenate" in line]
    width = DIM * (1 + len(TABLES))
    assert any(f"-> tensor<{BATCH}x{width}xf32>" in line for line in joined)
    assert not [line for line in joined if f"-> tensor<{BATCH}x{1 + len(TABLES)}x{DIM}" in line]


def test_gradients_are_taken_from_where_they_are(program):
    """Not from what a model that takes its features one by one has joined in between."""
    width = DIM * len(TABLES)
    joined = f"(tensor<{BATCH}x{width}xf32>) -> tensor<{CORES}x{BATCH // CORES}x{width}xf32>"
    assert joined not in program.text
    assert joined.replace(str(width), str(width + DIM)) in program.text


def sliced(first, last, *, join=1, inner="[0:4, 2:6]"):
    """Columns first..last of (4, 4) joined to (4, 3), seen as (2, 2, 7), after the pass."""
    shape = [4, 4]
    shape[join] += 3 if join else 4
    rest = "4x3" if join else "4x4"
    whole = "x".join(map(str, shape))
    seen = [2, shape[0] // 2, shape[1]]
    text = f"""
    func.func public @main(%a: tensor<9x9xf32>, %b: tensor<{rest}xf32>) -> tensor<*xf32> {{
      %0 = stablehlo.slice %a {inner} : (tensor<9x9xf32>) -> tensor<4x4xf32>
      %1 = stablehlo.concatenate %0, %b, dim = {join}
          : (tensor<4x4xf32>, tensor<{rest}xf32>) -> tensor<{whole}xf32>
      %2 = stablehlo.reshape %1 : (tensor<{whole}xf32>) -> tensor<{"x".join(map(str, seen))}xf32>
      %3 = stablehlo.slice %2 [0:2, 0:{seen[1]}, {first}:{last}]
          : (tensor<{"x".join(map(str, seen))}xf32>) -> tensor<2x{seen[1]}x{last - first}xf32>
      return %3 : tensor<2x{seen[1]}x{last - first}xf32>
    }}""".replace("tensor<*xf32>", f"tensor<2x{seen[1]}x{last - first}xf32>")
    text = text.replace("tensor<9x9xf32>", "tensor<4x9xf32>")
    with adapter.mlir() as mlir:
        module = mlir.ir.Module.parse(text)
        lowering.slice_sources(mlir, lowering.public_function(module).regions[0].blocks[0])
        adapter.simplify(module)
        assert module.operation.verify()
        return str(module)


def test_a_slice_of_a_joined_slice_is_one_of_its_source():
    text = sliced(1, 3)
    assert "stablehlo.concatenate" not in text
    assert "stablehlo.slice %0 [0:2, 0:2, 3:5]" in text
    assert "(tensor<4x9xf32>) -> tensor<2x2x9xf32>" in text


@pytest.mark.parametrize(
    "arguments",
    [
        {"first": 3, "last": 5},  # of both parts
        {"first": 5, "last": 7},  # of what is no slice
        {"first": 1, "last": 3, "join": 0},  # rows, not columns, are joined
    ],
)
def test_other_slices_stay(arguments):
    assert "stablehlo.concatenate" in sliced(**arguments)


def test_one_device_has_no_collective():
    program = trace(dlrm(), dlrm_batch(), num_devices=1, dense=sgd(lr=0.1))
    assert program.expected.collectives == ()
    assert "all_reduce" not in program.text


def test_programs_survive_the_disk(program, tmp_path):
    program.save(tmp_path / "step")
    assert Program.load(tmp_path / "step") == program
    assert Program.load(tmp_path / "step").key == program.key
    path = tmp_path / "step" / "program.mlir"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(ProgramError, match="do not fit together"):
        Program.load(tmp_path / "step")


def test_the_key_depends_on_text_and_facts(program):
    others = [
        dataclasses.replace(program, text=program.text + " "),
        dataclasses.replace(program, cores_per_device=4),
        dataclasses.replace(program, stacks=program.stacks[:1]),
    ]
    assert len({program.key, *(other.key for other in others)}) == 4


def test_tracing_loads_no_torch_tpu_into_the_caller(program):
    assert "torch_tpu" not in sys.modules


# ------------------------------------------------------------------------------------------ guards


def _edited(program, pattern, replacement, count=1):
    text, found = re.subn(pattern, replacement, program.text, count=count, flags=re.MULTILINE)
    assert found, pattern
    return dataclasses.replace(program, text=text)


def test_a_missing_lookup_is_noticed(program):
    wrong = _edited(program, "@SparseDenseMatmulOp", "@SomethingElse")
    with pytest.raises(ProgramError, match="1 SparseCore lookups, expected 2"):
        wrong.check()


def test_a_missing_update_is_noticed(program):
    wrong = _edited(program, "@SparseDenseMatmulGradOpWithOptimizerUpdate", "@SomethingElse")
    with pytest.raises(ProgramError, match="1 SparseCore updates, expected 2"):
        wrong.check()


def test_a_missing_collective_is_noticed(program):
    start = program.text.index('"stablehlo.all_reduce"')
    header = program.text[:start].rsplit("\n", 1)[-1].strip()  # "%148:15 = "
    name, count = re.match(r"%(\w+):(\d+) =", header).groups()
    end = program.text.index("\n", program.text.index("    }) :", start))
    operands = re.match(r'"stablehlo.all_reduce"\(([^)]*)\)', program.text[start:]).group(1)
    text = program.text[: start - len(header) - 1] + program.text[end:]
    for index, operand in enumerate(operands.split(", ")):
        text = re.sub(rf"%{name}#{index}\b", operand, text)
    assert int(count) == len(operands.split(", "))
    with pytest.raises(ProgramError, match=r"Counter\(\) collectives"):
        dataclasses.replace(program, text=text).check()


def test_a_collective_of_other_bytes_is_noticed(program):
    ((kind, size),) = program.expected.collectives
    expected = dataclasses.replace(program.expected, collectives=((kind, size - 4),))
    with pytest.raises(ProgramError, match="collectives, expected"):
        dataclasses.replace(program, expected=expected).check()


def test_state_that_would_be_copied_is_noticed(program):
    wrong = _edited(program, r"tf.aliasing_output = 1 : i32", "some.attribute = 1 : i32")
    with pytest.raises(ProgramError, match=r"slot:sum.*lends its memory to result None"):
        wrong.check()


def test_a_table_that_comes_back_as_it_was_is_noticed(program):
    wrong = _edited(program, r"return %\w+,", "return %arg0,")
    with pytest.raises(ProgramError, match="a\\+b/table' is returned as it came"):
        wrong.check()


def test_a_zero_gradient_is_noticed(program):
    """As an op without a derivative would give it; through whatever leads to the update."""
    text = program.text
    if program.mode == "exact":
        name = re.search(r"WithOptimizerUpdate\((?:%arg\d+, ){4}(%\w+),", text).group(1)
        message = "update 0"
    else:
        name = re.search(r"^    return (.*?) :", text, re.MULTILINE).group(1).split(", ")[-1]
        message = "carry:gradients"
    value, shape = re.search(rf"^    {name} = (.* (tensor<[^ ]*>))$", text, re.MULTILINE).groups()
    lines = [
        f"%zero = stablehlo.constant dense<0.0> : {shape}",
        f"%lost = {value}",
        f"{name} = stablehlo.multiply %lost, %zero : {shape}",
    ]
    text = text.replace(f"    {name} = {value}\n", "".join(f"    {line}\n" for line in lines), 1)
    with pytest.raises(ProgramError, match=f"{message}.*is constant zero"):
        dataclasses.replace(program, text=text).check()


def test_text_that_is_no_program_is_refused(program):
    with pytest.raises(ProgramError, match="not valid StableHLO"):
        dataclasses.replace(program, text="module { garbage }").check()


# ---------------------------------------------------------------------------------- refused models


class TwoTower(nn.Module):
    """A model whose loss is chosen by the test."""

    def __init__(self, loss):
        super().__init__()
        self.bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name, num_embeddings=20, embedding_dim=DIM, feature_names=[name]
                )
                for name in ("x", "y")
            ]
        )
        self.linear = nn.Linear(DIM, 1)
        self._loss = loss

    def forward(self, kjt):
        return self._loss(self, self.bags(kjt).to_dict())


def _trace_two_tower(loss, *, frozen=(), stacks=None, **options):
    model = TwoTower(loss)
    swap_embeddings(model, optimizer=adagrad())
    for name in frozen:
        model.get_parameter(f"bags.embedding_bags.{name}.weight").requires_grad_(False)
    if stacks:
        sizes = {"num_devices": DEVICES, "cores_per_device": CORES, "batch_size": 4}
        options["layouts"] = {"bags": program_layout(model.bags.layout, **sizes, stacks=stacks)}
    kjt = KeyedJaggedTensor(
        keys=["x", "y"], values=torch.arange(8), lengths=torch.ones(8, dtype=torch.int64)
    )
    return trace(model, kjt, **options)


def _good(model, vectors):
    return model.linear(vectors["x"] * vectors["y"]).mean()


def test_tensors_that_forward_makes_or_keeps_become_constants():
    kept, mask = torch.arange(DIM) * 1.5, torch.tensor([True, False] * 4)
    program = _trace_two_tower(
        lambda m, v: (
            m.linear(torch.where(mask, v["x"] * v["y"] * kept, 0.0)).squeeze(1)
            * torch.tensor([7.0, 6.0, 5.0, 4.0])
        ).mean()
    )
    assert "dense<[0.000000e+00, 1.500000e+00, 3.000000e+00," in program.text
    assert "dense<[true, false, true, false, true, false, true, false]>" in program.text
    assert "dense<[7.000000e+00, 6.000000e+00, 5.000000e+00, 4.000000e+00]>" in program.text


def test_a_model_without_dense_parameters_and_with_a_frozen_stack_is_traced():
    """What is frozen needs no gradient, and nothing is updated outside the tables."""
    options = {"dense": sgd(lr=0.1), "num_devices": 1}
    program = _trace_two_tower(
        lambda _, v: (v["x"] * v["y"].detach()).mean(), frozen=["y"], **options
    )
    assert (program.expected.num_lookups, program.expected.num_updates) == (2, 1)
    assert [s.rule for s in program.stacks] == ["adagrad", None]
    kinds = {a.name: a.donated for a in program.arguments if a.kind == "table"}
    assert kinds == {"bags/x/table": True, "bags/y/table": False}
    assert not [r for r in program.results if r.kind.startswith("dense")]


def test_an_operation_without_lowering_is_named():
    with pytest.raises(ProgramError, match=r"calls fbgemm\.asynchronous_complete_cumsum"):
        _trace_two_tower(
            lambda m, v: (
                _good(m, v)
                * torch.ops.fbgemm.asynchronous_complete_cumsum(v["x"][:, 0].int()).sum()
            )
        )


@pytest.mark.parametrize(
    ("loss", "match", "options"),
    [
        (lambda m, v: m.linear(torch.ones(4, DIM)).mean(), r"does not depend on.*\('bags'", {}),
        (lambda m, v: m.linear(v["x"] + v["y"]), r"shape \(4, 1\), expected a scalar", {}),
        (_good, "no capacity", {"capacities": {"bags": {}}}),
        (_good, "different optimizers.*frozen", {"frozen": ["x"], "stacks": [["x", "y"]]}),
        (
            lambda m, v: m.linear(v["x"] + v["y"] + torch.randn(4, DIM).numpy().sum()).mean(),
            "cannot be traced.*numpy",
            {},
        ),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_a_program_is_refused(loss, match, options):
    with pytest.raises(ProgramError, match=match):
        _trace_two_tower(loss, **options)


def test_changed_buffers_are_refused():
    with pytest.raises(ProgramError, match="forward changes buffers"):
        trace(dlrm(batch_norm=True), dlrm_batch())


def test_a_batch_without_the_features_is_refused():
    kjt = KeyedJaggedTensor(
        keys=["a"], values=torch.arange(2), lengths=torch.ones(2, dtype=torch.int64)
    )
    with pytest.raises(ProgramError, match="no KeyedJaggedTensor in the batch has the keys"):
        trace(dlrm(), dataclasses.replace(dlrm_batch(), sparse_features=kjt))
    with pytest.raises(ProgramError, match="call shard"):
        trace(nn.Linear(1, 1), kjt)


def test_other_versions_are_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(adapter.TESTED, "torch_tpu", ("0.1.0",))
    found = importlib.metadata.version("torch_tpu")
    with pytest.raises(DependencyError, match=f"torch_tpu 0.1.0, {found} is installed; pip inst"):
        trace(dlrm(), dlrm_batch())


# --------------------------------------------------------------------------------------- sequences


class Ranker(nn.Module):
    """Mean of a history's vectors, taken with the lengths, beside a bag."""

    LONGEST = 5

    def __init__(self):
        super().__init__()
        self.history = EmbeddingCollection(
            [EmbeddingConfig(name="i", num_embeddings=50, embedding_dim=DIM, feature_names=["h"])]
        )
        self.bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name="u", num_embeddings=30, embedding_dim=DIM, feature_names=["u"]
                )
            ]
        )
        self.linear = nn.Linear(2 * DIM, 1)

    def forward(self, batch):
        kjt, labels = batch
        history = self.history(kjt)["h"]
        lengths, rows = history.lengths(), history.values()
        starts = lengths.cumsum(0) - lengths
        position = torch.arange(self.LONGEST, device=rows.device)
        index = (starts[:, None] + position).clamp(max=rows.shape[0] - 1)
        mask = (position < lengths[:, None]).unsqueeze(2).float()
        mean = (rows[index] * mask).sum(1) / lengths.clamp(min=1).unsqueeze(1)
        logits = self.linear(torch.cat([mean, self.bags(kjt)["u"]], 1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def _samples(rng, count):
    return [
        (rng.integers(0, 50, rng.integers(0, Ranker.LONGEST + 1)), rng.integers(0, 30, 2))
        for _ in range(count)
    ]


def _ranker_batch(samples, labels):
    columns = list(zip(*samples, strict=True))
    return (
        KeyedJaggedTensor(
            keys=["h", "u"],
            values=torch.from_numpy(np.concatenate([ids for column in columns for ids in column])),
            lengths=torch.tensor([len(ids) for column in columns for ids in column]),
        ),
        torch.from_numpy(labels),
    )


@pytest.mark.slow
def test_a_model_with_sequences_learns_as_on_the_cpu():
    """Lengths vary from batch to batch and from device to device; the program's sizes do not."""
    torch.manual_seed(0)
    per_device, rng = 6, np.random.default_rng(3)
    models = [Ranker(), Ranker()]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        swap_embeddings(model, optimizer=adagrad(lr=0.2))
    cpu, ours = models
    longest = {"h": per_device * Ranker.LONGEST}
    example = _ranker_batch(_samples(rng, per_device), np.zeros(per_device, np.float32))
    layouts = aot.layouts(ours, num_devices=DEVICES, cores_per_device=CORES, batch_size=per_device)
    capacities = {
        fqn: {s.name: Capacity(max_ids=32, max_unique_ids=16) for s in layout.stacks}
        for fqn, layout in layouts.items()
    }
    dense = adagrad(lr=0.1)
    program = trace(
        ours, example, dense=dense, layouts=layouts, capacities=capacities, sequence_ids=longest
    )
    placement = Placement(
        ours,
        program,
        layouts=layouts,
        dense_optimizer=dense,
        batch_size=per_device,
        sequence_ids=longest,
    )
    eager = torch.optim.Adagrad(cpu.linear.parameters(), lr=0.1)
    with Emulator(program) as emulator:
        driver = Driver(program, emulator, placement.state(), operands=placement.operands)
        for _ in range(4):
            samples = _samples(rng, DEVICES * per_device)
            labels = rng.integers(0, 2, len(samples)).astype(np.float32)
            eager.zero_grad()
            loss = cpu(_ranker_batch(samples, labels))
            loss.backward()
            eager.step()
            parts = [slice(d * per_device, (d + 1) * per_device) for d in range(DEVICES)]
            results = driver.step(
                placement.feed([_ranker_batch(samples[part], labels[part]) for part in parts])
            )
            np.testing.assert_allclose(np.asarray(results["loss"]), loss.item(), rtol=1e-5)
        placement.write(driver.state, num_steps=driver.num_batches)
    for (name, got), want in zip(ours.named_parameters(), cpu.parameters(), strict=True):
        np.testing.assert_allclose(got.detach(), want.detach(), rtol=1e-4, atol=1e-6, err_msg=name)


# ------------------------------------------------------------------------------------------ driver


def _record(program):
    """A runner that returns its arguments as results, and keeps what it was called with."""
    calls = []

    def execute(arguments):
        calls.append(dict(arguments))
        return {r.name: arguments.get(r.name, np.float32(len(calls))) for r in program.results}

    return calls, execute


def _feed(program, number):
    def value(argument):
        shape = (DEVICES, *argument.shape)
        return np.full(shape, number, np.float32 if argument.dtype == "f32" else np.int32)

    by_kind = {
        kind: {
            a.name: value(a)
            for a in program.arguments
            if a.kind == kind and "/update_buffer:" not in a.name
        }
        for kind in ("buffer", "input")
    }
    return Feed(buffers=by_kind["buffer"], inputs=by_kind["input"])


def _state(program):
    kinds = ("table", "slot", "dense", "dense_slot")
    return {a.name: np.float32(0) for a in program.arguments if a.kind in kinds}


def _operands(program):
    names = [a.name for a in program.arguments if a.kind in ("operand", "dense_operand")]
    return lambda step: dict.fromkeys(names, float(step))


def test_each_batch_meets_every_stage_once_with_its_own_operands(program):
    calls, execute = _record(program)
    driver = Driver(program, execute, _state(program), operands=_operands(program))
    num_batches = 4
    results = list(driver.run(_feed(program, n) for n in range(1, num_batches + 1)))
    assert len(results) == num_batches
    lag = 2 if program.mode == "pipelined" else 0
    assert len(calls) == num_batches + lag

    def seen(suffix):
        (name,) = [a.name for a in program.arguments if a.name.endswith(suffix)]
        return [np.asarray(call[name]).flat[0] for call in calls]

    filled = list(range(1, num_batches + 1))
    pad = 2**31 - 1
    assert seen("a+b/buffer:sample_ids") == filled + [pad] * lag
    assert seen("a+b/operand:lr") == [0] * lag + filled
    if lag:
        assert seen("a+b/update_buffer:sample_ids") == [pad] * lag + filled
        assert seen("input/labels") == [0, *filled, 0]
        assert seen(ACTIVE) == [0, 1, 1, 1, 1, 0]
        assert seen("dense_operand/lr_t") == [0, *filled, 0]
    else:
        assert seen("input/labels") == filled
    assert driver.drain() == []


def test_an_incomplete_state_or_feed_is_refused(program):
    state = _state(program)
    removed = state.popitem()[0]
    with pytest.raises(ProgramError, match=re.escape(f"lacks ['{removed}']")):
        Driver(program, dict, state, operands=_operands(program))
    _, execute = _record(program)
    driver = Driver(program, execute, _state(program), operands=_operands(program))
    feed = _feed(program, 1)
    name = next(iter(feed.buffers))
    with pytest.raises(ProgramError, match="has shape"):
        driver.step(dataclasses.replace(feed, buffers={**feed.buffers, name: np.zeros(3)}))


# --------------------------------------------------------------------------------------- full size

FULL = """
import resource, sys, time
from torchrec_tpu import aot, recipes
from torchrec_tpu.recipes import dlrm_v2_mlperf
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
program = aot.trace_recipe(dlrm_v2_mlperf(), num_devices=64, cores_per_device=2,
                           global_batch_size=65536)
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
print(grown, program.expected.alias_bytes, *program.expected.collectives[0],
      program.expected.num_lookups, sum(s.rows for s in program.stacks))
"""


@pytest.mark.slow
def test_the_benchmarks_209_gb_are_traced_in_a_few_hundred_mb():
    result = subprocess.run(
        [sys.executable, "-c", FULL], capture_output=True, text=True, check=True
    )
    grown, alias, kind, reduced, lookups, rows = result.stdout.split()
    recipe = recipes.dlrm_v2_mlperf()
    tables = sum(-(-f.num_embeddings // (8 * 128)) * 8 * 2 for f in recipe.features)
    dense = 16_044_545  # parameters outside the tables
    assert int(rows) == tables
    assert int(alias) == 2 * 4 * (tables * 128 + dense)
    assert (kind, int(reduced)) == ("all_reduce", 4 * (dense + 1))
    assert int(lookups) == 4
    assert int(grown) < 1000  # MB, much of it torch itself
