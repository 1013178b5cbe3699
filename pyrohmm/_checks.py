"""Argument checks: errors give the name, the expected and the actual value, and a remedy.

Checks of shape, dtype and device never read values. Checks of values do, which on a GPU waits for
it; callers run those under ``validate_args`` only. Within transforms of ``torch.func``
values cannot be read, and are not checked.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from operator import attrgetter
from traceback import walk_tb
from types import UnionType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.distributions.util import is_validation_enabled
from pyro.poutine.indep_messenger import IndepMessenger
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor
from torch.distributions.constraints import Constraint

from ._imports import imported
from ._transforms import transforming

INNER = "pyrohmm", "contextlib"  # modules whose lines no warning names
LIBRARIES = "torch pyro numpy inspect contextlib functools".split()  # between callers and called
Checked = TypeVar("Checked", bound=Callable[..., Any])
SYNONYMS = [  # names of one argument, here and elsewhere
    text.split()
    for text in (
        "num_states n_components n_states num_components K",
        "num_iterations n_iter max_iter steps num_steps iterations epochs num_epochs n_epochs",
        "learning_rate lr", "tolerance tol", "restarts n_restarts n_init", "progress verbose",
        "num_samples n_samples num_draws draws size", "start init init_params",
        "warmup burn_in burnin tune warmup_steps num_warmup", "num_chains n_chains",
        "elbo loss num_particles", "generator seed random_state", "batch_size batchsize",
        "emission emissions observations obs", "num_symbols n_symbols vocab_size n_features V",
        "dim n_features num_features embedding_dim D", "hidden_dim hidden_size n_hidden",
        "allowed labels", "axes ax", "observed mask", "names labels", "num_parameters n_params",
        "num_folds n_folds cv n_splits", "count k", "lags lag", "num_sequences n_sequences",
        "columns column values value y", "labels states y", "by group groups groupby id animal",
        "time times timestamp", "covariates exog", "num_clusters n_clusters", "x times dates",
    )
]  # fmt: skip
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

WORDS = {  # by which models are asked elsewhere: what a fit, and what its HMM has for it
    word: meant
    for words, *meant in (
        ("states viterbi decode predict most_likely_states", "fit.predict(data)", "viterbi"),
        ("transform posterior posteriors state_probs score_samples predict_proba smoother",
         "fit.predict_proba(data)", "posterior"),
        ("log_prob log_likelihood log_evidence loglik score", "fit.score(data)", "log_prob"),
        ("transmat_ transition transition_matrix", "fit.hmm(data).log_transition.exp()",
         "log_transition.exp()"),
        ("startprob_ initial", "fit.hmm(data).log_initial.exp()", "log_initial.exp()"),
        ("means_", "fit.hmm(data).emission.mean", "emission.mean"),
        ("params", "parameters", ""), ("save to_file", "save(fit, directory)", ""),
        ("plot plots", "plots.transition(fit.hmm(data)), or another of pyrohmm.plots", ""),
        ("aic", "metrics.aic(fit, data)", ""), ("bic", "metrics.bic(fit, data)", ""),
    )
    for word in words.split()
}  # fmt: skip


class PyroValidation:
    """Descriptor: ``validate_args`` defaults to Pyro's global setting.

    That of torch is switched off in the whole process as soon as it compiles anything.
    """

    def __get__(self, distribution: Any, kind: type) -> bool:
        return is_validation_enabled()


class CheckedCalls:
    """Base of classes of which a call that does not fit the signature is refused by name."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = names_checked(cls.__init__)  # type: ignore[method-assign]


class OwnChecks(TorchDistribution):
    """Distribution that validates its arguments itself: torch has no constraints for them."""

    arg_constraints: dict[str, Constraint] = {}  # noqa: RUF012  # torch's interface

    if not TYPE_CHECKING:  # which knows the attributes there are

        def __getattr__(self, name: str) -> Any:
            meant = WORDS.get(name, ("", ""))[1]
            if not hasattr(type(self), meant.split(".")[0]):
                return self.__getattribute__(name)  # raises, with the reason
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{text}. Did you mean {meant}?")


