"""Child process: what the device backends make of their calls. Arguments: request, answer (files).

The device is registered without a TPU, so that everything is traced and nothing is computed.
"""

import pickle
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrec_tpu.sparsecore.aot import adapter


def main(request: Path, answer: Path) -> None:
    adapter.register_device()
    warnings.simplefilter("ignore")
    import torch

    from torchrec_tpu import streams
    from torchrec_tpu.sharding import _compat
    from torchrec_tpu.sparsecore import backends, ops
    from torchrec_tpu.sparsecore.backends import tpu, xla
    from torchrec_tpu.sparsecore.geometry import Geometry
    from torchrec_tpu.sparsecore.optimizers import RULES

    asked = pickle.loads(request.read_bytes())
    types = {"i": torch.int32, "f": torch.float32}

    def traced(case: dict[str, Any]) -> str:
        """(buffers, tables, slots, grad, operands) -> (activations, tables and slots)."""
        name, ints, out_shape = case["rule"], case["geometry"], case["out_shape"]
        rule, geometry = RULES[name], Geometry.decode(ints)
        inputs = [(shape, types[kind]) for shape, kind in case["inputs"]]
        num_buffers, num_stacks = 4 * geometry.num_stacks, geometry.num_stacks

        def step(inputs: Sequence[Any]) -> list[Any]:
            rest = list(inputs)
            buffers, rest = rest[:num_buffers], rest[num_buffers:]
            # Copies, which the op must change in place; an argument may not change in a trace.
            tables, rest = [table.clone() for table in rest[:num_stacks]], rest[num_stacks:]
            slots, (grad, operands) = [slot.clone() for slot in rest[:-2]], rest[-2:]
            out = ops.sparse_dense_matmul(buffers, tables, ints, out_shape)
            if name == "sgd":
                ops.sparse_dense_matmul_update_(
                    grad, buffers, tables, slots, operands, ints, name, case["max_gradient"]
                )
                return [out, *tables]
            # As the op, but with the constants from here: a trace cannot copy operands to a device.
            calls = list(tpu.stack_calls(buffers, tables, geometry))
            results = [out]
            for index, (call, state) in enumerate(
                zip(calls, tpu.states_of(rule, calls, tables, slots), strict=True)
            ):
                dim = state[0].shape[1]
                stacked = tpu.stack_gradient(
                    call, grad, geometry.num_local_cores, dim=dim, limit=case["max_gradient"]
                )
                results += tpu.TpuBackend().update_stack(
                    call, stacked, state, operands[index], case["constants"], rule
                )
            return results

        return adapter.trace(step, inputs)

    texts = {name: traced(case) for name, case in asked["cases"].items()}
    pickle_me = {
        "texts": texts,
        "exported": {name: exported(xla, name, asked["xla"]) for name in asked["xla_rules"]},
        "exported_lookup": exported_lookup(xla, asked["xla"]),
        "fake": fake_shapes(xla, asked["xla"]),
        "backends": backends.describe(),
        "spmd_safe": spmd_safe(streams),
    }
    # In torch_tpu 0.2.0 this asks torch.accelerator, which asks torch.tpu.
    _compat.live_beside_torch_tpu()
    pickle_me["is_available"] = torch.accelerator.is_available()
    answer.write_bytes(pickle.dumps(pickle_me))


def shapes_of(name: str, asked: dict[str, Any]) -> list[Any]:
    """(buffers, grad, state, operands) of one stack."""
    from torchrec_tpu.sparsecore.optimizers import RULES

    rows, dim = asked["table"]
    slots = asked["slots"]
    return [
        [((asked["pointers"],), "int32"), *[((slots,), "int32")] * 2, ((slots,), "float32")],
        ((asked["samples"], dim), "float32"),
        [((rows, dim), "float32")]
        + [(slot.shape(rows, dim), "float32") for slot in RULES[name].slots],
        [((), "float32")] * len(RULES[name].operands),
    ]


def export(function: Any, shapes: Any, static: list[Any]) -> str:
    """As torch_tpu's jax_op does it."""
    import jax

    def array(value: Any) -> Any:
        return (
            [array(one) for one in value]
            if isinstance(value, list)
            else jax.ShapeDtypeStruct(*value)
        )

    arguments = [array(value) for value in shapes]
    static_argnums = tuple(range(len(arguments), len(arguments) + len(static)))
    text: str = jax.export.export(
        jax.jit(function, static_argnums=static_argnums, keep_unused=True),
        platforms=["tpu"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("ALL")],
    )(*arguments, *static).mlir_module()
    return text


def exported(xla: Any, name: str, asked: dict[str, Any]) -> str:
    limits = [asked["samples"], asked["max_ids"], asked["max_unique_ids"]]
    return export(xla.functions()[1], shapes_of(name, asked), [name, asked["mean_dim"], *limits])


def exported_lookup(xla: Any, asked: dict[str, Any]) -> str:
    buffers, _, (table, *_), _ = shapes_of("sgd", asked)
    limits = [asked["samples"], asked["max_ids"], asked["max_unique_ids"]]
    return export(xla.functions()[0], [buffers, table], limits)


def fake_shapes(xla: Any, asked: dict[str, Any]) -> list[tuple[int, ...]]:
    """The update as the torch op that torch_tpu makes of it, on tensors without memory."""
    import torch

    def tensor(value: Any) -> Any:
        if isinstance(value, list):
            return [tensor(one) for one in value]
        shape, dtype = value
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    results = xla.torch_ops()[1](
        *(tensor(value) for value in shapes_of("adam", asked)),
        "adam",
        asked["mean_dim"],
        asked["samples"],
        asked["max_ids"],
        asked["max_unique_ids"],
    )
    return [tuple(result.shape) for result in results]


def spmd_safe(streams: Any) -> tuple[bool, int]:
    def seven() -> int:
        return 7

    marked = streams.spmd_safe(seven)
    return marked is not seven and marked.__wrapped__ is seven, marked()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
