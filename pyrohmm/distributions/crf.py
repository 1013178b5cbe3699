r"""``LinearChainCRF``: labels of a sequence given scores, such as those of a network.

References:
    Conditional Random Fields (Lafferty, McCallum and Pereira, 2001)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from .._checks import (
    OwnChecks,
    PyroValidation,
    all_names_checked,
    check_broadcast,
    check_floats,
    check_integers,
    check_lengths,
    check_no_nan,
    check_same_device,
    check_size,
    check_trailing,
    sample_size,
)
from .._precision import at_least_single, full_precision
from .._sync import exceeds, with_one_wait
from .._transforms import opaque, transforming, uncompiled
from ..chains.markov import MarkovChain, PathFactors
from ..ops.log_space import finite_or_zero, step_mask
from .values import allowed_states, refuse_unknown


class LinearChainCRF(OwnChecks):
    r"""Conditional random field: labels of whole sequences, with unnormalised scores.

    .. math:: p(y_{1:T}) = \frac{1}{Z} \exp \Big( s(y_1) + \sum_{t=1}^T e_t(y_t)
              + \sum_{t=2}^T a(y_{t-1}, y_t) \Big)

    This is the last layer of a tagger: a network gives the emission scores e, transition scores a
    are a parameter, and ``-log_prob(labels).sum()`` is the loss. The partition function Z sums
    over all :math:`K^T` paths, exactly. Where scores are log-probabilities of an HMM,
    :math:`\log Z` is its evidence: this is also how an HMM with log-likelihoods ``(*B, T, K)`` of
    your own is summed.

    A sequence is one event: ``event_shape`` is ``(T,)``, and ``batch_shape`` is what the batch
    dimensions ``*B`` of all arguments broadcast to. Scores of minus infinity are legal: a label or
    a transition that is impossible. Scores of half precision, such as autocast makes, are taken up
    into float32.

    Args:
        emission_scores: ``(*B, T, K)``, of each label at each step. Padding may hold anything.
        transition_scores: ``(*B, K, K)``, row = from, column = to. With ``transition_per_step``,
            ``(*B, T-1, K, K)``: one matrix for each transition.
        initial_scores: ``(*B, K)``, score of the first label; zeros by default.
        lengths: ``(*B)`` integers, the number of steps of each sequence, from 1 to T; T by default.
        validate_args: Whether to read values in order to check them; shapes are always checked.
            Pyro's setting by default.
        transition_per_step: Whether ``transition_scores`` have a dimension of steps.

    Raises:
        TypeError: If an argument is of the wrong type or dtype.
        ValueError: If shapes or devices disagree, or (with ``validate_args``) a score is NaN or
            plus infinity.

    Example:
        >>> emission = torch.tensor([[2.0, 0.0], [0.0, 1.5]])  # T = 2, K = 2
        >>> transition = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> crf = LinearChainCRF(emission, transition)
        >>> crf.log_prob(torch.tensor([0, 1])).exp()
        tensor(0.4989)
        >>> crf.marginals()
        tensor([[0.8014, 0.1986],
                [0.3176, 0.6824]])
        >>> crf.viterbi()
        tensor([0, 1])
    """

    _validate_args = PyroValidation()

    @uncompiled
    def __init__(
        self,
        emission_scores: Tensor,
        transition_scores: Tensor,
        initial_scores: Tensor | None = None,
        lengths: Tensor | None = None,
        validate_args: bool | None = None,
        *,
        transition_per_step: bool = False,
    ) -> None:
        if emission_scores.dim() < 2:
            raise ValueError(
                "emission_scores must have shape (*B, T, K); got shape "
                f"{tuple(emission_scores.shape)}. Insert dimensions of size 1 with unsqueeze."
            )
        self.emission_scores = at_least_single(emission_scores)
        steps, num_labels = emission_scores.shape[-2:]
        if initial_scores is None:
            initial_scores = self.emission_scores.new_zeros(num_labels)
        if lengths is None:
            lengths = torch.full(emission_scores.shape[:-2], steps)
        check_integers("lengths", lengths)
        self.lengths = lengths.cpu().long()
        check_lengths(self.lengths, steps)
        check_trailing("initial_scores", initial_scores, (num_labels,), "(K,)")
        self.initial_scores = at_least_single(initial_scores)
        self.transition_scores = at_least_single(transition_scores)
        cure = "Call .float() on it; for a mask give torch.where(mask, 0.0, -torch.inf)."
        for name, scores in self._named.items():
            check_floats(name, scores, cure)
        self.transition_per_step = transition_per_step
        wanted = ((steps - 1,) if transition_per_step else ()) + (num_labels, num_labels)
        check_trailing("transition_scores", transition_scores, wanted, "([T-1,] K, K)")
        check_same_device(self._named)
        batch = check_broadcast({
            "emission_scores": emission_scores.shape[:-2], "lengths": self.lengths.shape,
            "initial_scores": self.initial_scores.shape[:-1],
            "transition_scores": self.transition_scores.shape[: -len(wanted)],
        })  # fmt: skip
        super().__init__(batch, torch.Size([steps]), validate_args=validate_args)
        if self._validate_args and not transforming():
            present = self.emission_scores.masked_fill(~self.exists.unsqueeze(-1), 0.0)
            for name, scores in (self._named | {"emission_scores": present}).items():
                check_no_nan(name, scores, "Look for what diverged in the network.")

    @property
    def _named(self) -> dict[str, Tensor]:
        names = "emission_scores", "initial_scores", "transition_scores"
        return {name: getattr(self, name) for name in names}

    @property
    def chain(self) -> MarkovChain:
        """Chain of scores minus their maxima, so that recursions take exponentials safely."""
        first, later = self._peaks
        scores = self.initial_scores - first, self.transition_scores - later
        return MarkovChain(*scores, self.transition_per_step)

    @property
    def _peaks(self) -> tuple[Tensor, Tensor]:
        """Maxima of initial scores ``(*b, 1)`` and of transition matrices ``(*b, [T-1,] 1, 1)``."""
        return _peak(self.initial_scores, 1), _peak(self.transition_scores, 2)

    @property
    def num_labels(self) -> int:
        """K, the number of labels."""
        return self.emission_scores.size(-1)

    @property
    def num_steps(self) -> int:
        """T, the number of steps after padding."""
        return self.event_shape[0]

    @property
    def exists(self) -> Tensor:
        """Mask of the steps that are not padding, ``(*B, T)`` booleans."""
        return step_mask(self.lengths, self.num_steps, self.emission_scores.device)

    @property
    def support(self) -> constraints.Constraint:
        """Sequences of labels from 0 to K - 1; -1 is one that is not known."""
        return constraints.independent(constraints.integer_interval(-1, self.num_labels - 1), 1)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> LinearChainCRF:
        """Expand to a larger batch; scores are not copied."""
        shape = *batch_shape, self.num_steps, self.num_labels
        return self._with_emissions(self.emission_scores.expand(shape))

    def _with_emissions(self, emission_scores: Tensor) -> LinearChainCRF:
        other = LinearChainCRF(
            emission_scores, self.transition_scores, self.initial_scores,
            self.lengths, False, transition_per_step=self.transition_per_step,
        )  # fmt: skip
        other._validate_args = self._validate_args
        return other

    def restrict(self, labels: Tensor) -> LinearChainCRF:
        r"""Conditional distribution given some of the labels; scores of other paths are -inf.

        The probability of what is known is the ratio of the two partition functions.

        Args:
            labels: ``(*B, T)`` integers, -1 where a label is not known; or ``(*B, T, K)``
                booleans, True for the labels that may be.

        Raises:
            TypeError: If labels are neither integers nor booleans.
            ValueError: If a label is not below K, or a step has none that is allowed.

        Example:
            >>> crf = LinearChainCRF(torch.zeros(3, 2), torch.zeros(2, 2))
            >>> crf.restrict(torch.tensor([1, -1, 0])).viterbi()
            tensor([1, 0, 0])
        """
        allowed = allowed_states(labels, self.exists, self.num_labels)
        check_broadcast({"labels": allowed.shape[:-2], "LinearChainCRF": self.batch_shape})
        return self._with_emissions(self.emission_scores.masked_fill(~allowed, -torch.inf))

    # What is computed

    def log_partition(self) -> Tensor:
        r"""Log partition function :math:`\log Z`, ``(*B)``: log-sum-exp of scores over all paths.

        Differentiable by all scores, any number of times; its gradient by the emission scores are
        the marginals. It is -inf, with gradient zero, where no path is possible.
        """
        peaks = _peak(self.emission_scores, 1).squeeze(-1).masked_fill(~self.exists, 0.0)
        first, later = (part.squeeze(-1) for part in self._peaks)
        later = later if self.transition_per_step else later.unsqueeze(-1)
        offset = first + (later.squeeze(-1) * self.exists[..., 1:]).sum(-1)
        return self._log_sum(self._levelled) + offset + peaks.sum(-1)

    @property
    def _levelled(self) -> Tensor:
        """Emission scores ``(*b, T, K)`` minus the maximum of each step."""
        return self.emission_scores - _peak(self.emission_scores, 1)

    def _log_sum(self, scores: Tensor) -> Tensor:
        """Log partition function ``(*B)`` of scores whose maximum at each step is zero."""
        with full_precision(scores):
            return with_one_wait(lambda: self.chain.log_evidence(scores, self.lengths))

    @opaque
    def log_prob(self, labels: Tensor) -> Tensor:
        r"""Log-probability :math:`\log p(y_{1:T})`, ``(*B)``, in nats, differentiable by scores.

        Args:
            labels: ``(*B, T)`` integers; those that are -1 are summed out. Padding is not read.

        Raises:
            TypeError: If labels are not integers.
            ValueError: If shapes disagree, or a label is not below K.
        """
        labels, scores = self._checked(labels), self._levelled

        def compute() -> Tensor:
            if not transforming() and exceeds((labels >= 0).all().byte(), 0):
                return self.chain.log_joint(scores, self.lengths, labels)
            allowed = allowed_states(labels, self.exists, self.num_labels)
            return self._log_sum(scores.masked_fill(~allowed, -torch.inf))

        return with_one_wait(compute) - finite_or_zero(self._log_sum(scores))

    def _checked(self, labels: Tensor) -> Tensor:
        """Check labels, and set padded ones to zero."""
        check_integers("labels", labels)
        check_same_device({"labels": labels, "emission_scores": self.emission_scores})
        check_trailing("labels", labels, (self.num_steps,), "(T,)")
        check_broadcast({"labels": labels.shape[:-1], "LinearChainCRF": self.batch_shape})
        labels = labels.long().masked_fill(~self.exists, 0)
        if self._validate_args and not transforming():
            refuse_unknown(labels, self.num_labels)
        return labels

    def marginals(self) -> Tensor:
        r"""Marginals :math:`p(y_t)`, ``(*B, T, K)``, by forward-backward; zero at padded steps.

        Differentiable by all scores; for the gradient they are computed again, by steps.
        """
        return self.chain.posterior(self.emission_scores, self.lengths).state_probs

    def pairwise_marginals(self) -> Tensor:
        r"""Marginals :math:`p(y_t, y_{t+1})`, ``(*B, T-1, K, K)``; zero at padded steps.

        Example:
            >>> crf = LinearChainCRF(torch.zeros(2, 2), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
            >>> crf.pairwise_marginals()
            tensor([[[0.3655, 0.1345],
                     [0.1345, 0.3655]]])
        """
        chain, shape = self.chain, (*self.batch_shape, self.num_steps - 1, *[self.num_labels] * 2)
        each = MarkovChain(chain.log_initial, chain.matrices.expand(shape), per_step=True)
        return each.counts_of_each(self.emission_scores, self.lengths).counts["log_transition"]

    def k_best(self, count: int) -> tuple[Tensor, Tensor]:
        r"""The C most probable paths ``(*B, C, T)``, best first, and :math:`\log p` ``(*B, C)``.

        Where fewer than C paths are possible the rest have -inf, and hold 0.
        """
        check_size("count", count)
        paths, scores = self._paths().k_best(count)
        total = self._log_sum(self._levelled)
        return paths, (scores - finite_or_zero(total).unsqueeze(-1)).to(total.dtype)

    def path_entropy(self) -> Tensor:
        r"""Entropy :math:`-\sum_y p(y) \log p(y)` of the labels, in nats, ``(*B)``."""
        types = (scores.dtype for scores in self._named.values())
        return self._paths().entropy()[0].to(reduce(torch.promote_types, types))

    def _paths(self) -> PathFactors:
        chain = self.chain
        factors = chain.log_initial, chain.matrices, self._levelled
        return PathFactors.joined(*factors, self.lengths)

    def viterbi(self) -> Tensor:
        r"""The most probable labels :math:`\arg\max_y p(y_{1:T})`, ``(*B, T)``; 0 where padded."""
        scores = self._levelled
        self.chain.refuse_nan(scores.masked_fill(~self.exists.unsqueeze(-1), 0.0))
        return self.chain.viterbi(scores, self.lengths)

    @property
    def mode(self) -> Tensor:
        """Most probable labels ``(*B, T)``, by :meth:`viterbi`."""
        return self.viterbi()

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Sample labels ``(*S, *B, T)``; 0 where padded.

        Raises:
            ValueError: If no path of a sequence is possible.
        """
        shape = sample_size(sample_shape)
        with torch.no_grad():
            if bool(self.log_partition().isneginf().any()):
                raise ValueError(
                    "scores must leave a path for samples; all of a sequence are -inf. "
                    "Allow a label at each step, and a transition between them."
                )
            paths = self.chain.sample_states(self.emission_scores, self.lengths, shape.numel())
            return paths.reshape(shape + self.batch_shape + self.event_shape)


def _peak(scores: Tensor, dims: int) -> Tensor:
    """Maximum over the last ``dims`` dimensions, kept; zero where all are -inf, or none."""
    if not scores.numel():
        return scores.new_zeros(*scores.shape[:-dims], *(1,) * dims)
    return finite_or_zero(scores.detach().amax(tuple(range(-dims, 0)), keepdim=True))


all_names_checked(globals())
