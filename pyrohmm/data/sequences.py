"""``Sequences``: many sequences in one padded tensor, and minibatches of them.

``N`` sequences of up to ``T`` steps are padded on the right. A mask is True where something
exists or is observed (the opposite of TensorFlow Probability's).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .._arguments import explained
from .._checks import (
    check_booleans,
    check_floats,
    check_integers,
    check_lengths,
    check_real,
    check_shape,
    check_size,
    check_tensor,
)
from ..ops import masks


@explained()
class Sequences:
    """Sequences of different lengths, some of their steps perhaps missing.

    Args:
        values: ``(N, T, *E)``, what was observed; padding and missing steps may hold anything.
            Steps that no sequence has are dropped.
        lengths: ``(N,)`` integers from 1 to T, the number of steps of each sequence. They are
            kept on the CPU, wherever the values are: they steer loops.
        observed: ``(N, T)`` booleans, False where a step is missing. By default every step that
            exists is observed.
            Vectors of which single components are NaN are known in part.
        labels: ``(N, T)`` integers, the known state of each step, -1 where it is not known; or
            ``(N, T, K)`` booleans, True for the states that may be. The models and fits of this
            package use them; :meth:`without_labels` drops them.
        total: Number of sequences in the whole set these are a part of; N by default.
            Models scale the likelihood by ``total / N``, and priors not. It need not be whole.
        covariates: ``(N, T, C)`` floating point, what transitions and emissions may depend on:
            models pass it to the module that builds the HMM. Finite wherever a step exists.

    Raises:
        TypeError: If a dtype is wrong.
        ValueError: If shapes disagree, there is no sequence or no step, a length is not between
            1 and T, an observed value is all NaN, or ``total`` is less than N.

    Example:
        >>> data = Sequences(torch.tensor([[3, 1, 4], [1, 5, 0]]), torch.tensor([3, 2]))
        >>> len(data), data.num_steps, data.num_observed
        (2, 3, 5)
        >>> data[1:].values
        tensor([[1, 5]])
    """

    def __init__(
        self,
        values: Tensor,
        lengths: Tensor,
        observed: Tensor | None = None,
        labels: Tensor | None = None,
        total: float | None = None,
        covariates: Tensor | None = None,
    ) -> None:
        _check_values(values)
        check_integers("lengths", lengths)
        check_shape("lengths", lengths, tuple(values.shape[:1]), "(N,)", "N is that of values.")
        lengths = lengths.cpu().long()
        check_lengths(lengths, values.size(1))
        exists = (torch.arange(values.size(1)) < lengths.unsqueeze(-1)).to(values.device)
        self.has_gaps = False  # whether steps that exist are missing
        if observed is None:
            observed = exists
        else:
            check_booleans("observed", observed)
            check_shape("observed", observed, tuple(values.shape[:2]), "(N, T)", "That of values.")
            observed = observed.to(values.device) & exists
            self.has_gaps = not torch.equal(observed, exists)
        _check_observed(values, observed)
        if labels is not None:
            _check_labels(labels, values.shape[:2])
            labels = labels.to(values.device)
        if covariates is not None:
            _check_covariates(covariates, exists)
            covariates = covariates.to(values.device)
        longest = int(lengths.max())  # steps that no sequence has are dropped
        self.values, self.lengths = values[:, :longest], lengths
        self.observed = observed[:, :longest]
        self.labels = None if labels is None else labels[:, :longest]
        self.covariates = None if covariates is None else covariates[:, :longest]
        self.total = _check_total(total, len(values))

    @classmethod
    def from_list(
        cls,
        sequences: Iterable[Any],
        labels: Iterable[Any] | None = None,
        device: torch.device | str | None = None,
        covariates: Iterable[Any] | None = None,
    ) -> Sequences:
        """Pad a list of sequences; steps that hold NaN or None become missing.

        A vector with some components NaN stays, known in part.

        Args:
            sequences: One item per sequence: a tensor or array ``(T_n, *E)``, or a list of steps
                where ``None`` stands for a missing one.
            labels: One item per sequence, ``(T_n,)`` integers, -1 where the state is not known.
            device: Where to put the result; by default where the first sequence is.
            covariates: One item per sequence, ``(T_n, C)`` floating point.

        Raises:
            ValueError: If there is no sequence, one has no step, or event shapes differ.

        Example:
            >>> data = Sequences.from_list([[1.0, None, 3.0], [2.0]])
            >>> data.observed
            tensor([[ True, False,  True],
                    [ True, False, False]])
        """
        parts = [_as_steps(sequence, index) for index, sequence in enumerate(sequences)]
        if not parts:
            raise ValueError("sequences is empty; wanted at least one sequence.")
        masks = [mask for _, mask in parts]
        known = [(index, row) for index, (row, _) in enumerate(parts) if row is not None]
        index, first = known[0] if known else (0, torch.zeros(1))
        dtype = first.dtype
        for other, row in known:
            if row.shape[1:] != first.shape[1:]:
                raise ValueError(
                    f"sequences must share one event shape; sequence {index} has "
                    f"{tuple(first.shape[1:])} and sequence {other} has {tuple(row.shape[1:])}."
                )
            dtype = torch.promote_types(dtype, row.dtype)
        rows = [
            first.new_zeros(len(mask), *first.shape[1:], dtype=dtype) if row is None
            else row.to(dtype)
            for row, mask in parts
        ]  # fmt: skip
        lengths = torch.tensor([len(row) for row in rows])
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        observed = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
        data = cls(
            padded, lengths, observed, _padded("labels", labels, lengths, -1.0),
            covariates=_padded("covariates", covariates, lengths, 0.0),
        )  # fmt: skip
        return data if device is None else data.to(device)

    @property
    def num_steps(self) -> int:
        """T, the number of steps after padding."""
        return self.values.size(1)

    @property
    def exists(self) -> Tensor:
        """Which steps are not padding, ``(N, T)`` booleans."""
        return masks.exists(self.lengths, self.num_steps, self.values.device)

    @property
    def num_labelled(self) -> int:
        """Number of steps whose state is known, or is known not to be one of them."""
        if self.labels is None:
            return 0
        known = ~self.labels.all(-1) if self.labels.dtype == torch.bool else self.labels >= 0
        return int((known & self.exists).sum())

    @cached_property
    def num_observed(self) -> int:
        """Number of observed steps: the denominator of figures per token."""
        return int(self.observed.sum())

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return (
            f"Sequences({len(self)} sequences of up to {self.num_steps} steps, "
            f"{self.num_observed} observed, values {self.values.dtype} "
            f"{tuple(self.values.shape)} on {self.values.device})"
        )

    def __getitem__(self, index: Any) -> Sequences:
        """Select sequences by slice, boolean mask or integers; ``total`` becomes their number."""
        chosen = torch.arange(len(self))[index].reshape(-1)
        return self._select(chosen, len(chosen))

    def _select(self, chosen: Tensor, total: float, longest: int | None = None) -> Sequences:
        """The first steps of sequences ``chosen``, without those that only longer ones need."""
        lengths = self.lengths[chosen].clamp(max=self.num_steps if longest is None else longest)
        steps = int(lengths.max()) if len(chosen) else 0
        chosen = chosen.to(self.values.device)
        return self._map(lambda part: part[chosen, :steps], lengths, total)

    def _map(self, change: Callable[[Tensor], Tensor], lengths: Tensor, total: float) -> Sequences:
        """The sequences whose parts ``(N, T, *)`` are changed in the same way."""
        if not len(lengths):
            raise ValueError("lengths is empty; wanted at least one sequence.")
        new = object.__new__(Sequences)  # what has been checked is not read again
        new.lengths, new.total = lengths, _check_total(total, len(lengths))
        new.values, new.observed = change(self.values), change(self.observed)
        new.labels = None if self.labels is None else change(self.labels)
        new.covariates = None if self.covariates is None else change(self.covariates)
        new.has_gaps = self.has_gaps
        if self.has_gaps:
            exists = masks.exists(lengths, new.num_steps, new.values.device)
            new.has_gaps = not torch.equal(new.observed, exists)
        return new

    def truncate(self, num_steps: int) -> Sequences:
        """The first ``num_steps`` steps of each sequence; shorter ones stay as they are.

        Example:
            >>> Sequences.from_list([[3, 1, 4, 1], [5]]).truncate(2).values
            tensor([[3, 1],
                    [5, 0]])
        """
        check_size("num_steps", num_steps)
        return self._select(torch.arange(len(self)), self.total, num_steps)

    def split(
        self, share: float = 0.5, generator: torch.Generator | None = None
    ) -> tuple[Sequences, Sequences]:
        """Divide the sequences at random in two, such as into a training and a test set.

        Args:
            share: Of the sequences that go to the first part, rounded to a whole number.
            generator: Source of randomness on the CPU; torch's global one by default.

        Returns:
            The two parts; each has the sequences in the order they have here.

        Raises:
            ValueError: If a part would be empty.

        Example:
            >>> train, test = Sequences.from_list([[0], [1], [2], [3]]).split(0.75)
            >>> len(train), len(test)
            (3, 1)
        """
        first = round(share * len(self)) if 0 < share < 1 else 0
        if not 0 < first < len(self):
            raise ValueError(
                f"share must leave a sequence to each of the two parts; got {share} of "
                f"{len(self)} sequences."
            )
        order = torch.randperm(len(self), generator=generator)
        return self[order[:first].sort().values], self[order[first:].sort().values]

    def to(self, device: torch.device | str) -> Sequences:
        """Copy to ``device`` what is not there yet (lengths stay on the CPU)."""
        return self._map(lambda part: part.to(device), self.lengths, self.total)

    def without_labels(self) -> Sequences:
        """The same sequences; a fit to them is unsupervised."""
        return Sequences(
            self.values, self.lengths, self.observed, None, self.total, self.covariates
        )

    def batches(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> Iterator[Sequences]:
        """Yield each sequence once, in random order, ``batch_size`` at a time.

        Every batch keeps the ``total`` of the whole set, so that minibatch losses estimate the
        full one without bias. The last batch may be smaller.

        Args:
            batch_size: Number of sequences in a batch, at least 1.
            generator: Source of randomness on the CPU; torch's global one by default.
        """
        check_size("batch_size", batch_size)
        order = torch.randperm(len(self), generator=generator)
        for chosen in order.split(batch_size):
            yield self.batch(chosen)

    def batch(self, chosen: Tensor, total: float | None = None) -> Sequences:
        """The sequences ``chosen`` (integers), as a part of the whole set: ``total`` stays.

        Args:
            chosen: Which sequences.
            total: Number of sequences they are a sample of, if not of the whole set.
        """
        return self._select(chosen, self.total if total is None else total)


def _as_steps(sequence: Any, index: int) -> tuple[Tensor | None, Tensor]:
    """One sequence as a tensor ``(T, *E)``, None if all is missing, and its mask ``(T,)``."""
    if not hasattr(sequence, "__len__"):
        raise TypeError(
            f"sequence {index} must be a list, an array or a tensor of steps; got "
            f"{type(sequence).__name__}. Wrap a single sequence in a list."
        )
    if not isinstance(sequence, Tensor) and any(step is None for step in sequence):
        present = torch.tensor([step is not None for step in sequence])
        known = [torch.as_tensor(step) for step in sequence if step is not None]
        if not known:
            return None, present
        steps = iter(known)
        row = torch.stack([next(steps) if here else known[0] for here in present.tolist()])
    else:
        row = torch.as_tensor(sequence)
        present = torch.ones(row.shape[:1], dtype=torch.bool, device=row.device)
    if row.dim() == 0 or len(row) == 0:
        raise ValueError(f"sequence {index} has no step; wanted shape (T, *E) with T at least 1.")
    if row.dtype.is_floating_point:
        absent = row.isnan()
        present = present & ~(absent.flatten(1).all(-1) if row.dim() > 1 else absent)
    return row, present


def _padded(
    name: str, items: Iterable[Any] | None, lengths: Tensor, padding: float
) -> Tensor | None:
    """Labels or covariates of sequences of ``lengths`` in one tensor, ``(N, T, *)``."""
    if items is None:
        return None
    rows = [torch.as_tensor(item) for item in items]
    if [len(row) for row in rows] != lengths.tolist():
        raise ValueError(
            f"{name} must have one item per sequence, one row per step; got lengths "
            f"{[len(row) for row in rows][:5]}, sequences have {lengths.tolist()[:5]} (first five)."
        )
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)


def _check_values(values: Tensor) -> None:
    check_real("values", values)
    if values.dim() < 2 or 0 in values.shape[:2]:
        raise ValueError(
            "values must have shape (N, T, *E) with at least one sequence and one step; got "
            f"shape {tuple(values.shape)}. Add the dimension of sequences with unsqueeze(0)."
        )


def _check_observed(values: Tensor, observed: Tensor) -> None:
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


def _check_labels(labels: Tensor, shape: torch.Size) -> None:
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


def _check_covariates(covariates: Tensor, exists: Tensor) -> None:
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


def _check_total(total: float | None, count: int) -> float:
    """The size of the whole set of which ``count`` sequences are a part."""
    if total is None:
        return count
    if isinstance(total, bool) or not isinstance(total, int | float):
        raise TypeError(f"total must be a number; got {type(total).__name__}.")
    if not count <= total < math.inf:
        raise ValueError(f"total must be at least the number of sequences, {count}; got {total}.")
    return int(total) if total == int(total) else total
