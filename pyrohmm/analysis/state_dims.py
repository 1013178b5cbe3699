"""Which dimensions of latent variables run over states, and their permutation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

# Names of the dimensions of the variables of TabularHMM, DenseHMM and others.
KNOWN_DIMS = {
    "initial": ("state",),
    "transition": ("state", "next_state"),
    "rates": ("state", "next_state"),
    "start": ("embedding",),
    "leave": ("state", "embedding"),
    "enter": ("state", "embedding"),
    "emit": ("state", "symbol_embedding"),
    "symbol": ("symbol", "symbol_embedding"),
}
STATE_DIMS = ("state", "next_state")  # what is permuted when states are renamed


def name_dims(
    shapes: Mapping[str, tuple[int, ...]],
    dims: Mapping[str, Sequence[str]],
    num_states: int,
    num_symbols: int,
    leading: Mapping[str, tuple[str, ...]] | None = None,
) -> dict[str, tuple[str, ...]]:
    """Names of the dimensions of each variable: ``state``, ``next_state``, ``symbol``, ...

    Args:
        shapes: Of the variables, by name.
        dims: Names of the dimensions of some of them, which are kept.
        num_states: K; a first dimension of that size is taken for states.
        num_symbols: V, or 0 if observations are not symbols.
        leading: Names of the first dimensions of some of them, which are those of plates.
    """
    named: dict[str, tuple[str, ...]] = {}
    for variable, whole in shapes.items():
        plates = (leading or {}).get(variable, ())
        shape = whole[len(plates) :]
        path = variable.split(".")
        known = KNOWN_DIMS.get(path[-1], ())
        names = [f"{variable}_dim_{i}" for i in range(len(shape))]
        if variable in dims:
            names = list(dims[variable])
        elif len(known) == len(shape) > 0:
            names = list(known)
        elif shape[:1] == (num_states,):
            names[0] = "state"
            if shape == (num_states,) * 2 and "emission" not in path:
                names[1] = "next_state"
            elif len(shape) == 2 and shape[1] == num_symbols:
                names[1] = "symbol"
        named[variable] = tuple(names) if variable in dims else (*plates, *names)
    sizes: dict[str, int] = {}  # a name that has another size already gets that of its module
    for variable, known_names in named.items():
        module, unique = variable.rpartition(".")[0], []
        for name, size in zip(known_names, shapes[variable]):
            clash = sizes.setdefault(name, size) != size and variable not in dims
            unique.append(f"{module}.{name}" if clash else name)
            sizes.setdefault(unique[-1], size)
        named[variable] = tuple(unique)
    return named


def permute_dims(value: Tensor, dims: Sequence[str], order: Tensor) -> Tensor:
    """Permute the dimensions of states of ``value`` ``(C, S, ...)`` by ``order`` ``(C, S, K)``."""
    order = order.to(value.device)
    for place, name in enumerate(dims, start=2):
        if name in STATE_DIMS:
            shape = [1] * value.dim()
            shape[:2], shape[place] = order.shape[:2], order.size(-1)
            value = value.gather(place, order.reshape(shape).expand(value.shape))
    return value
