"""Observations as the recursions read them: fillers where there are none, checks of the support."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from .._checks import check_range
from .._sync import exceeds
from .._transforms import transforming
from .observation import any_value, inside_support, is_categorical, support_varies


def fill_gaps(values: Tensor, known: Tensor, emission: Any) -> Tensor:
    """``values`` ``(*A, T, *E)`` with something of the support where they are not ``known``.

    Args:
        values: Observations, of as many batch dimensions as the parameters.
        known: ``(*B, T)`` booleans, which steps exist and are observed.
        emission: Of event shape ``(*E)``.
    """
    event = emission.event_shape
    # not the whole batch: restarts and particles see the same values
    batch = torch.broadcast_shapes(values.shape[: values.dim() - 1 - len(event)], known.shape[:-1])
    known = known.expand(*batch, known.size(-1))
    if is_categorical(emission):
        return values.masked_fill(~known, 0)
    flat = values.expand(*known.shape, *event).reshape(-1, *event)
    first = known.flatten().byte().argmax().reshape(1)
    if transforming():  # if none is known, any number: it is masked again
        filler = flat.index_select(0, first).squeeze(0).nan_to_num()
    elif exceeds(known.flatten().index_select(0, first).byte().sum(), 0):
        filler = flat.index_select(0, first).squeeze(0)
    else:
        filler = _first_value(emission, values.dtype)
    return torch.where(known.reshape(known.shape + (1,) * len(event)), values, filler)


def check_support(
    values: Tensor, known: Tensor | None, emission: Any, emission_per_step: bool
) -> None:
    """Raise unless values ``(*B, T, *E)`` lie in the support of the emission; this reads them.

    Args:
        values: Observations, of as many batch dimensions as the parameters.
        known: ``(*B, T)`` booleans, which steps exist and are observed; all if None.
        emission: Of event shape ``(*E)``. States may have different supports; a value is in that
            of one of them.
        emission_per_step: Whether the batch of the emission has a dimension of steps.
    """
    if is_categorical(emission):
        size = emission.logits.size(-1)
        low, high = (int(end) for end in torch.aminmax(values)) if values.numel() else (0, 0)
        if low < 0 or high >= size:
            _refuse_symbols(values, known, size)
        return
    event = emission.event_shape
    if _is_real(emission.support) and (len(event) or not bool(values.isnan().any())):
        return  # NaN is a missing component of a vector
    apart = values.unsqueeze(-1 - len(event))
    if not emission_per_step:
        apart = apart.movedim(apart.dim() - 2 - len(event), 0)
    if len(event) and apart.dtype.is_floating_point:
        gaps = apart.isnan()
        if bool(gaps.any()):
            varies = support_varies(emission)
            filler = any_value(emission) if varies else _first_value(emission, apart.dtype)
            apart = torch.where(gaps, filler.to(apart.dtype), apart)
    inside = inside_support(emission, apart).any(-1)
    inside = inside if emission_per_step else inside.movedim(0, -1)
    if known is not None:  # what fills a gap is of one step: it is counted there
        inside = inside | ~known
    if not bool(inside.all()):
        _refuse_outside(values.expand(*inside.shape, *event)[~inside], emission)


def _refuse_outside(wrong: Tensor, emission: Any) -> None:
    """Raise the error of values ``(M, *E)`` that no state emits."""
    at_end = not emission.support.is_discrete and bool(((wrong == 0) | (wrong == 1)).any())
    cure = "Mark missing steps as not observed."
    if at_end:
        cure = "Move them inside by half their rounding"
        cure += "." if bool((wrong == 1).any()) else ", or emit exact zeros by zero_inflated(...)."
    raise ValueError(
        f"values must lie in the support of the emission, {emission.support!s:.80}"
        f"{' without its ends' if at_end else ''}, in a state at least; {len(wrong)} do not, such "
        f"as {wrong[0].tolist()}. {cure}"
    )


def _refuse_symbols(values: Tensor, known: Tensor | None, size: int) -> None:
    """Raise the error of symbols that are none of 0 to V - 1; what is padded does not count."""
    seen = values if known is None else values.expand(known.shape)[known]
    cure = "Build the emission with more symbols, or mark unknown ones as not observed."
    if int(seen.min()) == 1 and int(seen.max()) == size:
        cure = "Are they one-based? Subtract 1."
    check_range("values", seen, size, "V - 1", cure)


def _is_real(support: Any) -> bool:
    """Whether components of any number are in the support."""
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return isinstance(support, type(constraints.real))


def _first_value(emission: Any, dtype: torch.dtype) -> Tensor:
    """One observation in the support, ``(*E)``."""
    return any_value(emission).reshape(-1, *emission.event_shape)[0].to(dtype)
