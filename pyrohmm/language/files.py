"""Files of a language model: vocabulary, blocks and parameters in a directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.vocabulary import Vocabulary, word_classes
from ..io.files import TENSORS, FilePath, check_directory, read_directory, write_directory
from ..nn.dropout import LinearDropout
from ..ops.blocks.states import from_clusters
from .training import DefaultDropout

PADDED = 64  # largest number of states, those of all blocks padded, for each number in a file
CLASSES = {"function": "word_classes"}  # the function for unknown words, in a file


def write_model(directory: FilePath, model: Any, options: dict[str, Any]) -> None:
    """Save a ``LanguageModel``, and the options with which it was made."""
    check_directory(directory)
    tensors = {f"module.{name}": tensor for name, tensor in model.module.state_dict().items()}
    tensors |= {"symbol_block": model.blocks.symbol_block, "block_sizes": model.blocks.sizes}
    unknown = model.vocabulary.unknown
    meta = {
        "kind": "language model",
        "words": list(model.vocabulary),
        "unknown": CLASSES if unknown is word_classes else unknown,
        **options,
        "dropout": _as_saved(options["dropout"]),
        "dropout_of_fit": _as_saved(model.module.dropout),
    }
    write_directory(directory, tensors, meta)


def read_model(directory: FilePath, build: Callable[..., Any]) -> Any:
    """The language model of a directory, made by the class ``build``."""
    tensors, meta = read_directory(directory, "language model")
    try:
        return _model_of(tensors, meta, build)
    except Exception as error:
        path = Path(directory) / TENSORS
        raise ValueError(f"{path} does not describe a language model: {error}") from error


def _model_of(tensors: dict[str, Tensor], meta: dict[str, Any], build: Callable[..., Any]) -> Any:
    unknown = word_classes if meta["unknown"] == CLASSES else meta["unknown"]
    symbol_block, sizes = tensors.pop("symbol_block"), tensors.pop("block_sizes")
    state = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    count, there = int(sizes.sum()), sum(tensor.numel() for tensor in tensors.values())
    padded = len(sizes) * int(sizes.max())  # before any memory is taken
    if state["start_vectors.state"].size(0) != count or max(count, padded / PADDED) > there:
        raise ValueError(f"{count} states in {len(sizes)} blocks are claimed; the file has no room")
    blocks, dropout = from_clusters(symbol_block, sizes), meta["dropout"]
    with torch.device("meta"):  # until shapes have been compared
        model = build(
            Vocabulary(meta["words"], unknown),
            blocks,
            meta["hidden_dim"],
            two_level=meta["two_level"],
            dropout=LinearDropout(**dropout) if isinstance(dropout, dict) else dropout,
            contiguous=meta.get("contiguous", False),  # older files have none
        )
    if dropout is None:
        model.module.dropout = DefaultDropout(**meta["dropout_of_fit"])
    model.module.load_state_dict(state, assign=True)
    return model


def _as_saved(dropout: float | LinearDropout | None) -> object:
    return asdict(dropout) if isinstance(dropout, LinearDropout) else dropout
