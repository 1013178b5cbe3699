"""Words and tags joined as one observation."""

from __future__ import annotations

import torch

from .._checks import check_integers
from .sequences import Sequences


def tagged(data: Sequences) -> Sequences:
    """Words and tags as pairs ``(N, T, 2)``; -1 for the tags of data without labels.

    Args:
        data: Words ``(N, T)``; its labels, if there are some, are tags, -1 where not known.

    Raises:
        ValueError: If values are not one symbol a step, or labels are sets.

    Example:
        >>> data = Sequences.from_list([[3, 1]], labels=[[0, -1]])
        >>> tagged(data).values, tagged(data.without_labels()).values
        (tensor([[[ 3,  0],
                 [ 1, -1]]]), tensor([[[ 3, -1],
                 [ 1, -1]]]))
    """
    check_integers("values", data.values)
    if data.values.dim() != 2:
        raise ValueError(f"values must have shape (N, T); got {tuple(data.values.shape)}.")
    tags = torch.full_like(data.values, -1) if data.labels is None else data.labels
    if tags.dtype == torch.bool:
        raise ValueError("labels must be tags; got sets of them. Use -1 where a tag is not known.")
    pairs = torch.stack([data.values, tags.to(data.values.dtype)], -1)
    new = data.without_labels()
    new.values = pairs
    return new
