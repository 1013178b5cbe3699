"""HMMs of tokens in the files of Ctrl-G, and back: a directory as ``from_pretrained`` reads it.

Source: Zhang et al., Adaptable Logical Control for Large Language Models, NeurIPS 2024, and the
files that its authors publish. ``alpha_exp`` are transition probabilities, row = from; ``beta``
log-probabilities of tokens; ``gamma`` log-probabilities of the first state, or ``gamma_exp`` its
probabilities.
"""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
import torch
from pyro.distributions import Categorical

from .._checks import check_size
from ..distributions.hard_zeros import log_probs
from ..distributions.hmm import HMM
from ..distributions.observation import is_categorical
from .files import check_regular, replace_file

TENSORS, CONFIG = "model.safetensors", "config.json"


def from_ctrlg(directory: str | Path) -> HMM:
    """The HMM of a model of Ctrl-G, for one sequence of one step: see :meth:`HMM.with_lengths`.

    Args:
        directory: With ``model.safetensors``, as downloaded by ``huggingface_hub``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it lacks a tensor, or their shapes disagree.

    Example:
        >>> even = torch.full((2, 2), 0.5).log()
        >>> hmm = HMM(even[0], even, Categorical(torch.tensor([[0.9, 0.1], [0.2, 0.8]])),
        ...           torch.tensor(1))
        >>> path = getfixture("tmp_path") / "model"
        >>> to_ctrlg(hmm, path, end=1)
        >>> from_ctrlg(path).emission.probs
        tensor([[0.9000, 0.1000],
                [0.2000, 0.8000]])
    """
    check_regular(Path(directory) / TENSORS)
    tensors = safetensors.torch.load_file(Path(directory) / TENSORS)
    if "gamma_exp" in tensors:
        tensors["gamma"] = tensors.pop("gamma_exp").log()
    wanted = {"alpha_exp": ("K", "K"), "beta": ("K", "V"), "gamma": ("K",)}
    if missing := wanted.keys() - tensors.keys():
        raise ValueError(
            f"{TENSORS} must hold {', '.join(wanted)}; it lacks {', '.join(sorted(missing))}."
        )
    initial = tensors["gamma"].float().flatten().log_softmax(-1)
    transition = tensors["alpha_exp"].float()
    emission = Categorical(logits=tensors["beta"].float())
    return HMM(
        initial, (transition / transition.sum(-1, keepdim=True)).log(), emission, torch.tensor(1)
    )


def to_ctrlg(hmm: HMM, directory: str | Path, end: int) -> None:
    """Write an HMM of tokens as a model of Ctrl-G, which its ``HMM.from_pretrained`` reads.

    Args:
        hmm: Its states emit symbols; without batches, constant.
        directory: Where to write ``model.safetensors`` and ``config.json``.
        end: The token that ends a text.

    Raises:
        ValueError: If states do not emit symbols, parameters have batches or steps, or ``end`` is
            none of the V symbols.

    Example:
        See :func:`from_ctrlg`.
    """
    hmm.check_constant("to_ctrlg")
    if not is_categorical(hmm.emission) or any(hmm.chain.batch_shape):
        raise ValueError("hmm must have states that emit symbols, and no batch of parameters.")
    with torch.no_grad():
        tensors = {
            "alpha_exp": hmm.log_transition.exp(),
            "beta": log_probs(hmm.emission),
            "gamma": hmm.log_initial,
        }
    count = tensors["beta"].size(-1)
    check_size("end", end, 0)
    if end >= count:
        raise ValueError(f"end must be one of the symbols 0 to V - 1 = {count - 1}; got {end}.")
    config = {"hidden_states": hmm.num_states, "vocab_size": count, "eos_token_id": end}
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    ready = {name: tensor.cpu().float().contiguous() for name, tensor in tensors.items()}
    replace_file(folder / TENSORS, safetensors.torch.save(ready))
    replace_file(folder / CONFIG, json.dumps(config).encode())
