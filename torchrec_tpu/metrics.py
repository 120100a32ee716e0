"""What a run is judged by."""

import math

import numpy as np
import numpy.typing as npt


def roc_auc(labels_N: npt.ArrayLike, scores_N: npt.ArrayLike) -> float:
    """Exact area under the ROC curve: P(positive scores above negative), ties count half.

    From average ranks, in float64. NaN when one class is absent: the area is not defined then.

    Args:
        labels_N: 0 or 1.
        scores_N: anything that orders the samples; logits or probabilities.

    >>> roc_auc([1, 0, 1, 0], [0.9, 0.1, 0.4, 0.4])
    0.875
    """
    positive_N = np.asarray(labels_N) > 0.5
    scores_N = np.asarray(scores_N)
    if positive_N.shape != scores_N.shape or positive_N.ndim != 1:
        raise ValueError(
            f"labels {positive_N.shape} and scores {scores_N.shape}: need two vectors of one length"
        )
    if np.isnan(scores_N).any():
        raise ValueError("scores have NaN among them, which no ranking can place")
    num_positive = int(np.count_nonzero(positive_N))
    num_negative = len(positive_N) - num_positive
    if not num_positive or not num_negative:
        return math.nan
    _, index_N, counts = np.unique(scores_N, return_inverse=True, return_counts=True)
    ranks_N = (np.cumsum(counts) - (counts - 1) / 2)[index_N]  # 1-based, averaged over ties
    wins = ranks_N[positive_N].sum() - num_positive * (num_positive + 1) / 2
    return float(wins / (num_positive * num_negative))
