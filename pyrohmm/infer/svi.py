"""``fit_svi``: stochastic variational inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from ..data.sequences import Sequences
from .loop import train
from .models import exclusive
from .results import Fit
from .training import FitOptions, Settings, check_names


@exclusive()
def fit_svi(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    data: Sequences,
    *,
    num_steps: int = 1000,
    learning_rate: float = 0.01,
    tolerance: float | None = None,
    batch_size: int | None = None,
    validation: Sequences | None = None,
    **options: Unpack[FitOptions],
) -> Fit:
    r"""Maximise the evidence lower bound (ELBO) :math:`E_q[\log p(x, \theta) - \log q(\theta)]`.

    The fit runs on the device of the parameters; with minibatches the data may stay on the host.
    Two runs after the same ``pyro.set_rng_seed`` are equal. Modules are in ``train()`` mode during
    steps, in ``eval()`` mode for held-out data and where a :class:`Fit` is used.

    With ``checkpoint`` the fit saves its state every ten seconds and at its end. The same call
    resumes from there: after the process was killed, or with more ``num_steps``. On a CPU it ends
    with the same bits as one that was never killed. The file of another fit is refused: compared
    are the data, the numbers, text and tensors that arguments are or keep as attributes, shapes of
    parameters, and functions and classes by name; not the code of functions and classes, what they
    read from elsewhere, nor the values of parameters, for which there is ``name``. Free to change
    are ``num_steps``, ``tolerance``, ``patience``, ``progress`` and ``report``.

    Threads that fit wait for each other, as Pyro keeps its state in the process; queries of an
    :class:`HMM` run in parallel. A fit inside another, such as in its ``log_prior``, is one by
    itself.

    Where ``torch.distributed`` has been initialised, as ``torchrun`` does, all processes make the
    same call, with the same seed and the whole data, and each takes its shard of every batch. The
    result is that of one process, to rounding.

    Args:
        model: A Pyro model that takes :class:`Sequences`.
        guide: A Pyro guide that takes the same, such as ``AutoNormal(model)``. If the model
            enumerates states, build it over ``poutine.block`` of the model, as Pyro asks for. An
            autoguide gets a unique name, so that parameters of two guides never mix.
        data: The sequences.
        num_steps: Largest number of gradient steps.
        learning_rate: Of Adam, if there is no ``optimizer``.
        tolerance: End when the mean loss of 25 steps is below that of the 25 before by less than
            this share of itself. None takes all steps, which noisy losses may need.
        batch_size: Number of sequences in a minibatch; all of them by default. The likelihood is
            scaled by total over batch size, priors are not.
        validation: Held-out sequences. The fit ends with the parameters of the largest held-out
            evidence: at the medians of latent variables if the guide has them, else at a sample.
        **options: Further arguments: :class:`FitOptions` explains them.

    Raises:
        FloatingPointError: If the loss becomes infinite or NaN.
        FileNotFoundError: If the directory of ``checkpoint`` does not exist.
        TypeError: If an argument is of the wrong type, ``model`` is a module that builds an HMM, or
            the model returns no HMM for ``validation``.
        ValueError: If a number is out of range, arguments exclude or need each other, there is
            nothing to fit, processes start differently, or ``checkpoint`` is that of another fit.
        RuntimeError: Under ``torch.inference_mode``.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> model = MarginalModel(TabularHMM(1, categorical(2)))
        >>> data = Sequences.from_list([[1, 1, 0]])
        >>> guide = pyro.infer.autoguide.AutoNormal(model)
        >>> fit = fit_svi(model, guide, data, num_steps=500, learning_rate=0.05)
        >>> abs(fit.losses[-100:].mean() - math.log(12)) < 0.1  # the evidence is 1/12
        tensor(True)
    """
    check_names(fit_svi, options, ())
    settings = Settings(
        num_steps=num_steps, learning_rate=learning_rate, tolerance=tolerance,
        batch_size=batch_size, validation=validation, **options,
    )  # fmt: skip
    return train(model, guide, data, settings, "SVI")
