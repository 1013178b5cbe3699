"""Emission families made of others: joined streams, and states that share an emission."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule
from torch import Tensor

from .._checks import check_integers
from ..distributions.observation import Streams, Tied
from .closed_form import EmissionMStep, Maximum, Statistics, mode_of_part, sample_of_part, under
from .emissions import from_distribution
from .family import Emission, EmissionFamily
from .normals import scale_prior


def streams(*families: EmissionFamily) -> EmissionFamily:
    """Emission family of several observations at once, independent given the state.

    Observations are vectors of floating point, in which each family has its own components: see
    :class:`pyrohmm.distributions.Streams`. Where all components of a stream are NaN, it is missing.

    Sites: those of the families, as ``emission.parts.0.…``, ``emission.parts.1.…``.

    Example:
        >>> module = streams(categorical(4), normal(2))(3)
        >>> module().event_shape
        torch.Size([3])
    """
    if not families:
        raise ValueError("families is empty; wanted at least one emission family.")
    return partial(StreamsEmission, families=families)


class StreamsEmission(Emission, emits=Streams):
    """Several observations at once: see :func:`streams`."""

    def __init__(self, num_states: int, families: tuple[EmissionFamily, ...]) -> None:
        super().__init__()
        self.parts = PyroModule[torch.nn.ModuleList]([family(num_states) for family in families])
        for part in self.parts:
            _check_part("families of streams", part)
        self.summed = all(getattr(part, "summed", True) for part in self.parts)

    @classmethod
    def of(cls, distribution: Any, base: Any) -> Emission | None:
        """The module of the parts of a distribution, if all have closed M-steps."""
        parts = [from_distribution(part) for part in base.parts]
        if not all(isinstance(part, EmissionMStep) for part in parts):
            return None
        built = iter(parts)
        return cls(0, tuple(lambda _: next(built) for _ in parts))

    def forward(self) -> TorchDistribution:
        """The distribution of a vector, batched over states."""
        return Streams([part() for part in self.parts])

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """Statistics of each part, under its name; a step at which it is missing does not count."""
        with torch.no_grad():
            joined = self.forward() if current is None else current
        statistics: Statistics = {}
        for i, (part, piece) in enumerate(zip(self.parts, joined.split(values))):
            present, weight = ~piece.isnan().reshape(len(piece), -1).all(-1), weights
            if not bool(present.all()):
                piece, weight = piece[present], weights[:, present]
            emission = None if current is None else joined.parts[i]
            statistics |= under(f"parts.{i}.", part.statistics(piece, weight, emission))
        return statistics

    def scale_prior(self, moments: Tensor) -> float:
        """Each part by itself: see :func:`.normals.scale_prior`."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            joined = self.forward()
        if moments.shape[1:] != joined.event_shape:
            return 0.0
        return sum(map(scale_prior, self.parts, joined.split(moments)))

    def m_step(self, statistics: Statistics) -> Maximum:
        """Each part by itself."""
        values: dict[str, Tensor] = {}
        notes: list[str] = []
        for i, part in enumerate(self.parts):
            mode, remarks = mode_of_part(part, f"parts.{i}.", statistics)
            values, notes = values | mode, notes + remarks
        return values, notes

    def sample_parameters(self, statistics: Statistics, current: Statistics) -> Statistics:
        """Each part by itself, if it can be sampled."""
        samples: Statistics = {}
        for i, part in enumerate(self.parts):
            samples |= sample_of_part(part, f"parts.{i}.", statistics, current)
        return samples


def tied(family: EmissionFamily, index: Tensor | list[int]) -> EmissionFamily:
    """Emission family in which states share emissions: state k has number ``index[k]``.

    Sites: those of ``family``, for as many states as there are distinct emissions.

    Args:
        family: Called with the number of distinct emissions.
        index: ``(K,)`` integers from 0, all of them used.

    Example:
        >>> tied(categorical(4), [0, 0, 1])(3)().batch_shape
        torch.Size([3])
    """
    numbers = torch.as_tensor(index)
    check_integers("index", numbers)
    if numbers.dim() != 1 or sorted(set(numbers.tolist())) != list(range(int(numbers.max()) + 1)):
        raise ValueError(
            f"index must be (K,) integers that use all numbers from 0; got {numbers.tolist()}."
        )
    return partial(TiedEmission, family=family, index=numbers)


class TiedEmission(Emission, emits=Tied):
    """States that share emissions: see :func:`tied`."""

    def __init__(self, num_states: int, family: EmissionFamily, index: Tensor) -> None:
        super().__init__()
        if len(index) != num_states:
            raise ValueError(f"index must have one entry for each of K = {num_states} states; "
                             f"got {len(index)}.")  # fmt: skip
        self.register_buffer("index", index.long())
        self.num_distinct = int(index.max()) + 1
        self.part = family(self.num_distinct)
        _check_part("family", self.part)
        self.summed = getattr(self.part, "summed", True)

    @classmethod
    def of(cls, distribution: Any, base: Any) -> Emission | None:
        """The module of the distinct emissions of a distribution, if it has a closed M-step."""
        part = from_distribution(base.base)
        if not isinstance(part, EmissionMStep):
            return None
        module = cls(len(base.index), lambda _: part, base.index)
        module.num_distinct = base.base.batch_shape[-1]  # some perhaps unused
        return module

    def forward(self) -> TorchDistribution:
        """The distribution of an observation, batched over states."""
        return Tied(self.part(), self.index)

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """Statistics of the distinct emissions."""
        weights = weights.double()
        member = torch.nn.functional.one_hot(self.index, self.num_distinct).to(weights)
        base = None if current is None else current.base
        return under("part.", self.part.statistics(values, weights @ member, base))

    def scale_prior(self, moments: Tensor) -> float:
        """Scale the prior of the distinct emissions: see :func:`.normals.scale_prior`."""
        return scale_prior(self.part, moments)

    def m_step(self, statistics: Statistics) -> Maximum:
        """The mode of the distinct emissions."""
        return mode_of_part(self.part, "part.", statistics)

    def sample_parameters(self, statistics: Statistics, current: Statistics) -> Statistics:
        """Sample of the parameters of the distinct emissions, if they can be sampled."""
        return sample_of_part(self.part, "part.", statistics, current)


def _check_part(name: str, part: object) -> None:
    """Raise unless the M-step of ``part`` can be one of several."""
    if not isinstance(part, EmissionMStep) or getattr(part, "in_time", False):
        raise TypeError(
            f"{name} must have a closed M-step, and emit observations that depend on the state "
            f"alone; got {type(part).__name__}. Make it the whole emission of the module, or write "
            "one PyroModule that returns all."
        )
