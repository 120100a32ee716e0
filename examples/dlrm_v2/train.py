"""Train DLRM v2 through the SparseCore path, and compare it with plain TorchRec.

    python examples/dlrm_v2/train.py --data ml-100k --compare-torchrec
    python examples/dlrm_v2/train.py --data criteo --path day_0.gz
    python examples/dlrm_v2/train.py --data synthetic --exponent 1.2

`torchrec-tpu train` is the same command for those who have the wheel only. What it does, in short:

    model = build_model(recipe)                                   # TorchRec's DLRM_DCN in DLRMTrain
    swap_embeddings(model, optimizer=recipe.table_optimizer)      # its tables, on SparseCores
    for batch in prepare(stream.batches(epoch), model):           # preprocessed ahead, in a thread
        loss, _ = model(batch)
        loss.backward()                                           # updates the tables on the way
        dense_optimizer.step()

The rest of `torchrec_tpu/training` measures, compares, saves and resumes.
"""

import sys

from torchrec_tpu.training import main

if __name__ == "__main__":
    sys.exit(main(description=(__doc__ or "").splitlines()[0]))
