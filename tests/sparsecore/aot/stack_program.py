"""A program of lookups and updates only, with its arguments and what they must give."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchrec_tpu.sparsecore import Combiner, Layout, Table, make_layout
from torchrec_tpu.sparsecore.aot import adapter, lowering
from torchrec_tpu.sparsecore.aot.pipeline import pack_stack, unpack_stack
from torchrec_tpu.sparsecore.aot.program import Argument, Expected, Program, Result
from torchrec_tpu.sparsecore.backends.reference import ReferenceBackend
from torchrec_tpu.sparsecore.batch import PAD_ID, SparseBatch, StackBuffers, pointers_per_core
from torchrec_tpu.sparsecore.capacity import Capacity
from torchrec_tpu.sparsecore.optimizers import OptimizerSpec
from torchrec_tpu.sparsecore.preprocess import Preprocessor

BATCH_SIZE = 14  # of all devices
ROLES = ("row_pointers", "embedding_ids", "sample_ids", "gains")
MAX_MINIBATCHES = 64  # what row_pointers have room for


def make(num_devices: int, cores_per_device: int, *, dim: int = 6) -> Layout:
    """Two stacks: two tables of which one feeds two features, and one table."""
    tables = [
        Table(
            name="a", num_embeddings=50, embedding_dim=dim, combiner=Combiner.SUM, features=("f",)
        ),
        Table(
            name="b", num_embeddings=97, embedding_dim=dim, combiner=Combiner.MEAN,
            features=("g", "h"),
        ),
        Table(
            name="c", num_embeddings=31, embedding_dim=16, combiner=Combiner.SQRTN,
            features=("k",),
        ),
    ]  # fmt: skip
    return make_layout(
        tables, num_devices=num_devices, cores_per_device=cores_per_device, stacks=[["a", "b"]]
    )


@dataclass
class Case:
    """One batch on one layout, tables and state, and the gradient of the activations."""

    layout: Layout
    spec: OptimizerSpec
    batch: SparseBatch
    tables: dict[str, np.ndarray]
    slots: dict[str, list[np.ndarray]]
    grads: list[np.ndarray]  # by stack, (G, B, D)
    limits: dict[str, Capacity]

    @classmethod
    def of(cls, layout: Layout, spec: OptimizerSpec, *, seed: int = 0) -> "Case":
        rng = np.random.default_rng(seed)
        keys = [feature.key for feature in layout.features]
        lengths = rng.integers(0, 6, len(keys) * BATCH_SIZE).astype(np.int32)
        values = []
        for feature, part in zip(layout.features, lengths.reshape(len(keys), -1), strict=True):
            rows = layout.stacked_table(feature.table).table.num_embeddings
            values.append((rng.random(part.sum()) ** 2 * rows).astype(np.int32))
        limits = {s.name: Capacity(max_ids=104, max_unique_ids=72) for s in layout.stacks}
        batch = Preprocessor(layout, capacity=limits, is_weighted=True)(
            keys,
            np.concatenate(values),
            lengths=lengths,
            weights=rng.uniform(0.5, 2, int(lengths.sum())).astype(np.float32),
        )
        shapes = {t.name: (t.num_embeddings, t.embedding_dim) for t in layout.tables}

        def floats(shape: tuple[int, ...]) -> np.ndarray:
            return rng.uniform(0.1, 1, shape).astype(np.float32)

        return cls(
            layout=layout,
            spec=spec,
            batch=batch,
            tables={name: floats(shape) for name, shape in shapes.items()},
            slots={
                name: [floats(slot.shape(*shape)) for slot in spec.rule.slots]
                for name, shape in shapes.items()
            },
            grads=[
                floats((layout.num_devices, samples, stack.dim)) - 0.5
                for stack, samples in zip(layout.stacks, _samples(layout, batch), strict=True)
            ],
            limits=limits,
        )

    def program(self, *, is_minibatched: bool = False) -> Program:
        return program(self, is_minibatched=is_minibatched)

    def arguments(self, *, num_minibatches: int | None = None) -> dict[str, np.ndarray]:
        layout, values = self.layout, {}
        for index, stack in enumerate(layout.stacks):
            values[f"{stack.name}/table"] = pack_stack(layout, stack, self.tables)
            for at, slot in enumerate(self.spec.rule.slots):
                arrays = {name: arrays[at] for name, arrays in self.slots.items()}
                values[f"{stack.name}/slot:{slot.name}"] = pack_stack(layout, stack, arrays)
            buffers = per_device(self.batch.stacks[index], layout)
            if num_minibatches is not None:
                buffers = [split(one, layout, num_minibatches) for one in buffers]
                values[f"{stack.name}/num_minibatches"] = np.full(
                    layout.num_devices, num_minibatches, np.int32
                )
            for role in ROLES:
                values[f"{stack.name}/{role}"] = np.stack([getattr(b, role) for b in buffers])
            values[f"{stack.name}/grad"] = self.grads[index]
        for name, value in zip(self.spec.rule.operands, self.spec.operands(3), strict=True):
            values[name] = np.float32(value)
        return values

    def expected(self) -> dict[str, np.ndarray]:
        """Activations and logical arrays by the reference backend, on NumPy."""
        layout, batch = self.layout, self.batch
        geometry = layout.geometry(batch)
        order = [t.table.name for t in layout.stack_order_tables]
        tables = [self.tables[name].copy() for name in order]
        slots = [[slot.copy() for slot in self.slots[name]] for name in order]
        width = sum(layout.stacked_table(f.table).table.embedding_dim for f in layout.features)
        out = np.zeros((BATCH_SIZE, width), np.float32)
        reference = ReferenceBackend()
        reference.lookup(batch.stacks, tables, geometry, out.reshape(-1))
        grad = self._by_sample([g.reshape(layout.num_cores, -1, g.shape[-1]) for g in self.grads])
        operands = np.tile(np.asarray(self.spec.operands(3)), (len(order), 1))
        reference.update(
            grad.reshape(-1), batch.stacks, tables, slots, operands, geometry,
            self.spec.rule.name, None,
        )  # fmt: skip
        arrays = {"activations": out}
        for name, table, of_table in zip(order, tables, slots, strict=True):
            arrays[name] = table
            for slot, array in zip(self.spec.rule.slots, of_table, strict=True):
                arrays[f"{name}/{slot.name}"] = array
        return arrays

    def logical(self, results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A program's results in the form of `expected`."""
        layout = self.layout
        activations = [results[f"{stack.name}/activations"] for stack in layout.stacks]
        arrays = {
            "activations": self._by_sample(
                [a.reshape(layout.num_cores, -1, a.shape[-1]) for a in activations]
            )
        }
        for stack in layout.stacks:
            arrays |= unpack_stack(layout, stack, results[f"{stack.name}/table"])
            for slot in self.spec.rule.slots:
                packed = results[f"{stack.name}/slot:{slot.name}"]
                logical = unpack_stack(layout, stack, packed)
                arrays |= {f"{name}/{slot.name}": array for name, array in logical.items()}
        return arrays

    def _by_sample(self, stacks: list[np.ndarray]) -> np.ndarray:
        """(batch, all features) from each stack's (P, samples of a core, D)."""
        geometry = self.layout.geometry(self.batch)
        out = np.zeros((BATCH_SIZE, geometry.features[0].out_stride), np.float32)
        for table in geometry.tables:
            for feature in geometry.features[table.first_feature :][: table.num_features]:
                core, row = np.divmod(np.arange(BATCH_SIZE), feature.samples_per_core)
                columns = slice(feature.out_offset, feature.out_offset + table.dim)
                vectors = stacks[table.stack][core, feature.sample_offset + row, : table.dim]
                out[:, columns] = vectors
        return out