def warn_caller(text: str, kind: type[Warning] = UserWarning) -> None:
    """Warn at the line outside of this package and its decorators from which it was called."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(INNER):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, kind, stacklevel=level)


def synonyms(name: str, known: Iterable[str]) -> list[str]:
    """The known arguments that are called ``name`` elsewhere."""
    return [other for group in SYNONYMS if name in group for other in group if other in known]


def unknown_argument(function: Callable[..., Any], name: str, known: Iterable[str]) -> TypeError:
    """Error for an unknown argument ``name``, with the known one that is meant, if any."""
    near = synonyms(name, known) or get_close_matches(name, known, 1, 0.75)
    cure = f" Did you mean {near[0]}?" if near else ""
    if name == "covariance_type":
        cure = " Families of covariances are normal_full, normal_tied and normal_spherical."
    whose = function.__qualname__.removesuffix(".__init__")
    return TypeError(f"{whose}() got an unexpected keyword argument {name!r}.{cure}")


def names_checked(function: Checked) -> Checked:
    """Decorator: a call that does not fit the signature is refused with the arguments there are."""
    signature = inspect.signature(function)
    known: dict[str, Any] = dict(signature.parameters)
    last: Any = next(reversed(known.values()), None)
    others = last is not None and last.kind is last.VAR_KEYWORD  # of another function
    if others and (unpacked := re.fullmatch(r"Unpack\[(\w+)\]", str(last.annotation))):
        others = False
        known |= vars(inspect.getmodule(inspect.unwrap(function)))[unpacked[1]].__annotations__
        del known[last.name]
    ours = function.__module__.split(".")[0] == __package__

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs.keys() - known.keys():
            passed = name in [own for own, *_ in SYNONYMS]  # to another function, which takes it
            if not others or (ours and synonyms(name, known) and not passed):
                raise unknown_argument(function, name, known)
        try:
            return function(*args, **kwargs)
        except (TypeError, AttributeError) as error:
            if _raised_here(error):
                _explain(function, args, kwargs, error)
            raise

    return call  # type: ignore[return-value]


def _raised_here(error: Exception) -> bool:
    """Whether a line of this package raised an error, and not one of its user's code."""
    names = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    roots = [name.split(".")[0] for name in names if name != __name__]
    return [__package__, *(root for root in roots if root not in LIBRARIES)][-1] == __package__


def _explain(function: Callable[..., Any], args: Any, kwargs: Any, error: Exception) -> None:
    """Raise TypeError if the call does not fit the signature, or an argument is of another kind."""
    signature = inspect.signature(function)
    known = signature.parameters
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as unfit:
        own = next(iter(known), "") in ("self", "cls")
        parts = [x.replace(annotation=x.empty, default=x.empty) for x in known.values()][own:]
        kinds = [type(each).__name__ for each in args[own:]] + [f"{name}=" for name in kwargs]
        text = f"{function.__qualname__}{inspect.Signature(parts)} got ({', '.join(kinds)})"
        raise TypeError(f"{text}: {unfit}.") from error
    for name, value in given.items():
        wanted, of = known[name].annotation, type(value)
        right = {"Any", of.__name__.removesuffix("Type"), *(x.__name__ for x in of.__mro__)}
        if value is not getattr(error, "obj", error) or not isinstance(wanted, str):
            continue  # it was not asked for an attribute that it has not
        if not right & set(re.findall(r"\w+", wanted)):
            raise TypeError(f"{name} must be {wanted}; got {of.__name__}. {error}") from error


