r"""``LinearChainCRF``: labels of a sequence given scores, such as those of a network.

References:
    Conditional Random Fields (Lafferty, McCallum and Pereira, 2001)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from .._checks import (
    PyroValidation,
    check_broadcast,
    check_integers,
    check_lengths,
    check_no_nan,
    check_same_device,
    check_trailing,
)
from .._precision import at_least_single, full_precision
from .._sync import exceeds, with_one_wait
from .._transforms import transforming, uncompiled
from ..ops import masks, recursions
from ..ops.log_space import finite_or_zero
from ..ops.sampling import refuse_nan
from .labels import allowed_states, refuse_unknown

_CURE = "T and K are those of emission_scores."


class LinearChainCRF(TorchDistribution):
    r"""Labels of whole sequences, whose scores need not be probabilities.

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

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012  # torch's interface
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
        emission_scores = _scores("emission_scores", emission_scores, 2, "(*B, T, K)")
        steps, num_labels = emission_scores.shape[-2:]
        if initial_scores is None:
            initial_scores = emission_scores.new_zeros(num_labels)
        if lengths is None:
            lengths = torch.full(emission_scores.shape[:-2], steps)
        check_integers("lengths", lengths)
        self.lengths = lengths.cpu().long()
        check_lengths(self.lengths, steps)
        self.emission_scores = emission_scores
        self.initial_scores = _scores("initial_scores", initial_scores, 1, "(*B, K)")
        own = 3 if transition_per_step else 2
        per_step = "(*B, T-1, K, K), with transition_per_step"
        shape = per_step if transition_per_step else "(*B, K, K)"
        self.transition_scores = _scores("transition_scores", transition_scores, own, shape)
        self.transition_per_step = transition_per_step
        check_trailing("initial_scores", self.initial_scores, (num_labels,), "(K,)", _CURE)
        trailing = (steps - 1, num_labels, num_labels)[-own:]
        meaning = shape.replace("*B, ", "")
        check_trailing("transition_scores", self.transition_scores, trailing, meaning, _CURE)
        check_same_device(self._named)
        batch = check_broadcast({
            "emission_scores": emission_scores.shape[:-2],
            "transition_scores": self.transition_scores.shape[:-own],
            "initial_scores": self.initial_scores.shape[:-1],
            "lengths": self.lengths.shape,
        })  # fmt: skip
        super().__init__(batch, torch.Size([steps]), validate_args=validate_args)
        if self._validate_args:
            present = emission_scores.masked_fill(~self.exists.unsqueeze(-1), 0.0)
            for name, scores in (self._named | {"emission_scores": present}).items():
                check_no_nan(name, scores, "Look for what diverged in the network.")

    @property
    def _named(self) -> dict[str, Tensor]:
        names = "emission_scores", "transition_scores", "initial_scores"
        return {name: getattr(self, name) for name in names}

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
        """Which steps exist, ``(*B, T)`` booleans; padding does not."""
        return masks.exists(self.lengths, self.num_steps, self.emission_scores.device)

    @property
    def support(self) -> constraints.Constraint:
        """Sequences of labels from 0 to K - 1; -1 is one that is not known."""
        return constraints.independent(constraints.integer_interval(-1, self.num_labels - 1), 1)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> LinearChainCRF:
        """Expand to a larger batch; scores are not copied."""
        shape = torch.Size(batch_shape)
        if check_broadcast({"LinearChainCRF": self.batch_shape, "batch_shape": shape}) != shape:
            raise ValueError(
                f"batch_shape must be one that {tuple(self.batch_shape)} expands to; got "
                f"{tuple(shape)}."
            )
        return self._with_emissions(self.emission_scores.expand(*shape, *self._last_two))

    @property
    def _last_two(self) -> torch.Size:
        return self.emission_scores.shape[-2:]

    def _with_emissions(self, emission_scores: Tensor) -> LinearChainCRF:
        other = LinearChainCRF(
            emission_scores, self.transition_scores, self.initial_scores,
            self.lengths, False, transition_per_step=self.transition_per_step,
        )  # fmt: skip
        other._validate_args = self._validate_args
        return other

    def restrict(self, labels: Tensor) -> LinearChainCRF:
        r"""The distribution given what is known of some labels; its scores of other paths are -inf.

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

    def _factors(self) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The arguments of the recursions, and what to add to the score of each path ``(*B)``.

        Recursions take the exponential of initial and transition scores as they stand, so that
        these must be at most zero.
        """
        transition = self.transition_scores
        transition = transition if self.transition_per_step else transition.unsqueeze(-3)
        first = _peak(self.initial_scores, 1)
        later = _peak(transition, 3)
        count = (self.lengths - 1).to(first.device)
        offset = first.squeeze(-1) + count * later.squeeze((-1, -2, -3))
        factors = self.initial_scores - first, transition - later, self.emission_scores
        return (*factors, self.lengths), offset

    def log_partition(self) -> Tensor:
        r""":math:`\log Z`, ``(*B)``: the logarithm of the sum over all paths.

        Differentiable by all scores, any number of times; its gradient by the emission scores are
        the marginals. It is -inf, with gradient zero, where no path is possible.
        """
        factors, offset = self._factors()
        with full_precision(offset):
            return with_one_wait(lambda: recursions.log_evidence(*factors)) + offset

    def _score(self, labels: Tensor) -> Tensor:
        exists = self.exists
        batch = torch.broadcast_shapes(self.batch_shape, labels.shape[:-1])
        labels = labels.expand(*batch, self.num_steps)
        rows = self.emission_scores.expand(*batch, *self._last_two)
        emitted = rows.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        first = self.initial_scores.expand(*batch, self.num_labels).gather(-1, labels[..., :1])
        matrices = self.transition_scores
        matrices = matrices if self.transition_per_step else matrices.unsqueeze(-3)
        pairs = (labels[..., :-1] * self.num_labels + labels[..., 1:]).unsqueeze(-1)
        matrices = matrices.flatten(-2).expand(*batch, self.num_steps - 1, -1)
        taken = matrices.gather(-1, pairs).squeeze(-1).masked_fill(~exists[..., 1:], 0.0)
        return first.squeeze(-1) + emitted.masked_fill(~exists, 0.0).sum(-1) + taken.sum(-1)

    @uncompiled
    def log_prob(self, labels: Tensor) -> Tensor:
        r"""Log-probability :math:`\log p(y_{1:T})`, ``(*B)``, in nats, differentiable by scores.

        Args:
            labels: ``(*B, T)`` integers; those that are -1 are summed out. Padding is not read.

        Raises:
            TypeError: If labels are not integers.
            ValueError: If shapes disagree, or a label is not below K.
        """
        labels = self._checked(labels)

        def compute() -> Tensor:
            if not transforming() and exceeds((labels >= 0).all().byte(), 0):
                return self._score(labels)
            return self.restrict(labels).log_partition()

        return with_one_wait(compute) - finite_or_zero(self.log_partition())

    def _checked(self, labels: Tensor) -> Tensor:
        """Labels with zeros in the padding."""
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

        They carry no gradient; that of ``log_partition`` by the emission scores, taken with
        ``create_graph=True``, are the same numbers and does.
        """
        return recursions.posterior(*self._factors()[0]).states

    def viterbi(self) -> Tensor:
        r"""The most probable labels :math:`\arg\max_y p(y_{1:T})`, ``(*B, T)``; 0 where padded."""
        factors, _ = self._factors()
        refuse_nan(*factors[:2], factors[2].masked_fill(~self.exists.unsqueeze(-1), 0.0))
        return recursions.viterbi(*factors)

    @property
    def mode(self) -> Tensor:
        """Most probable labels ``(*B, T)``, by :meth:`viterbi`."""
        return self.viterbi()

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Sample labels ``(*S, *B, T)``; 0 where padded.

        Raises:
            ValueError: If no path of a sequence is possible.
        """
        shape = torch.Size(sample_shape)
        with torch.no_grad():
            if bool(self.log_partition().isneginf().any()):
                raise ValueError(
                    "scores must leave a path for samples; those of a sequence are all -inf."
                )
            factors, _ = self._factors()
            paths = recursions.sample_states(*factors, shape.numel())
            return paths.reshape(shape + self.batch_shape + self.event_shape)


def _scores(name: str, scores: Tensor, dims: int, meaning: str) -> Tensor:
    """Scores in float32 or float64; raise unless they are floats of enough dimensions."""
    if not scores.dtype.is_floating_point:
        raise TypeError(
            f"{name} must be floating point; got dtype {scores.dtype}. Call .float() on it."
        )
    if scores.dim() < dims:
        raise ValueError(
            f"{name} must have shape {meaning}; got shape {tuple(scores.shape)}. Insert "
            "dimensions of size 1 with unsqueeze."
        )
    return at_least_single(scores)


def _peak(scores: Tensor, dims: int) -> Tensor:
    """The largest along the last dimensions, which are kept; zero where all are -inf, or none."""
    if not scores.numel():
        return scores.new_zeros(*scores.shape[:-dims], *(1,) * dims)
    return finite_or_zero(scores.detach().amax(tuple(range(-dims, 0)), keepdim=True))
