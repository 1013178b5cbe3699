"""The arguments of ``Sequences``: what they may be."""

from __future__ import annotations

import math
import warnings
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._arrays import to_tensor
from .._checks import (
    check_floats,
    check_integers,
    check_real,
    check_shape,
    check_tensor,
    check_times,
)

FLAT = 16  # rows per column of a matrix from which on it looks like one series of vectors


def check_list(sequences: Any) -> None:
    """Raise if these are not several sequences; warn where rows may be steps."""
    if hasattr(sequences, "columns"):
        raise TypeError(
            f"sequences must be a list; got {type(sequences).__name__}, a table. Call "
            "Sequences.from_dataframe(frame, by=, columns=, time=)."
        )
    if not isinstance(sequences, np.ndarray | Tensor) or sequences.ndim != 2:
        return
    count, steps = sequences.shape
    if steps * FLAT <= count and to_tensor("sequences", sequences[:1]).dtype.is_floating_point:
        warnings.warn(
            f"sequences of shape {(count, steps)} are {count} sequences of {steps} numbers. For "
            f"one series of {count} vectors, call Sequences.from_concatenated(values); for short "
            "sequences, give list(values).",
            stacklevel=4,
        )


def check_values(values: Tensor) -> None:
    """Raise unless there are values ``(N, T, *E)``."""
    check_real("values", values)
    if values.dim() < 2 or 0 in values.shape[:2]:
        raise ValueError(
            "values must have shape (N, T, *E) with at least one sequence and one step; got "
            f"shape {tuple(values.shape)}. Add the dimension of sequences with unsqueeze(0)."
        )


def check_observed(values: Tensor, observed: Tensor) -> None:
    """Raise if an observed step is NaN throughout."""
    if not values.dtype.is_floating_point:
        return
    absent = values.flatten(2).isnan().all(-1) if values.dim() > 2 else values.isnan()
    if bool((absent & observed).any()):
        n, t = (absent & observed).nonzero()[0].tolist()
        raise ValueError(
            f"values holds NaN at sequence {n}, step {t}, which is marked as observed. "
            "Set observed to False there, or build with Sequences.from_list."
        )


def check_labels(labels: Tensor, shape: torch.Size) -> None:
    """Raise unless labels are states, or sets of them, of each step of ``shape`` (N, T)."""
    check_tensor("labels", labels)
    if labels.dtype != torch.bool:
        check_integers("labels", labels)
        check_shape("labels", labels, tuple(shape), "(N, T)")
    elif labels.dim() != 3 or labels.shape[:2] != shape:
        raise ValueError(
            f"labels that are boolean must have shape (N, T, K) with (N, T) = {tuple(shape)}; got "
            f"{tuple(labels.shape)}."
        )


def check_covariates(covariates: Tensor, exists: Tensor) -> None:
    """Raise unless covariates are finite numbers wherever a step exists."""
    check_floats("covariates", covariates)
    if covariates.dim() < 3 or covariates.shape[:2] != exists.shape:
        raise ValueError(
            f"covariates must have shape (N, T, C) with (N, T) = {tuple(exists.shape)}; got "
            f"{tuple(covariates.shape)}."
        )
    wrong = ~covariates.flatten(2).isfinite().all(-1) & exists.to(covariates.device)
    if bool(wrong.any()):
        n, t = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"covariates must be finite; that of sequence {n}, step {t} is not. Fill in what is "
            "missing, and say so in a covariate of its own."
        )


def parts_of_steps(
    exists: Tensor, labels: Tensor | None, covariates: Tensor | None, times: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Labels, covariates and times of the steps that ``exists`` says, checked, on its device."""
    if labels is not None:
        check_labels(labels, exists.shape)
        labels = labels.to(exists.device)
        if labels.dtype != torch.bool and bool((wrong := exists & (labels < -1)).any()):
            n, t = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"labels must be states, or -1 where one is not known; got {int(labels[n, t])} at "
                f"sequence {n}, step {t}."
            )
    if covariates is not None:
        check_covariates(covariates, exists)
        covariates = covariates.to(exists.device)
    if times is not None:
        check_real("times", times)
        check_shape("times", times, tuple(exists.shape), "(N, T)", "That of values.")
        times = times.to(exists.device).double()
        check_times(times, exists)
    return labels, covariates, times


def check_total(total: float | None, count: int) -> float:
    """The size of the whole set of which ``count`` sequences are a part."""
    if total is None:
        return count
    if isinstance(total, bool) or not isinstance(total, Real):
        raise TypeError(f"total must be a number; got {type(total).__name__}.")
    if not count <= total < math.inf:
        raise ValueError(f"total must be at least the number of sequences, {count}; got {total}.")
    return int(total) if total == int(total) else float(total)


def check_indices(indices: Tensor | None, count: int) -> Tensor:
    """The numbers of ``count`` sequences in the whole set."""
    if indices is None:
        return torch.arange(count)
    check_integers("indices", indices)
    check_shape("indices", indices, (count,), "(N,)", "N is that of values.")
    if bool((indices < 0).any()):
        raise ValueError("indices must not be negative: they number the sequences from 0.")
    return indices.cpu().long()