def _samples(layout: Layout, batch: SparseBatch) -> list[int]:
    """Rows of one device's activations of each stack."""
    per_core = iter(batch.samples_per_core)
    return [
        layout.cores_per_device * sum(next(per_core) for _ in stack.features)
        for stack in layout.stacks
    ]


def program(case: Case, *, is_minibatched: bool) -> Program:
    """Looks every stack up and updates it, as `lowering` writes it."""
    layout, rule = case.layout, case.spec.rule
    devices, cores = layout.num_devices, layout.cores_per_device
    arguments: list[Argument] = []
    with adapter.mlir() as mlir:
        f32, s32 = mlir.ir.F32Type.get(), mlir.ir.IntegerType.get_signless(32)
        types: list[Any] = []

        def add(name: str, shape: tuple[int, ...], element: Any = f32, **facts: Any) -> None:
            dtype = "f32" if element == f32 else "s32"
            facts = {"kind": "buffer", "donated": False, "sharded": True} | facts
            arguments.append(Argument(name=name, shape=shape, dtype=dtype, **facts))
            types.append(mlir.ir.RankedTensorType.get(list(shape), element))

        for operand in rule.operands:
            add(operand, (), kind="operand", sharded=False)
        for stack, grad, buffers in zip(layout.stacks, case.grads, case.batch.stacks, strict=True):
            shape = (cores * stack.rows_per_core, stack.dim)
            add(f"{stack.name}/table", shape, kind="table", donated=True)
            for slot in rule.slots:
                name = f"{stack.name}/slot:{slot.name}"
                add(name, slot.shape(*shape), kind="slot", donated=True)
            pointers = cores * pointers_per_core(layout.num_cores)
            slots = len(buffers.embedding_ids) // devices
            if is_minibatched:
                add(f"{stack.name}/num_minibatches", (), s32)
                pointers, slots = pointers * MAX_MINIBATCHES, 2 * slots
            add(f"{stack.name}/row_pointers", (pointers,), s32)
            add(f"{stack.name}/embedding_ids", (slots,), s32)
            add(f"{stack.name}/sample_ids", (slots,), s32)
            add(f"{stack.name}/gains", (slots,))
            add(f"{stack.name}/grad", grad.shape[1:], kind="input")

        module = mlir.ir.Module.parse(
            f"module attributes {{mhlo.num_replicas = {devices} : i32, "
            "mhlo.num_partitions = 1 : i32} {}"
        )
        with mlir.ir.InsertionPoint(module.body):
            main = mlir.func.FuncOp("main", (types, []))
            block = main.add_entry_block()
        values = dict(zip([a.name for a in arguments], block.arguments, strict=True))
        results: dict[str, Any] = {}
        with mlir.ir.InsertionPoint(block):
            for index, stack in enumerate(layout.stacks):
                buffers = lowering.Buffers(
                    **{role: values[f"{stack.name}/{role}"] for role in ROLES},
                    num_minibatches=values.get(f"{stack.name}/num_minibatches"),
                )
                limit = case.limits[stack.name]
                limits = lowering.Limits(max_ids=limit.max_ids, max_unique_ids=limit.max_unique_ids)
                names = [
                    f"{stack.name}/table",
                    *(f"{stack.name}/slot:{s.name}" for s in rule.slots),
                ]
                table, *slots = (values[name] for name in names)
                grad = values[f"{stack.name}/grad"]
                results[f"{stack.name}/activations"] = lowering.lookup(
                    mlir, buffers, table, samples=grad.type.shape[0], limits=limits
                )
                new = lowering.update(
                    mlir, module, buffers, grad, table, slots,
                    [values[operand] for operand in rule.operands],
                    rule=rule, limits=limits, name=f"rule_{index}",
                    logical_dim=stack.tables[0].table.embedding_dim,
                )  # fmt: skip
                results |= dict(zip(names, new, strict=True))
            mlir.func.ReturnOp(list(results.values()))
        main.attributes["function_type"] = mlir.ir.TypeAttr.get(
            mlir.ir.FunctionType.get(types, [value.type for value in results.values()])
        )
        position = {argument.name: index for index, argument in enumerate(arguments)}
        main.arg_attrs = mlir.ir.ArrayAttr.get(
            [
                mlir.ir.DictAttr.get(
                    {
                        "tf.aliasing_output": mlir.ir.IntegerAttr.get(
                            s32, list(results).index(a.name)
                        )
                    }
                    if a.donated
                    else {}
                )
                for a in arguments
            ]
        )
        return Program(
            text=str(module),
            arguments=tuple(arguments),
            results=tuple(
                Result(
                    name=name,
                    kind="output" if name not in position else arguments[position[name]].kind,
                    shape=tuple(value.type.shape),
                    dtype="f32",
                    aliases=position.get(name),
                )
                for name, value in results.items()
            ),
            stacks=(),
            num_devices=devices,
            cores_per_device=cores,
            mode="exact",
            expected=Expected(
                num_lookups=len(layout.stacks),
                num_updates=len(layout.stacks),
                collectives=(),
                alias_bytes=sum(a.num_bytes for a in arguments if a.donated),
            ),
        )


