"""Any TorchRec model: swap its embedding collections, get the same outputs, go on training."""

import copy

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

import torchrec_tpu


class Recommender(torch.nn.Module):
    """A model written for TorchRec; it knows nothing of SparseCores."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name="t_user", num_embeddings=1000, embedding_dim=16, feature_names=["user"]
                ),
                EmbeddingBagConfig(
                    name="t_film",
                    num_embeddings=500,
                    embedding_dim=16,
                    feature_names=["film", "watched"],
                    pooling=PoolingType.MEAN,
                ),
            ]
        )
        self.head = torch.nn.Linear(48, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Logits (B, 1)."""
        logits: torch.Tensor = self.head(self.tables(features).values())
        return logits


def main() -> None:
    """Swaps, compares outputs and one training step, prints the report."""
    torch.manual_seed(0)
    plain = Recommender()
    swapped = copy.deepcopy(plain)
    report = torchrec_tpu.swap_embeddings(swapped, optimizer=torchrec_tpu.sgd(lr=0.1))
    print(report)

    features = KeyedJaggedTensor(  # two samples: a user, a film, films watched before
        keys=["user", "film", "watched"],
        values=torch.tensor([7, 8, 42, 43, 1, 2, 3]),
        lengths=torch.tensor([1, 1, 1, 1, 3, 0]),
    )
    torch.testing.assert_close(swapped(features), plain(features))
    print("\nthe same outputs")

    swapped(features).sum().backward()  # updates the tables
    plain(features).sum().backward()
    torch.optim.SGD(plain.tables.parameters(), lr=0.1).step()
    torch.testing.assert_close(swapped.state_dict(), plain.state_dict())
    print("the same weights after a step, under the same names:")
    print("\n".join(f"  {name}" for name in swapped.state_dict()))


if __name__ == "__main__":
    main()
