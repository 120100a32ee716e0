"""Click data as TorchRec batches.

Which one do I want?

- `ml_100k()`: 100,000 real ratings, small, converges in seconds. Needs the recbole wheel or a path.
- `CriteoFile`: Criteo TSV or CSV (also .gz), streamed in bounded memory.
- `Synthetic`: endless batches with the table sizes, bag lengths and skew that you choose.
- `InMemory`: arrays of your own.

All are `BatchStream`s: `batches(epoch, start=n)` is a pure function of the seed, the epoch and n,
so a run continues at any batch with the batches that it would have seen.
"""

from torchrec_tpu.datasets.criteo import CRITEO_DENSE_KEYS, CRITEO_KEYS, CriteoFile
from torchrec_tpu.datasets.movielens import ml_100k
from torchrec_tpu.datasets.stream import (
    Bags,
    BatchStream,
    DataFormatError,
    DataNotFoundError,
    InMemory,
    hash_to_row,
    part_of,
)
from torchrec_tpu.datasets.synthetic import MultiHot, Synthetic

__all__ = [
    "CRITEO_DENSE_KEYS",
    "CRITEO_KEYS",
    "Bags",
    "BatchStream",
    "CriteoFile",
    "DataFormatError",
    "DataNotFoundError",
    "InMemory",
    "MultiHot",
    "Synthetic",
    "hash_to_row",
    "ml_100k",
    "part_of",
]