def all_names_checked(module: dict[str, Any], *others: Any) -> None:
    """Check calls of the public functions and methods in the globals of a module: its last line.

    ``dir`` of the module shows them, its classes and ``others``.
    """
    own = [x for x in module.values() if getattr(x, "__module__", "") == module["__name__"]]
    public = {x.__name__: x for x in (*own, *others) if x.__name__[0] != "_"}
    module["__dir__"] = lambda: list(public)
    module |= {n: names_checked(x) for n, x in public.items() if inspect.isfunction(x)}
    for kind in filter(inspect.isclass, public.values()):
        for name, part in list(vars(kind).items()):
            if isinstance(part, classmethod):
                setattr(kind, name, classmethod(names_checked(part.__func__)))
            elif inspect.isfunction(part) and (name[0] != "_" or name == "__init__"):
                setattr(kind, name, names_checked(part))


def sample_size(sample_shape: Any) -> torch.Size:
    """Shape of samples that a caller asks for; raise unless it is a tuple."""
    if isinstance(sample_shape, tuple | list):
        return torch.Size(sample_shape)
    text = f"sample_shape must be a tuple, such as (10,); got {type(sample_shape).__name__}"
    raise TypeError(f"{text}. Of values ask a method, such as hmm.log_prob(values).")


def check_kind(
    name: str, value: object, kind: type | UnionType, wanted: str, cure: str = ""
) -> None:
    """Raise unless ``value`` is an instance of ``kind``, known as ``wanted``."""
    if not isinstance(value, kind):
        text = f"{name} must be {wanted}; got {type(value).__name__}. {cure}"
        raise TypeError(text.rstrip())


def check_tensor(name: str, value: object) -> None:
    """Raise unless ``value`` is a tensor."""
    if not isinstance(value, Tensor):
        cure = "Convert it with torch.as_tensor."
        if hasattr(value, "lengths"):  # Sequences
            cure = "Give data.lengths or data.values; a guide is of MarginalModel(module)."
        raise TypeError(f"{name} must be a torch.Tensor; got {type(value).__name__}. {cure}")


def check_real(name: str, value: object) -> None:
    """Raise unless ``value`` is a real-valued tensor."""
    check_tensor(name, value)
    if value.dtype.is_complex:  # type: ignore[attr-defined]
        raise TypeError(f"{name} must be real; got complex numbers. Take .real, or .abs().")


def check_integers(name: str, tensor: Tensor, cure: str = "Call .long() on it.") -> None:
    """Raise unless ``tensor`` holds integers."""
    if isinstance(tensor, Tensor) and tensor.dtype in INTEGERS:
        return
    check_tensor(name, tensor)
    raise TypeError(f"{name} must hold integers; got dtype {tensor.dtype}. {cure}")


def check_booleans(name: str, tensor: Tensor) -> None:
    """Raise unless ``tensor`` holds booleans."""
    check_tensor(name, tensor)
    if tensor.dtype != torch.bool:
        raise TypeError(f"{name} must be boolean; got dtype {tensor.dtype}. Call .bool() on it.")


def check_floats(name: str, tensor: Tensor, cure: str = "Call .float() on it.") -> None:
    """Raise unless ``tensor`` holds floating-point numbers."""
    if isinstance(tensor, Tensor) and tensor.dtype in (torch.float32, torch.float64):
        return
    check_tensor(name, tensor)
    wanted = "float32 or float64" if tensor.dtype.is_floating_point else "floating point"
    raise TypeError(f"{name} must be {wanted}; got dtype {tensor.dtype}. {cure}")


def check_trailing(
    name: str, tensor: Tensor, trailing: tuple[int, ...], meaning: str, cure: str = ""
) -> None:
    """Raise unless the last dimensions of ``tensor`` are ``trailing``, known as ``meaning``."""
    if tuple(tensor.shape[tensor.dim() - len(trailing) :]) != trailing:
        text = f"{name} must end in shape {meaning} = {trailing}; got shape {tuple(tensor.shape)}."
        raise ValueError(f"{text} {cure}".rstrip())


def check_shape(
    name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str, cure: str = ""
) -> None:
    """Raise unless ``tensor`` has ``shape``, known as ``meaning``."""
    if tuple(tensor.shape) != shape:
        text = f"{name} must have shape {meaning} = {shape}; got shape {tuple(tensor.shape)}."
        raise ValueError(f"{text} {cure}".rstrip())


