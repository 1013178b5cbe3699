"""What a fit ends with, to be compared to the bit."""

import torch


def outcome(fit):
    """Losses and parameters of all restarts, held-out losses, points of the model and its guide."""
    every = fit if fit.restarts is None else fit.restarts
    modules = [part for part in (fit.model, fit.guide) if isinstance(part, torch.nn.Module)]
    points = [point.detach() for part in modules for point in part.parameters()]
    return [every.losses, torch.tensor(fit.validation or []), *every.parameters.values(), *points]
