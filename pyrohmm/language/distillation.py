"""HMMs that imitate a neural language model: EM on texts that it writes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._checks import check_size
from ..analysis.metrics import Perplexity
from ..analysis.queries import predictive_log_prob
from ..data.parts import Parts, in_parts
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..infer.em import fit_em
from ..infer.results import Fit
from ..nn.discrete import categorical
from ..nn.tabular import TabularHMM
from .tokens import token_texts

AT_ONCE = 256  # texts that are sampled as one batch
SCORED = 16  # texts whose logits exist at one time
HELD_OUT = 0.05  # share of the texts


class Distilled(NamedTuple):
    """Distilled HMM, its fit, held-out perplexity and Kullback-Leibler divergence.

    Attributes:
        hmm: The HMM of tokens, for one sequence of one step: see :meth:`HMM.with_lengths`.
        fit: By which it was found.
        perplexity: Of held-out texts, by the HMM.
        divergence: ``(T,)``, in nats: for each step the mean of log p(x_t | x_1, ..., x_{t-1}) of
            held-out texts by the language model minus that by the HMM, which estimates their
            Kullback-Leibler divergence; None where there are texts only.
    """

    hmm: HMM
    fit: Fit
    perplexity: Perplexity
    divergence: Tensor | None


def distil(
    source: Any,
    tokenizer: Any,
    num_states: int,
    *,
    num_texts: int = 20_000,
    max_tokens: int = 32,
    held_out: Sequences | None = None,
    num_epochs: int = 5,
    batch_size: int | None = 512,
    **options: Any,
) -> Distilled:
    """Fit an HMM to texts of a language model, by minibatch EM from random parameters.

    Args:
        source: A model of ``transformers``, whose samples are computed here on its device; or its
            texts as codes of tokens, :class:`Sequences` or an iterable of these, such as
            :class:`pyrohmm.data.StoredSequences` of a file of tokens.
        tokenizer: As for :func:`token_texts`. A model's texts begin after its ``bos_token_id``, if
            it has one, or else the ``eos_token_id``, with which they end.
        num_states: K.
        num_texts: Number of texts that are sampled for the fit; one in twenty more is held out.
        max_tokens: Largest number of tokens of these.
        held_out: Further texts, for the perplexity; by default samples, or a twentieth of the
            sequences.
        num_epochs: How often each text is read.
        batch_size: Number of texts in a minibatch; None for all. The texts of a minibatch come
            from one part of an iterable: the smaller the parts, the better they should be mixed.
        **options: Of :func:`pyrohmm.fit_em`, such as ``checkpoint``, with which the same call
            resumes after the same seed. Under ``torchrun`` each rank must have the same texts.

    Raises:
        ValueError: If ``held_out`` is lacking for an iterable, or the ``eos_token_id`` of the
            tokenizer for a model.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> texts = Sequences.from_list([[0, 1, 2], [1, 0, 1, 2]] * 50)
        >>> found = language.distil(texts, ["a", " b", None], num_states=3, num_epochs=40)
        >>> found.perplexity.value < 2
        True
    """
    check_size("num_texts", num_texts, max_tokens)
    num_tokens, model, start = len(token_texts(tokenizer)), None, 0
    if hasattr(source, "generate"):
        model, end = source, getattr(tokenizer, "eos_token_id", None)
        if end is None:
            raise ValueError(
                "tokenizer must have eos_token_id, the token that ends the texts of the model "
                f"source; that of {type(tokenizer).__name__} is missing or None. Set it."
            )
        begin = getattr(tokenizer, "bos_token_id", None)
        start = end if begin is None else begin
        count = num_texts + (math.ceil(HELD_OUT * num_texts) if held_out is None else 0)
        source = sample_texts(model, count, max_tokens, start, end)
    if held_out is None:
        if not isinstance(source, Sequences):
            text = f"held_out must be Sequences where source is a {type(source).__name__}"
            raise ValueError(f"{text}; got None. Keep some texts apart.")
        check_size("the number of texts in source", len(source), 2)
        count = math.ceil(HELD_OUT * len(source))
        source, held_out = source[:-count], source[-count:]
    texts = in_parts(source)
    batch_size = len(texts) if batch_size is None else batch_size
    check_size("batch_size", batch_size)
    sizes = texts.sizes if isinstance(texts, Parts) and batch_size < len(texts) else [len(texts)]
    num_epochs *= sum(math.ceil(size / batch_size) for size in sizes)
    options["batch_size"] = batch_size
    module = TabularHMM(num_states, categorical(num_tokens, concentration=1.01))
    module.to(held_out.values.device)
    fit = fit_em(module, texts, **{"num_iterations": num_epochs, **options})
    hmm = fit.hmm(held_out)
    logs = predictive_log_prob(hmm, held_out.values)
    perplexity = Perplexity.of(logs.sum().item(), held_out.num_observed)
    divergence = None
    if model is not None:
        excess = _log_probs(model, held_out, start) - logs
        divergence = excess.where(held_out.exists, 0.0).sum(0) / held_out.exists.sum(0)
    return Distilled(hmm.with_lengths(torch.tensor(1)), fit, perplexity, divergence)


@torch.no_grad()
def sample_texts(model: Any, count: int, max_tokens: int, start: int, end: int) -> Sequences:
    """Sample texts from a model of ``transformers``, after the token ``start``.

    Args:
        model: Has ``generate`` and ``device``.
        count: Number of texts.
        max_tokens: Longer ones are cut off.
        start: A token that is left out of them.
        end: The token with which they end, which is part of them.
    """
    found = []
    for first in range(0, count, AT_ONCE):
        ids = torch.full((min(AT_ONCE, count - first), 1), start, device=model.device)
        ids = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0,
            max_new_tokens=max_tokens, eos_token_id=end, pad_token_id=end,
        )[:, 1:]  # fmt: skip
        found.append(pad(ids, (0, max_tokens - ids.size(1)), value=end))
    values = torch.cat(found)
    is_end = values == end
    return Sequences(values, (is_end.cumsum(1) - is_end.long() == 0).sum(1).cpu())


@torch.no_grad()
def _log_probs(model: Any, texts: Sequences, start: int) -> Tensor:
    """Log-probability of each token by the language model, ``(N, T)``."""
    found = []
    for values in texts.values.split(SCORED):
        logs = model(pad(values[:, :-1], (1, 0), value=start)).logits.float().log_softmax(-1)
        found.append(logs.gather(-1, values.unsqueeze(-1)).squeeze(-1))
    return torch.cat(found)