def broadcast_shapes(*shapes: torch.Size) -> torch.Size:
    """The shape to which shapes broadcast: :func:`torch.broadcast_shapes`, imported whole."""
    distinct = set(shapes) - {torch.Size()}
    if len(distinct) <= 1:  # the usual case; torch takes its time
        return distinct.pop() if distinct else torch.Size()
    imported("torch.fx.experimental.symbolic_shapes")  # torch would, with signals
    return torch.broadcast_shapes(*distinct)


def check_broadcast(
    shapes: dict[str, torch.Size], cure: str = "Insert dimensions of size 1 with unsqueeze"
) -> torch.Size:
    """Broadcast shape of the named shapes; raise, naming all, if there is none."""
    try:
        return broadcast_shapes(*shapes.values())
    except RuntimeError:
        listing = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ValueError(
            f"batch shapes must broadcast with each other; got {listing}{_inside_plates()}. "
            f"{cure}; a plate of sequences has the size of the data."
        ) from None


def _inside_plates() -> str:
    """Text that names the enclosing plates."""
    return "".join(
        f", inside plate {plate.name!r} of size {getattr(plate, 'subsample_size', plate.size)} at "
        f"dim {plate.dim}"
        for plate in _PYRO_STACK
        if isinstance(plate, IndepMessenger)
    )


def check_same_device(tensors: dict[str, Tensor]) -> None:
    """Raise unless all the named tensors are on one device."""
    if len(set(map(attrgetter("device"), tensors.values()))) > 1:
        listing = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"all tensors must be on one device; got {listing}. Call .to(device).")


def check_log_simplex(name: str, tensor: Tensor, tolerance: float = 1e-4) -> None:
    """Raise unless ``tensor.exp()`` sums to one along its last dimension."""
    sums = tensor.detach().exp().sum(-1)  # logsumexp would take ten times as long
    low, high = torch.aminmax(sums) if sums.numel() else (torch.ones(()), torch.ones(()))
    if not 1 - tolerance <= low.item() <= high.item() <= 1 + tolerance:  # also catches NaN
        plain, rest = tensor.detach(), f"sums from {low:.6g} to {high:.6g}"
        square = plain.dim() > 1 and plain.size(-1) == plain.size(-2)
        if math.isnan(low.item()):
            rest += ": it holds NaN. Look for NaN, or for the logarithm of what is negative."
        elif square and bool(((plain.exp().sum(-2) - 1).abs() <= tolerance).all()):
            rest += ", and along the columns 1: it is transposed. Row = from: give its .mT."
        elif bool((plain < 0).any()):
            rest += ". Call .log_softmax(-1) on unnormalised scores."
        elif bool(((plain.sum(-1) - 1).abs() <= tolerance).all()):
            rest = "probabilities themselves, whose rows sum to one. Call .log() on them."
        else:
            rest += ". Divide counts, or weights, by the sums of their rows, then call .log()."
        wanted = "log-probabilities that sum to one along the last dimension"
        raise ValueError(f"{name} must hold {wanted}; got {rest}")


def check_lengths(lengths: Tensor, num_steps: int, name: str = "lengths") -> None:
    """Raise unless all lengths lie between 1 and ``num_steps``."""
    if lengths.numel() == 0:
        raise ValueError(f"{name} is empty; wanted at least one. Give one for each sequence.")
    if transforming():
        return
    low, high = map(int, torch.aminmax(lengths))
    if low < 1 or high > num_steps:
        text = f"{name} must lie between 1 and the number of steps, {num_steps}"
        raise ValueError(f"{text}; got values from {low} to {high}. Drop empty sequences.")


def check_no_nan(name: str, tensor: Tensor, cure: str) -> None:
    """Raise if ``tensor`` holds NaN or plus infinity."""
    top = tensor.detach().amax().item() if tensor.numel() else 0.0  # NaN wins a maximum
    if not top < torch.inf:
        raise ValueError(f"{name} holds {top}; wanted finite values. {cure}")


