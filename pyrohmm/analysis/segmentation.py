"""Segments of a path: its runs of equal states, as a table and as BED."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import check_integers, check_shape


class Segment(NamedTuple):
    """A maximal run of one state in one sequence.

    Attributes:
        sequence: Number of the sequence.
        state: The state.
        first: Its first step, from 0.
        last: Its last step, which belongs to it.
        length: Number of steps.
    """

    sequence: int
    state: int
    first: int
    last: int
    length: int


def segments(states: Tensor, lengths: Tensor | None = None) -> list[Segment]:
    """The runs of equal states of each path, in order.

    ``pandas.DataFrame(segments(path))`` is a table with the columns of :class:`Segment`. Of an
    :class:`HSMM`, whose states never follow themselves, runs are its segments; those of chain m of
    a :class:`FactorialHMM` are the runs of ``hmm.chain_states(path)[..., m]``.

    Args:
        states: ``(T,)`` or ``(N, T)`` integers, paths such as those of :meth:`HMM.viterbi`.
        lengths: ``(N,)``, steps of each sequence, such as ``hmm.lengths``; T by default.

    Raises:
        ValueError: If ``states`` have other dimensions or are negative, or lengths do not fit.

    Example:
        >>> for segment in segments(torch.tensor([[0, 0, 1], [2, 0, 0]]), torch.tensor([3, 1])):
        ...     print(*segment)
        0 0 0 1 2
        0 1 2 2 1
        1 2 0 0 1
    """
    check_integers("states", states)
    if states.dim() not in (1, 2) or not states.numel():
        raise ValueError(f"states must have shape (T,) or (N, T); got {tuple(states.shape)}.")
    if int(states.min()) < 0:
        raise ValueError(f"states must be at least 0; got {int(states.min())}. Where sequences "
                         "are padded, give their lengths.")  # fmt: skip
    paths = states.detach().cpu().reshape(-1, states.size(-1))
    if lengths is None:
        lengths = torch.full((len(paths),), paths.size(1))
    check_integers("lengths", lengths)
    check_shape("lengths", lengths, (len(paths),), "(N,)")
    found = []
    for number, (path, length) in enumerate(zip(paths, lengths.tolist())):
        if not 0 <= length <= len(path):
            raise ValueError(f"lengths must be from 0 to T = {len(path)}; got {length}.")
        values, counts = torch.unique_consecutive(path[:length], return_counts=True)
        ends = counts.cumsum(0)
        rows = zip(values.tolist(), (ends - counts).tolist(), counts.tolist())
        found += [
            Segment(number, state, first, first + count - 1, count) for state, first, count in rows
        ]
    return found


def to_bed(
    rows: Iterable[Segment], sequences: Sequence[str], states: Sequence[str] | None = None
) -> str:
    """Segments as lines of a BED file: sequence, start, end (excluded) and name of the state.

    Args:
        rows: Such as :func:`segments` makes them.
        sequences: Names of the sequences, such as ``names`` of :func:`pyrohmm.readers.read_fasta`.
        states: Names of the states; numbers by default. Segments of a state whose name is empty
            are left out.

    Raises:
        ValueError: If a segment is of a sequence or a state that has no name, or a name has white
            space in it.

    Example:
        >>> path = torch.tensor([0, 0, 1, 1, 1, 0])
        >>> to_bed(segments(path), ["chr1"], ["", "island"]).split()
        ['chr1', '2', '5', 'island']
    """
    for name, given in (("sequences", sequences), ("states", states or [])):
        wrong = [text for text in given if text != "".join(text.split())]
        if wrong:
            raise ValueError(f"{name} must have no white space in their names; got {wrong[0]!r}.")
    lines = []
    for row in rows:
        if not isinstance(row, Segment):
            raise TypeError(f"rows must hold segments, as segments makes; got {row!r}.")
        if row.sequence >= len(sequences):
            raise ValueError(f"sequences must name number {row.sequence}; got {len(sequences)}.")
        if states is not None and row.state >= len(states):
            raise ValueError(f"states must name state {row.state}; got {len(states)} names.")
        name = str(row.state) if states is None else states[row.state]
        if name:
            lines.append(f"{sequences[row.sequence]}\t{row.first}\t{row.last + 1}\t{name}\n")
    return "".join(lines)
