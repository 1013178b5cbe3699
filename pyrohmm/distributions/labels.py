"""Labels: which states are allowed at each step, and whether they leave a path."""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import check_broadcast, check_integers, check_tensor, check_trailing
from .._transforms import transforming


def allowed_states(labels: Tensor, exists: Tensor, num_states: int) -> Tensor:
    """Which states ``labels`` allow, ``(*B, T, K)`` booleans, on the device of ``exists``.

    Args:
        labels: ``(*B, T)`` integers, -1 where the state is not known; or ``(*B, T, K)`` booleans.
        exists: ``(*B, T)`` booleans; at padded steps labels are not read.
        num_states: K.

    Raises:
        TypeError: If labels are neither integers nor booleans.
        ValueError: If a label is not below K, or a step has none that is allowed.
    """
    check_tensor("labels", labels)
    num_steps = exists.size(-1)
    if labels.dtype == torch.bool:
        check_trailing("labels", labels, (num_steps, num_states), "(T, K)")
        check_broadcast({"labels": labels.shape[:-2], "HMM": exists.shape[:-1]})
        allowed = labels.to(exists.device) | ~exists.unsqueeze(-1)
        if not transforming() and not bool(allowed.any(-1).all()):
            step = (~allowed.any(-1)).nonzero()[0].tolist()
            raise ValueError(
                f"labels allow no state at {_place(step)}; allow all where nothing is known."
            )
        return allowed
    check_integers("labels", labels)
    check_trailing("labels", labels, (num_steps,), "(T,)")
    check_broadcast({"labels": labels.shape[:-1], "HMM": exists.shape[:-1]})
    labels = labels.to(exists.device).long().masked_fill(~exists, -1)
    refuse_unknown(labels, num_states)
    states = torch.arange(num_states, device=labels.device)
    return (states == labels.unsqueeze(-1)) | (labels == -1).unsqueeze(-1)


def refuse_unknown(labels: Tensor, num_states: int) -> None:
    """Raise if integers ``(*B, T)`` are no labels below ``num_states``, nor -1; reads values."""
    wrong = (labels >= num_states) | (labels < -1)
    if not transforming() and bool(wrong.any()):
        step = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"labels must lie between 0 and K - 1 = {num_states - 1}, or be -1 where the state is "
            f"not known; got {int(labels[tuple(step)])} at {_place(step)}."
        )


def refuse_dead_ends(reached: Tensor, wrong: Tensor) -> None:
    """Raise if labels leave no path in a sequence, and name the first step they do not reach.

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
            f"{_place([*sequence, step])}. Correct the label, or allow the transition or the "
            "symbol."
        )


def _place(index: list[int]) -> str:
    """Words for a sequence and its step."""
    *batch, step = index
    if not batch:
        return f"step {step}"
    return f"sequence {batch[0] if len(batch) == 1 else tuple(batch)}, step {step}"
