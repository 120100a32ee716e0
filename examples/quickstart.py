"""One training step: a TorchRec config, a SparseCore collection, a fused update."""

import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_tpu

tables = [
    EmbeddingBagConfig(name="t_genre", num_embeddings=19, embedding_dim=16, feature_names=["genre"])
]
bags = torchrec_tpu.SparseCoreEmbeddingBagCollection(tables, optimizer=torchrec_tpu.adagrad(lr=0.1))
dense = torch.nn.Linear(16, 1)
dense_optimizer = torch.optim.Adagrad(dense.parameters(), lr=0.1)

# Three films; the second has no genre.
films = KeyedJaggedTensor(
    keys=["genre"], values=torch.tensor([3, 4, 7]), lengths=torch.tensor([2, 0, 1])
)
liked = torch.tensor([[1.0], [0.0], [1.0]])
for step in range(3):
    loss = torch.nn.functional.binary_cross_entropy_with_logits(dense(bags(films).values()), liked)
    dense_optimizer.zero_grad()
    loss.backward()  # the tables are updated here, row by row: no .grad, no optimizer.step()
    dense_optimizer.step()
    print(f"step {step}: loss {float(loss.detach()):.4f}")