def check_times(times: Tensor, exists: Tensor) -> None:
    """Raise unless times ``(*B, T)`` are finite and increase over steps that are not padding."""
    broken = exists & ~times.isfinite()
    broken[..., 1:] |= exists[..., 1:] & ~(times[..., 1:] > times[..., :-1])
    if bool(broken.any()):
        *sequence, step = broken.nonzero()[0].tolist()
        refuse_times(times.expand(broken.shape)[tuple(sequence)], f"sequence {sequence}", step)


def refuse_times(row: Tensor, place: str, step: int) -> NoReturn:
    """Raise ValueError: the time at ``step`` of the row ``place`` is not finite or not later."""
    after = f" after {row[step - 1].item()}" if step else ""
    place = f"at {place}, step {step}, there is {row[step].item()}{after}"
    text = f"times must be finite and increase along each sequence; {place}. Sort the steps by"
    raise ValueError(f"{text} time, and drop or average those of one time.")


def check_number(name: str, value: object) -> None:
    """Raise unless ``value`` is one real number."""
    scalar = isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex()
    if isinstance(value, bool) or not (scalar or isinstance(value, Real)):
        raise TypeError(f"{name} must be a number; got {type(value).__name__}. Call float() on it.")


def check_share(name: str, value: Any) -> None:
    """Raise unless ``value`` is one number between 0 and 1."""
    check_number(name, value)
    if not 0 < value < 1:
        raise ValueError(f"{name} must be between 0 and 1; got {value}. For 90 % give 0.9.")


def check_positive_number(name: str, value: object, cure: str = "") -> None:
    """Raise unless ``value`` is one positive, finite number."""
    check_number(name, value)
    if not 0 < value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{name} must be positive and finite; got {value}. {cure}".rstrip())


def check_positive(name: str, tensor: Tensor) -> None:
    """Raise unless all numbers are positive and finite."""
    wrong = tensor[~((tensor > 0) & (tensor < torch.inf))]  # NaN is neither
    if wrong.numel():
        raise ValueError(
            f"{name} must be positive and finite; got {wrong[0].item():g}. Clamp it, or map reals "
            "by .exp()."
        )


def check_size(name: str, value: int, least: int = 1) -> None:
    """Raise unless ``value`` is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        cure = "Call int() on it." if hasattr(value, "__int__") else "Is it another argument?"
        raise TypeError(f"{name} must be an int; got {type(value).__name__}. {cure}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}; got {value}.")


def check_tolerance(value: float | None) -> None:
    """Raise unless a relative tolerance is None, or finite and at least 0."""
    if value is not None:
        check_number("tolerance", value)
        if not 0 <= value < math.inf:
            text = f"tolerance must be a share of the loss, at least 0; got {value}"
            raise ValueError(f"{text}. None takes all steps.")


def check_range(name: str, tensor: Tensor, size: int, meaning: str, cure: str = "") -> None:
    """Raise unless integers lie between 0 and ``size - 1``, known as ``meaning``; reads values."""
    if tensor.numel() == 0 or transforming():
        return
    low, high = (int(end) for end in torch.aminmax(tensor))
    if low < 0 or high >= size:
        text = f"{name} must lie between 0 and {meaning} = {size - 1}; got values from {low} to"
        raise ValueError(f"{text} {high}. {cure}".rstrip())


def check_probs(name: str, probs: object) -> Tensor:
    """Convert a list of probabilities to a tensor ``(Q,)``; raise unless they lie in [0, 1]."""
    values = torch.as_tensor(probs)
    if values.dim() != 1 or not values.numel() or not bool(((values >= 0) & (values <= 1)).all()):
        text = f"{name} must be a list of numbers between 0 and 1; got {probs!r}"
        raise ValueError(f"{text}. Give one as [0.5].")
    return values
