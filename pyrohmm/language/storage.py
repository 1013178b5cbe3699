"""Files of a ``LanguageModel``: its vocabulary, blocks, options and parameters."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..data.vocabulary import Vocabulary, word_classes
from ..io.files import TENSORS, FilePath, check_directory, read_directory, write_directory
from ..nn.dropout import LinearDropout
from ..ops.blocks import states as state_blocks
from .dropout import DefaultDropout

CLASSES = {"function": "word_classes"}  # the function for unknown words, in a file


def save_model(model: Any, options: dict[str, Any], directory: FilePath) -> None:
    """Write a language model, and the options it was made with."""
    check_directory(directory)
    tensors = {f"module.{name}": tensor for name, tensor in model.module.state_dict().items()}
    tensors |= {"symbol_block": model.blocks.symbol_block, "block_sizes": model.blocks.sizes}
    unknown = model.vocabulary.unknown
    saved_unknown = CLASSES if unknown is word_classes else unknown
    words = {"words": list(model.vocabulary), "unknown": saved_unknown}
    used = model.module.dropout
    shares = {
        name: asdict(share) if isinstance(share, LinearDropout) else share
        for name, share in (("dropout", options["dropout"]), ("dropout_of_fit", used))
    }
    meta = {"kind": "language model", **words, **options, **shares}
    write_directory(directory, tensors, meta)


def load_model(cls: type[Any], directory: FilePath) -> Any:
    """Read what :func:`save_model` has written."""
    tensors, meta = read_directory(directory, "language model")
    try:
        unknown = word_classes if meta["unknown"] == CLASSES else meta["unknown"]
        vocabulary = Vocabulary(meta["words"], unknown)
        symbol_block, sizes = tensors.pop("symbol_block"), tensors.pop("block_sizes")
        state = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
        if len(state["start_vectors.state"]) != int(sizes.sum()):  # before any memory is taken
            raise ValueError(f"{int(sizes.sum())} states are claimed, and there are not so many")
        blocks = state_blocks.from_clusters(symbol_block, sizes)
        dropout = meta["dropout"]
        if isinstance(dropout, dict):
            dropout = LinearDropout(**dropout)
        with torch.device("meta"):  # until shapes have been compared
            model = cls(
                vocabulary, blocks, meta["hidden_dim"], two_level=meta["two_level"],
                dropout=dropout, contiguous=meta.get("contiguous", False),  # older files have none
            )  # fmt: skip
        if dropout is None:
            model.module.dropout = DefaultDropout(**meta["dropout_of_fit"])
        model.module.load_state_dict(state, assign=True)
    except Exception as error:
        path = Path(directory) / TENSORS
        raise ValueError(f"{path} does not describe a language model: {error}") from error
    return model
