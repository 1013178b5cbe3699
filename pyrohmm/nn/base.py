"""``HMMModule``: a ``PyroModule`` whose call returns an ``HMM``."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyro
import torch
from pyro import poutine
from pyro.nn import PyroModule
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .._checks import WORDS, CheckedCalls, check_tensor
from ..distributions.hmm import HMM

# held by whoever uses Pyro's handler stack or parameter store, which all threads share
PYRO = threading.RLock()
# parameters that modules of this package have put into Pyro's store
_placed: Any = WeakTensorKeyDictionary()


def forgotten(store: Any, name: str) -> bool:
    """Take a parameter out of Pyro's store, if a module of this package has put it there."""
    parameter = store._params[name]
    if parameter not in _placed:
        return False
    store._param_to_name[parameter] = name  # of several names the store knows the last
    del store[name]
    return True


class OwnParameters(PyroModule):
    """``PyroModule`` whose parameters are isolated from equal names in Pyro's parameter store.

    Pyro names the parameters of a module after its attributes, puts them into a global store, and
    where it meets a name again it replaces the parameter of the module by that in the store: of
    two models with an attribute ``module``, the second would silently become the first. Here the
    parameters of the first leave the store when the second is called. Those that were loaded into
    the store replace the module's, as in Pyro.

    A module that has run may still become a part of another one.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``forward`` under a lock, with the module's own parameters in Pyro's store."""
        with PYRO:
            context = self._pyro_context
            if context.active:
                return super().__call__(*args, **kwargs)
            own, names, held = set(), set(), list[Tensor]()
            for name, parameter in self.named_parameters(remove_duplicate=False):
                held += [] if parameter.requires_grad else [parameter]
                own.add(id(parameter))
                names.add(name.removesuffix("_unconstrained"))
            store, others = pyro.get_param_store(), {}  # names of others, such as of pyro.module
            for name, parameter in list(store.named_parameters()):
                if (name in names) == (id(parameter) in own):
                    continue
                if not forgotten(store, name) and id(parameter) in own:
                    others[id(parameter)] = name
            try:
                return super().__call__(*args, **kwargs)
            finally:
                for name, parameter in list(store.named_parameters()):
                    if name in names and id(parameter) in others:
                        del store[name]
                        store._param_to_name[parameter] = others[id(parameter)]
                    elif name in names:
                        _placed[parameter] = True
                for parameter in held:  # the store makes all require a gradient
                    parameter.requires_grad_(False)
                context.used = False


class HMMModule(CheckedCalls, OwnParameters):
    """A ``PyroModule`` whose call returns an :class:`HMM` for sequences of some lengths.

    Subclasses define ``forward(lengths, observed=None)``, or, if the model depends on covariates
    that the data carry, ``forward(lengths, observed, covariates)``. With ``statistics`` and
    ``m_step`` of a :class:`pyrohmm.nn.closed_form.ChainMStep`, EM maximises their chain in closed
    form; else by gradient steps. Their parameters may be
    ``torch.nn.Parameter`` or ``PyroParam`` (points), or ``PyroSample`` (random variables, sampled
    from the prior or from a guide at each call).

    Example:
        >>> class Coin(HMMModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.logits = torch.nn.Parameter(torch.zeros(2, 2))
        ...
        ...     def forward(self, lengths, observed=None):
        ...         even = torch.full((2, 2), 0.5).log()
        ...         return HMM(even[0], even, Categorical(logits=self.logits), lengths, observed)
        >>> Coin()(torch.tensor([2])).log_prob(torch.tensor([[0, 1]])).exp()
        tensor([0.2500], grad_fn=<ExpBackward0>)

        Counts whose rate depends on a covariate of each step, with one slope for each state:

        >>> class Seasonal(HMMModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.level = torch.nn.Parameter(torch.tensor([0.0, 2.0]))
        ...         self.slope = torch.nn.Parameter(torch.zeros(2))
        ...
        ...     def forward(self, lengths, observed=None, covariates=None):
        ...         even = torch.full((2, 2), 0.5).log()
        ...         rate = (self.level + self.slope * covariates).exp()  # (*B, T, 1) to (*B, T, K)
        ...         counts = Poisson(rate)
        ...         return HMM(even[0], even, counts, lengths, observed, emission_per_step=True)
        >>> season = torch.arange(40.0).sin().unsqueeze(-1)
        >>> data = Sequences.from_list([Poisson((1 + season[:, 0]).exp()).sample()],
        ...                            covariates=[season])
        >>> fit = fit_em(Seasonal(), data)
        >>> bool((fit.model.module.slope > 0.5).any())
        True
    """

    if not TYPE_CHECKING:  # which knows the attributes there are

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError as error:
                known = any(WORDS.get(name, [])[1:]) or name in ("fit", "hmm") or hasattr(HMM, name)
                if name in dir(type(self)) or not known:  # a property may have failed
                    raise
                cure = "Ask a fit: fit_em(module, data).predict(data), or its HMM, .hmm(data)."
                raise AttributeError(f"{error}. {cure}") from None

    def forward(self, lengths: Tensor, observed: Tensor | None = None) -> HMM:
        """Build the HMM.

        Args:
            lengths: ``(*B)`` integers, the number of steps of each sequence.
            observed: ``(*B, T)`` booleans, True where a step is observed; all by default.
        """
        text = f"{type(self).__name__} must define forward(lengths, observed)"
        raise NotImplementedError(f"{text}. It returns the HMM of such sequences.")

    def emission_module(self) -> PyroModule | None:
        """Submodule whose call is the emission of the HMM, so that EM may use its M-step.

        None by default. A module that builds ``HMM(..., self.emission(), ...)`` returns
        ``self.emission`` here.
        """
        return None


