"""Checks of observations and labels; imputed gaps; support of sequences; allowed states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import biject_to, constraints, transform_to

from .._checks import (
    broadcast_shapes,
    check_broadcast,
    check_integers,
    check_range,
    check_tensor,
    check_trailing,
)
from .._sync import exceeds
from .._transforms import transforming
from .observation import any_value, inside_support, is_categorical, support_varies

INTEGERS_OF_SINGLE = 1 << 24  # up to which float32 holds all integers


def fill_gaps(values: Tensor, known: Tensor, emission: Any, padded: bool = False) -> Tensor:
    """Fill unobserved steps of values ``(*A, T, *E)`` with a value of the support.

    Args:
        values: Observations, of as many batch dimensions as the parameters.
        known: ``(*B, T)`` booleans, which steps exist and are observed.
        emission: Of event shape ``(*E)``.
        padded: Whether only padding is not observed: then first steps are.
    """
    event = emission.event_shape
    # not the whole batch: restarts and particles see the same values
    batch = broadcast_shapes(values.shape[: values.dim() - 1 - len(event)], known.shape[:-1])
    known = known.expand(*batch, known.size(-1))
    if is_categorical(emission):
        return values * known
    flat = values.expand(*known.shape, *event).reshape(-1, *event)
    filler = flat[0]
    if not padded or transforming():
        first = known.flatten().byte().argmax().reshape(1)
        filler = flat.index_select(0, first).squeeze(0)
        if transforming():  # if none is known, any number: it is masked again
            filler = filler.nan_to_num()
        elif not exceeds(known.flatten().index_select(0, first).byte().sum(), 0):
            filler = _first_value(emission, values.dtype)
    return torch.where(known.reshape(known.shape + (1,) * len(event)), values, filler)


def as_numbers(integers: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert integers to ``dtype``; to float64 where float32 would make neighbours equal."""
    exact = dtype.itemsize > 4 or integers.dtype.itemsize < 4
    if not exact and not transforming():
        exact = exceeds(INTEGERS_OF_SINGLE - integers.abs().amax(), -1)
    return integers.to(dtype if exact else torch.float64)


