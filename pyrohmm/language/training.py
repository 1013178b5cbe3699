"""Training of a language model: the fit, its learning rate, and the share of state dropout."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any, ClassVar

import torch

from .._checks import check_size
from ..data.sequences import Sequences
from ..infer.gradient import fit_map
from ..infer.models import MarginalModel, StatefulModel
from ..infer.objective import LEFT
from ..infer.process_group import ProcessGroup
from ..infer.results import Fit
from ..nn.neural import LinearDropout
from .text import Sentences, as_text, check_ends, stored_text

FEW_EPOCHS = 16.0  # of a text with as many tokens as there are parameters (figures/dropout.json)
BEGIN, END = 0.5, 0.25  # of the share with more
WARM = 0.05  # share of all steps in which the learning rate rises


class WarmupCosine:
    """Share of the largest learning rate at a step: a short rise, then half a cosine, to zero.

    The number of steps is not in ``LambdaLR.state_dict()``, and not in checkpoints: a fit that goes
    on with more steps follows the longer schedule.

    Args:
        num_steps: Of the whole fit.

    Example:
        >>> [round(WarmupCosine(100)(step), 2) for step in (0, 4, 50, 99)]
        [0.2, 1.0, 0.5, 0.0]
    """

    __slots__ = ("__dict__", "num_steps")  # LambdaLR keeps and restores what is in __dict__
    may_differ = ("num_steps",)  # from that of a checkpoint

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def __call__(self, step: int) -> float:
        """Share of the largest learning rate at a ``step``, from 0."""
        rise = (step + 1) / max(1.0, WARM * self.num_steps)
        return min(1.0, rise) * (1.0 + math.cos(math.pi * min(1.0, step / self.num_steps))) / 2.0


class DefaultDropout(LinearDropout):
    """State dropout chosen by default for a fit; a longer fit may have another."""

    may_differ: ClassVar[tuple[str, ...]] = ("begin", "end", "num_steps")


def default_dropout(num_epochs: int, num_steps: int, tokens_per_parameter: float) -> DefaultDropout:
    r"""Default state dropout of a language model, by number of epochs and size of its text.

    With few epochs a text is not learnt by heart, and most is learnt without dropout. The fewer
    tokens r there are for each parameter, the sooner it is: few are at most
    :math:`16 \sqrt[3]{r}`. With more a half of the states of each block is left out, and this falls
    linearly to a quarter. That is within 3 % of the best perplexity in ``figures/dropout.json``,
    where r is 0.04, 0.08 (means of three seeds) and 0.26 (one seed).

    Args:
        num_epochs: How often each sentence is read.
        num_steps: Of the whole fit.
        tokens_per_parameter: r.

    Example:
        >>> default_dropout(5, 100, 0.25)
        DefaultDropout(begin=0.0, end=0.0, num_steps=100)
        >>> default_dropout(20, 400, 0.25)
        DefaultDropout(begin=0.5, end=0.25, num_steps=400)
    """
    few = num_epochs <= FEW_EPOCHS * tokens_per_parameter ** (1 / 3)
    begin, end = (0.0, 0.0) if few else (BEGIN, END)
    return DefaultDropout(begin, end, num_steps)


def in_words(dropout: float | LinearDropout) -> str:
    """Dropout in words, such as ``dropout 0.5 to 0.25``; empty where it is zero."""
    if not isinstance(dropout, LinearDropout):
        return f"dropout {dropout:g}" if dropout else ""
    if dropout.begin == dropout.end:
        return in_words(dropout.begin)
    return f"dropout {dropout.begin:g} to {dropout.end:g}"


def fit_sentences(
    model: Any,
    data: Sentences,
    validation: Sequences | None,
    sizes: tuple[int, int, int],
    options: dict[str, Any],
    **of_optimizer: Any,
) -> Fit:
    """Fit a ``LanguageModel`` by AdamW; ``sizes`` are epochs, tokens and streams."""
    module, (num_epochs, batch_tokens, num_streams) = model.module, sizes
    group = ProcessGroup.of(options.get("group"))
    with group:
        check_size("num_epochs", num_epochs)
        for name, lines in (("data", data), ("validation", validation)):
            if lines is not None:
                check_ends(name, model.vocabulary, lines)
        num_iterations = model.num_iterations(data, *sizes)
    pyro_model = MarginalModel(module)
    batching: dict[str, Any] = {"batch_tokens": batch_tokens}
    read: Sentences = data
    first = copy.deepcopy(module.state_dict())
    group.check_alike({"sharded": bool(options.get("sharded"))})
    num_tokens = data.num_observed
    if options.get("sharded"):  # alike in all ranks
        found = torch.tensor([num_iterations, num_tokens])
        num_iterations, num_tokens = group.most(found).tolist()
        num_tokens *= group.size
    if isinstance(module.dropout, DefaultDropout):  # also if more epochs follow a checkpoint
        size = sum(parameter.numel() for parameter in module.parameters())
        share = num_tokens / size
        module.dropout = default_dropout(num_epochs, num_iterations, share)
        module.num_drawn.zero_()
    if model.contiguous:
        steps = max(1, batch_tokens // num_streams)
        pyro_model = StatefulModel(module, num_streams)
        batching = {"windows": (num_streams, steps)}
        read = as_text(data) if isinstance(data, Sequences) else stored_text(data)
        validation = None if validation is None else as_text(validation, num_streams)
    fit = fit_map(
        pyro_model,
        read,
        num_iterations=num_iterations,
        tolerance=None,
        validation=validation,
        optimizer=partial(torch.optim.AdamW, fused=True, **of_optimizer),
        schedule=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=WarmupCosine(num_iterations)),
        **batching,
        **options,
    )
    if _is_broken(model, data[:16]):  # no loss comes after the last step
        module.load_state_dict(first)
        raise FloatingPointError(LEFT.format(len(fit.losses)))
    return fit


def _is_broken(model: Any, data: Sequences) -> bool:
    """Whether parameters are so large that scores are NaN, or ten times uniform guessing's."""
    try:
        nats = -model.score(data).sum().item() / data.num_observed
    except ValueError:
        return True
    return not nats <= 10 * math.log(len(model.vocabulary))  # NaN also