def per_device(buffers: StackBuffers, layout: Layout) -> list[StackBuffers]:
    """One device's part of the buffers of all."""
    parts = [np.split(getattr(buffers, role), layout.num_devices) for role in ROLES]
    return [
        StackBuffers(**dict(zip(ROLES, part, strict=True))) for part in zip(*parts, strict=True)
    ]


def split(buffers: StackBuffers, layout: Layout, num_minibatches: int) -> StackBuffers:
    """One device's buffers with the ids dealt out to minibatches by row."""
    cores, width = layout.cores_per_device, pointers_per_core(layout.num_cores)
    pointers = buffers.row_pointers.reshape(cores, width)
    first_slot = np.arange(cores) * (len(buffers.embedding_ids) // cores)
    size = 2 * len(buffers.embedding_ids)
    new_pointers = np.full(cores * MAX_MINIBATCHES * width, -12345, np.int32)  # unused: undefined
    ids, samples = np.full(size, PAD_ID, np.int32), np.full(size, PAD_ID, np.int32)
    gains = np.full(size, np.nan, np.float32)
    at = 0
    for core in range(cores):
        for minibatch in range(num_minibatches):
            line = (core * num_minibatches + minibatch) * width
            start = 0
            for partition in range(layout.num_cores):
                end = int(pointers[core, partition])
                for slot in first_slot[core] + np.arange(start, end):
                    if buffers.embedding_ids[slot] * 7 % 5 % num_minibatches == minibatch:
                        ids[at] = buffers.embedding_ids[slot]
                        samples[at], gains[at] = buffers.sample_ids[slot], buffers.gains[slot]
                        at += 1
                new_pointers[line + partition] = at
                at = -(-at // 8) * 8
                start = -(-end // 8) * 8
            new_pointers[line + layout.num_cores : line + width] = at
    return replace(
        buffers, row_pointers=new_pointers, embedding_ids=ids, sample_ids=samples, gains=gains
    )