@contextmanager
def in_mode(training: bool, *parts: Any) -> Iterator[None]:
    """Context manager: modules in ``train()`` or ``eval()`` mode, restored at the end.

    Args:
        training: Which mode.
        *parts: Modules; anything else has no mode.

    Example:
        >>> part = torch.nn.Dropout()
        >>> with in_mode(False, part):
        ...     part.training
        False
        >>> part.training
        True
    """
    modules = [part for part in map(inspect.unwrap, parts) if isinstance(part, torch.nn.Module)]
    before = [(inner, inner.training) for part in modules for inner in part.modules()]
    try:
        for part in modules:
            part.train(training)
        yield
    finally:
        for inner, mode in before:
            inner.training = mode


def freeze(module: PyroModule, name: str, value: Tensor | None = None) -> None:
    """Replace a parameter by a constant, which no fit changes; ``state_dict()`` saves it.

    Args:
        module: What holds the parameter.
        name: Of the parameter, with dots for parts of the module: ``"emission.loc"``.
        value: The constant; what the parameter is now by default, if it has no prior.

    Raises:
        TypeError: If ``value`` is not a tensor.
        ValueError: If there is no such parameter, or a ``value`` is needed, or of another shape.

    Example:
        >>> module = TabularHMM(2, categorical(3))
        >>> freeze(module, "transition", torch.eye(2))
        >>> sorted(poutine.trace(module).get_trace(torch.tensor([1])).stochastic_nodes)
        ['emission.probs', 'initial']
    """
    *path, last = name.split(".")
    part: Any = module
    for step in path:
        part = getattr(part, step, None)
    priors, points = getattr(part, "_pyro_samples", {}), getattr(part, "_pyro_params", {})
    hidden = {f"{point}_unconstrained" for point in points}
    plain = set(getattr(part, "_parameters", ())) - hidden
    if last not in priors and last not in points and last not in plain:
        known = sorted({*priors, *points, *plain})
        raise ValueError(
            f"name must be that of a parameter; {type(module).__name__} has no {name!r}. "
            f"{'.'.join(path) or 'It'} has {', '.join(known) or 'none'}."
        )
    if value is None and last in priors:
        raise ValueError(f"value must be given for {name!r}, which has a prior and no value.")
    with PYRO, torch.no_grad(), torch.random.fork_rng(devices=[]), poutine.block():
        now = getattr(part, last)  # of a prior a sample, for its shape
        prior = priors.get(last)
        prior = prior if prior is None or hasattr(prior, "sample") else prior(part)
    value = now if value is None else value
    check_tensor("value", value)
    if value.shape != now.shape:
        raise ValueError(
            f"value must have the shape of {name!r}, {tuple(now.shape)}; got {tuple(value.shape)}. "
            "Expand a single number to it."
        )
    space: Any = points[last][0] if last in points else getattr(prior, "support", None)
    if value is not now and space is not None and not bool(space.check(value.double()).all()):
        raise ValueError(f"value of {name!r} must lie in its space, {space}; got {value!s:.200}.")
    delattr(part, last)
    part.register_buffer(last, value.detach().clone())
