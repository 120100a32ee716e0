"""A KJT as the arrays that a preprocessor reads, also when its keys have batch sizes of their own.

Legend: K keys, B samples, F features of a collection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_tpu.sparsecore.errors import KjtError, WeightsError


def arrays_of(features: KeyedJaggedTensor, *, weights: Tensor | None) -> dict[str, Any]:
    """The arguments of a `Preprocessor`'s call, sharing the KJT's memory.

    A KJT with a batch size per key gets empty bags at the end of the shorter keys; its values stay
    where they are.

    Args:
        features: on the CPU.
        weights: of its values; None to leave them out.

    Raises:
        KjtError: arrays on a device, or lengths that contradict the batch size.
    """
    keys = features.keys()
    lengths, offsets = features.lengths_or_none(), features.offsets_or_none()
    varies = features.variable_stride_per_key()
    if varies:
        lengths, offsets = _padded_lengths(features), None
    arrays = {
        "values": features.values(),
        "lengths": lengths,
        "offsets": offsets,
        "weights": weights,
    }
    for name, tensor in arrays.items():
        if tensor is not None and tensor.device.type != "cpu":
            raise KjtError(
                f"the KJT's {name} are on {tensor.device}; preprocessing reads them on cpu: "
                "pass kjt.to('cpu')"
            )
    if not varies and lengths is not None and lengths.numel() != features.stride() * len(keys):
        raise KjtError(
            f"the KJT has {lengths.numel()} lengths for {len(keys)} keys {keys} and batch size "
            f"{features.stride()}, expected {features.stride() * len(keys)}"
        )
    return {"keys": keys} | {
        name: None if tensor is None else tensor.detach().numpy() for name, tensor in arrays.items()
    }


def rows_of_samples(features: KeyedJaggedTensor) -> dict[str, Tensor] | None:
    """By key, the bag of each sample of the full batch: (B,); None when a bag is a sample.

    Raises:
        KjtError: the batch size varies per key and nothing says which bag a sample has.
    """
    inverse = features.inverse_indices_or_none()
    if inverse is None:
        if features.variable_stride_per_key():
            raise KjtError(
                "the KJT has a batch size per key but no inverse_indices, which say which bag of a "
                "key belongs to a sample"
            )
        return None
    names, rows = inverse
    return dict(zip(names, rows.reshape(len(names), -1), strict=True))


def select_bags(sequences: JaggedTensor, bags: Tensor) -> JaggedTensor:
    """The sequences of the chosen bags, one behind the other; a bag may be chosen again.

    >>> sequences = JaggedTensor(torch.tensor([[1.0], [2.0], [3.0]]), lengths=torch.tensor([1, 2]))
    >>> select_bags(sequences, torch.tensor([1, 0, 1])).values().view(-1)
    tensor([2., 3., 1., 2., 3.])
    """
    lengths = sequences.lengths()
    chosen = lengths.index_select(0, bags)
    ends = torch.cumsum(chosen, 0)
    shifts = (torch.cumsum(lengths, 0) - lengths).index_select(0, bags) - (ends - chosen)
    ids = torch.repeat_interleave(shifts, chosen) + torch.arange(int(chosen.sum()))
    weights = sequences.weights_or_none()
    return JaggedTensor(
        values=sequences.values().index_select(0, ids),
        lengths=chosen,
        weights=None if weights is None else weights.index_select(0, ids),
    )


def usable_weights(weights: Tensor | None, *, is_weighted: bool) -> Tensor | None:
    """A KJT's weights, when a fused update can do with them.

    Raises:
        WeightsError: they ask for a gradient.
    """
    is_differentiated = weights is not None and weights.requires_grad
    if is_weighted and is_differentiated and torch.is_grad_enabled():
        raise WeightsError(
            "the KJT's weights require a gradient, which a fused update does not compute; "
            "detach them, or keep this collection in TorchRec"
        )
    return weights


def _padded_lengths(features: KeyedJaggedTensor) -> Tensor:
    """(K * B) lengths, B being the most bags of a key."""
    strides = features.stride_per_key()
    lengths = features.lengths()
    padded = lengths.new_zeros(len(strides), max(strides, default=0))
    for row, bags in zip(padded, torch.split(lengths, strides), strict=True):
        row[: len(bags)] = bags
    return padded.reshape(-1)
