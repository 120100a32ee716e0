"""The JAX side of benchmarks/aot.py: DLRM v2 on jax-tpu-embedding, compiled without a TPU.

    python benchmarks/aot_baseline.py DIRECTORY

Reads DIRECTORY/request.json (what benchmarks/aot.py writes: slice, model, stacks and their limits),
compiles one training step for all devices with abstract arguments, and writes
DIRECTORY/result.json. The scheduled program is in the dump that XLA_FLAGS asks for. Needs jax,
jax_tpu_embedding and libtpu, and nothing of this package.

The step is written with the library's public functions: `stack_tables`, `tpu_sparse_dense_matmul`
and `tpu_sparse_dense_matmul_grad` under shard_map, the dense part data parallel under jit, in one
program. Tables, their state, dense parameters and their state are donated. pipelined: update of
batch t, dense part of t + 1, lookup of t + 2, with stacked activations and gradients handed on, and
(un)stacking in the dense part, where the library's documentation wants it. (The library's own
`auto_pipelining` loses the donation of the tables, so it would be no fair measure.)

Legend: B samples of all devices, D row width, E width of all features side by side.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax_tpu_embedding.sparsecore.lib.nn import embedding, embedding_spec, table_stacking
from jax_tpu_embedding.sparsecore.utils import utils

NO_LIMIT = 1 << 40  # bytes of activations: the stacks are given


def feature_specs(request: dict[str, Any], num_devices: int) -> dict[str, Any]:
    """Features with the stacks and limits of the request."""
    cores = request["cores_per_device"]
    batch, dim = request["global_batch_size"], request["embedding_dim"]
    specs = {
        feature["key"]: embedding_spec.FeatureSpec(
            name=feature["key"],
            table_spec=embedding_spec.TableSpec(
                name=feature["table"],
                vocabulary_size=feature["num_embeddings"],
                embedding_dim=dim,
                initializer=jax.nn.initializers.zeros,
                combiner="sum",
                optimizer=embedding_spec.AdagradOptimizerSpec(learning_rate=request["lr"]),
            ),
            input_shape=(batch, feature["num_ids"]),
            output_shape=(batch, dim),
        )
        for feature in request["features"]
    }
    for stack in request["stacks"]:
        if len(stack["tables"]) > 1:
            table_stacking.stack_tables(
                specs,
                stack["tables"],
                num_devices,
                cores,
                stack_name=stack["name"],
                activation_mem_bytes_limit=NO_LIMIT,
            )
    embedding.prepare_feature_specs_for_training(
        specs, global_device_count=num_devices, num_sc_per_device=cores
    )
    # A table that stays alone gets a stack of its own name.
    names = {
        stack["name"] if len(stack["tables"]) > 1 else stack["tables"][0]: stack
        for stack in request["stacks"]
    }
    embedding.update_preprocessing_parameters(
        specs,
        embedding.SparseDenseMatmulInputStats(
            max_ids_per_partition={n: np.array([s["max_ids"]]) for n, s in names.items()},
            max_unique_ids_per_partition={
                n: np.array([s["max_unique_ids"]]) for n, s in names.items()
            },
            required_buffer_size_per_sc={
                n: np.full(cores, s["slots_per_device"] // cores) for n, s in names.items()
            },
        ),
        cores,
    )
    found = embedding.get_stacked_table_specs(specs)
    assert found.keys() == names.keys(), (sorted(found), sorted(names))
    for name, spec in found.items():
        wanted = names[name]
        got = (
            spec.stack_vocab_size // num_devices,
            int(spec.total_sample_count) // num_devices,
            spec.max_ids_per_partition,
            spec.max_unique_ids_per_partition,
            spec.suggested_coo_buffer_size_per_device,
        )
        keys = ("rows", "samples", "max_ids", "max_unique_ids", "slots_per_device")
        assert got == tuple(wanted[key] for key in keys), (name, got, wanted)
    return specs


def dense_shapes(request: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    width = request["embedding_dim"] * (1 + len(request["features"]))
    for name, first, sizes in (
        ("dense_arch", request["num_dense"], request["dense_arch"]),
        ("over_arch", width, request["over_arch"]),
    ):
        for layer, (ins, outs) in enumerate(zip([first, *sizes], sizes, strict=False)):
            shapes[f"{name}.{layer}.weight"] = (ins, outs)
            shapes[f"{name}.{layer}.bias"] = (outs,)
    for layer in range(request["dcn_layers"]):
        shapes[f"cross.{layer}.v"] = (width, request["dcn_rank"])
        shapes[f"cross.{layer}.w"] = (request["dcn_rank"], width)
        shapes[f"cross.{layer}.bias"] = (width,)
    return shapes


def mlp(parameters: dict[str, Any], name: str, x: Any, *, num_layers: int, last: bool) -> Any:
    """Linear layers with ReLU; without one after the last if `last`."""
    for layer in range(num_layers):
        x = x @ parameters[f"{name}.{layer}.weight"] + parameters[f"{name}.{layer}.bias"]
        if not (last and layer == num_layers - 1):
            x = jax.nn.relu(x)
    return x


def mean_loss(
    parameters: dict[str, Any],
    rows: dict[str, Any],
    dense: dict[str, Any],
    *,
    request: dict[str, Any],
) -> Any:
    """DLRM v2: bottom MLP, low-rank cross net, top MLP, cross entropy of the logits."""
    layers = functools.partial(mlp, parameters)
    bottom = layers("dense_arch", dense["x"], num_layers=len(request["dense_arch"]), last=False)
    features = [rows[feature["key"]] for feature in request["features"]]
    first = x_BE = jnp.concatenate([bottom, *features], axis=1)
    for layer in range(request["dcn_layers"]):
        v, w, bias = (parameters[f"cross.{layer}.{part}"] for part in ("v", "w", "bias"))
        x_BE = first * ((x_BE @ v) @ w + bias) + x_BE
    logits = layers("over_arch", x_BE, num_layers=len(request["over_arch"]), last=True)[:, 0]
    loss = jnp.maximum(logits, 0) - logits * dense["y"] + jnp.log1p(jnp.exp(-jnp.abs(logits)))
    return jnp.mean(loss)


def dense_step(rows: Any, dense: Any, state: Any, *, request: dict[str, Any]) -> Any:
    """(gradients of rows, loss, new dense state), Adagrad with eps outside the root."""
    parameters, sums = state
    loss, (gradients, of_rows) = jax.value_and_grad(
        functools.partial(mean_loss, request=request), argnums=(0, 1)
    )(parameters, rows, dense)
    sums = jax.tree.map(lambda s, g: s + g * g, sums, gradients)
    parameters = jax.tree.map(
        lambda p, g, s: p - request["lr"] * g / (jnp.sqrt(s) + request["eps"]),
        parameters,
        gradients,
        sums,
    )
    return of_rows, loss, (parameters, sums)


def lower(request: dict[str, Any]) -> Any:
    """The step, lowered for all devices of the slice."""
    topology = topologies.get_topology_desc(topology_name=request["topology"], platform="tpu")
    num_devices = len(topology.devices)
    mesh = topologies.make_mesh(topology, (num_devices,), ("x",))
    specs = feature_specs(request, num_devices)
    stacks = embedding.get_stacked_table_specs(specs)
    batch, dim = request["global_batch_size"], request["embedding_dim"]
    is_pipelined = request["mode"] == "pipelined"

    split, same = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    row_format = utils.embedding_table_format(mesh, P("x", None))

    def array(shape: Sequence[int], sharding: Any, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)

    buffers = jax.tree.map(
        lambda s: array(s.shape, split, s.dtype),
        embedding.eval_preprocess_sparse_dense_matmul_input_shape(
            specs, num_devices, num_devices, num_sc_per_device=request["cores_per_device"]
        ),
    )
    variables = {
        name: embedding.EmbeddingVariables(
            table=array((spec.stack_vocab_size, dim), row_format),
            slot=embedding_spec.AdagradSlotVariables(
                accumulator=array((spec.stack_vocab_size, dim), row_format)
            ),
        )
        for name, spec in stacks.items()
    }
    parameters = {name: array(shape, same) for name, shape in dense_shapes(request).items()}
    state = (parameters, parameters)
    dense = {"x": array((batch, request["num_dense"]), split), "y": array((batch,), split)}

    over_devices = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    options = {
        "feature_specs": specs,
        "global_device_count": num_devices,
        "num_sc_per_device": request["cores_per_device"],
    }
    data, rows = P("x"), P("x", None)
    lookup = over_devices(
        functools.partial(
            embedding.tpu_sparse_dense_matmul, perform_unstacking=not is_pipelined, **options
        ),
        in_specs=(data, rows),
        out_specs=data,
    )
    update = over_devices(
        functools.partial(
            embedding.tpu_sparse_dense_matmul_grad, perform_stacking=not is_pipelined, **options
        ),
        in_specs=(data, data, rows),
        out_specs=rows,
    )
    unstack = over_devices(
        functools.partial(embedding.unstack_embedding_activations, **options),
        in_specs=(data,),
        out_specs=data,
    )
    stack = over_devices(
        functools.partial(embedding.stack_embedding_gradients, **options),
        in_specs=(data,),
        out_specs=data,
    )
    table_formats = jax.tree.map(lambda _: row_format, variables)
    state_shardings = jax.tree.map(lambda _: same, state)
    train = functools.partial(dense_step, request=request)

    if not is_pipelined:

        def exact(buffers: Any, dense: Any, state: Any, variables: Any) -> Any:
            gradients, loss, state = train(lookup(buffers, variables), dense, state)
            return loss, state, update(gradients, buffers, variables)

        step = jax.jit(
            exact, donate_argnums=(2, 3), out_shardings=(same, state_shardings, table_formats)
        )
        return step.lower(buffers, dense, state, variables)

    carried = {
        name: array((int(spec.total_sample_count), dim), row_format)
        for name, spec in stacks.items()
    }

    def pipelined(old: Any, new: Any, dense: Any, state: Any, variables: Any, carry: Any) -> Any:
        activations, gradients = carry
        variables = update(gradients, old, variables)
        of_rows, loss, state = train(unstack(activations), dense, state)
        return loss, state, variables, (lookup(new, variables), stack(of_rows))

    carry_formats = jax.tree.map(lambda _: row_format, (carried, carried))
    step = jax.jit(
        pipelined,
        donate_argnums=(3, 4, 5),
        out_shardings=(same, state_shardings, table_formats, carry_formats),
    )
    return step.lower(buffers, buffers, dense, state, variables, (carried, carried))


def main(directory: Path) -> None:
    lowered = lower(json.loads((directory / "request.json").read_text()))
    started = time.monotonic()
    compiled = lowered.compile()
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    result = {
        "memory": {
            name: getattr(memory, f"{name}_size_in_bytes")
            for name in ("argument", "output", "alias", "temp", "generated_code")
        },
        "flops": cost["flops"],
        "seconds": round(time.monotonic() - started, 1),
        "versions": {
            name: metadata.version(name)
            for name in ("jax_tpu_embedding", "jax", "jaxlib", "libtpu")
        },
    }
    (directory / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