def check_support(
    values: Tensor, known: Tensor | None, emission: Any, emission_per_step: bool
) -> None:
    """Raise unless values ``(*B, T, *E)`` lie in the support of the emission; waits for a device.

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
            seen = values if known is None else values.masked_select(known)
            cure = "Build the emission with more symbols, or mark unknown ones as not observed."
            if int(seen.min()) == 1 and int(seen.max()) == size:
                cure = "Are they one-based? Subtract 1."
            check_range("values", seen, size, "V - 1", cure)
        return
    event, support = emission.event_shape, emission.support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    real = isinstance(support, type(constraints.real))
    if real and (len(event) or not bool(values.isnan().any())):
        return  # NaN is a missing component of a vector
    inside = _emitted(values, known, emission, emission_per_step)
    if not bool(inside.all()):
        _refuse_outside(values.expand(*inside.shape, *event)[~inside], emission)


def _emitted(
    values: Tensor, known: Tensor | None, emission: Any, emission_per_step: bool
) -> Tensor:
    """Mask ``(*B, T)`` of values ``(*B, T, *E)`` that some state emits; True where not known."""
    event = emission.event_shape
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
    return inside if known is None else inside | ~known  # what fills a gap is of one step


class SequencesOf(constraints.Constraint):
    """Constraint: sequences ``(T, *E)`` that an HMM can emit; anything at unobserved steps.

    Args:
        hmm: Its lengths and masks say which steps exist and are observed.
    """

    def __init__(self, hmm: Any) -> None:
        self.hmm, self.each = hmm, constraints.independent(hmm._emission.support, 1)
        self.event_dim, self.is_discrete = self.each.event_dim, self.each.is_discrete
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        """Whether sequences ``(*B, T, *E)`` can be observed, ``(*B)``."""
        known, emission = self.hmm.known, self.hmm.emission
        filled = fill_gaps(value, known, emission)
        return _emitted(filled, known, emission, self.hmm.emission_per_step).all(-1)

    def __repr__(self) -> str:
        return f"SequencesOf({self.each!r})"


@biject_to.register(SequencesOf)
@transform_to.register(SequencesOf)
def _coordinates(constraint: Any) -> Any:
    """Bijection from unconstrained space to latent sequences, all of whose steps count."""
    if not bool(constraint.hmm.known.all()):
        raise NotImplementedError(
            "a latent HMM must have no padding and no missing steps, which have no density. Give a "
            "site to the sequences of each length."
        )
    return biject_to(constraint.each)


def _refuse_outside(wrong: Tensor, emission: Any) -> None:
    """Raise for values ``(M, *E)`` outside the support of every state."""
    end, cure = "", "Mark missing steps as not observed."
    if not emission.support.is_discrete and bool(((wrong == 0) | (wrong == 1)).any()):
        end, cure = " without its ends", "Move them inside by half their rounding"
        cure += "." if bool((wrong == 1).any()) else ", or emit exact zeros by zero_inflated(...)."
    raise ValueError(
        f"values must lie in the support of the emission, {emission.support!s:.80}{end}, in a "
        f"state at least; {len(wrong)} do not, such as {wrong[0].tolist()}. {cure}"
    )


def _first_value(emission: Any, dtype: torch.dtype) -> Tensor:
    """One observation in the support, ``(*E)``."""
    return any_value(emission).reshape(-1, *emission.event_shape)[0].to(dtype)


# Labels


def allowed_states(labels: Tensor, exists: Tensor, num_states: int) -> Tensor:
    """Mask ``(*B, T, K)`` of the states that ``labels`` allow, on the device of ``exists``.

    Args:
        labels: ``(*B, T)`` integers, -1 where the state is not known; or ``(*B, T, K)`` booleans.
        exists: ``(*B, T)`` booleans; at padded steps labels are not read.
        num_states: K.

    Raises:
        TypeError: If labels are neither integers nor booleans.
        ValueError: If a label is not below K, or a step has none that is allowed.
    """
    check_tensor("labels", labels)
    sets, num_steps = labels.dtype == torch.bool, exists.size(-1)
    trailing, meaning = ((num_steps, num_states), "(T, K)") if sets else ((num_steps,), "(T,)")
    check_trailing("labels", labels, trailing, meaning)
    check_broadcast({"labels": labels.shape[: -len(trailing)], "HMM": exists.shape[:-1]})
    if sets:
        allowed = labels.to(exists.device) | ~exists.unsqueeze(-1)
        if not transforming() and not bool(allowed.any(-1).all()):
            place = _place((~allowed.any(-1)).nonzero()[0].tolist())
            raise ValueError(f"labels allow no state at {place}; allow all where nothing is known.")
        return allowed
    check_integers("labels", labels)
    labels = labels.to(exists.device).long().masked_fill(~exists, -1)
    refuse_unknown(labels, num_states)
    states = torch.arange(num_states, device=labels.device)
    return (states == labels.unsqueeze(-1)) | (labels == -1).unsqueeze(-1)


def refuse_unknown(labels: Tensor, num_states: int) -> None:
    """Raise unless labels ``(*B, T)`` are -1 or 0 to K - 1; unchecked under transforms."""
    wrong = (labels >= num_states) | (labels < -1)
    if not transforming() and bool(wrong.any()):
        step = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"labels must lie between 0 and K - 1 = {num_states - 1}, or be -1 where the state is "
            f"not known; got {int(labels[tuple(step)])} at {_place(step)}. Count states from 0."
        )


def refuse_dead_ends(reached: Tensor, wrong: Tensor) -> None:
    """Raise if labels leave a sequence no path, and name its first step out of reach.

    Args:
        reached: ``(*B, T)`` booleans, whether a path keeps to the labels up to the step.
        wrong: ``(*B)`` booleans, whether labels are why there is none.
    """
    places = wrong.nonzero()
    if len(places):
        sequence = tuple(places[0].tolist())
        step = int((~reached[sequence]).byte().argmax())
        raise ValueError(
            "labels must leave a path of positive probability; none does in "
            f"{_place([*sequence, step])}. Correct it, or allow the transition, symbol or duration."
        )


def _place(index: list[int]) -> str:
    """Name a sequence and its step, for error messages."""
    *batch, step = index
    if not batch:
        return f"step {step}"
    return f"sequence {batch[0] if len(batch) == 1 else tuple(batch)}, step {step}"
