"""Tables to plan, for tests."""

from collections.abc import Sequence

from torchrec_tpu.sharding.cost import TableLoad
from torchrec_tpu.sharding.lookups import Lookups
from torchrec_tpu.sparsecore.layout import Table


def load_of(
    name: str,
    rows: int,
    dim: int,
    *,
    ids: Sequence[float] = (1.0,),
    samples_per_core: int = 32,
    num_cores: int = 16,
    exponent: float = 1.05,
    lookups: Lookups | None = None,
    combiner: str = "sum",
) -> TableLoad:
    """A table with Adagrad, of one feature for each number of ids."""
    return TableLoad(
        module="ebc",
        table=Table(
            name=name,
            num_embeddings=rows,
            embedding_dim=dim,
            combiner=combiner,
            features=tuple(f"f_{name}_{i}" for i in range(len(ids))),
        ),
        rule="adagrad",
        lookups=lookups
        or Lookups.power_law(
            rows,
            ids,
            samples_per_core=samples_per_core,
            num_cores=num_cores,
            exponent=exponent,
        ),
    )


def loads_of_sizes(
    sizes: Sequence[tuple[int, int]], *, ids: Sequence[float] = (1.0,), num_cores: int = 16
) -> list[TableLoad]:
    """Tables t0, t1, ... of (rows, dim)."""
    return [
        load_of(f"t{i}", rows, dim, ids=ids, num_cores=num_cores)
        for i, (rows, dim) in enumerate(sizes)
    ]
