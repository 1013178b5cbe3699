"""Memory and traffic of a training step with tens of thousands of states, counted without a device.

A step (loss, gradient, Adam) of a neural HMM with 128 blocks, on 256 sequences of 32 of 10,000
words, float32, is run by PyTorch's ``meta`` tensors, which have shapes and no numbers, by the same
operations as on an accelerator. Blocks of successive words are independent and equally frequent, so
that more pairs of blocks occur than in a text.

``gigabytes`` (10^9 bytes) is the largest sum of the sizes of all tensors alive at one time, without
the workspace of libraries and what an allocator holds in reserve. ``operations`` are the kernels
that would be launched, and ``moved`` the gigabytes that they read and write if each reads all that
it takes of its inputs and writes all its results. ``table`` is the size of the transition
probabilities of all pairs of blocks that occur, and ``teraflops`` are the operations of matrix
products. These are counts: nothing was measured on a card.

Writes ``block_memory.json`` and ``block_memory.png``.
"""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import pyro
import torch
from common import PUBLISHED, arguments, earlier, pyplot, save, write
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from pyrohmm import NeuralHMM, blocks
from pyrohmm._sync import guessing
from pyrohmm.chains.blocks import BlockLikelihood
from pyrohmm.distributions.block_hmm import BlockHMM
from pyrohmm.ops.blocks.recursions import moves_of
from pyrohmm.ops.products import take_rows

NAME = "block_memory"
BLOCKS, WORDS, DIM, SEQUENCES, STEPS = 128, 10_000, 256, 256, 32
CARDS = {32768: 16, 65536: 40, 131072: 80}  # gigabytes of the card that is to hold a step


class Counted(TorchDispatchMode):
    """Bytes of the live tensors that were made within, their peak, operations and traffic.

    Args:
        kind: Type of the device whose tensors are counted.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.live, self.peak, self.operations = kind, 0, 0, 0
        self.moved = 0  # bytes that operations read or write
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        before = {x.untyped_storage()._cdata for x in self._tensors((args, kwargs))}
        made = self._tensors(result)
        for tensor in made:
            self.hold(tensor)
        is_view = all(x.untyped_storage()._cdata in before for x in made) and not (
            function._schema.is_mutable
        )
        name = function.overloadpacket.__name__
        if not made or is_view or name.startswith(("empty", "new_empty")):
            return result
        self.operations += 1
        inputs = self._tensors((args, kwargs))
        if name.startswith("index") or name == "gather":  # of the first no more than is taken
            taken = made if name in {"index_select", "index", "gather"} else inputs[-1:]
            inputs = [x for x in (*inputs[1:], *taken) if x is not inputs[0]]
        outputs = [] if function._schema.is_mutable else made
        self.moved += sum(map(_bytes, (*inputs, *outputs)))
        return result

    def hold(self, tensor: Tensor) -> None:
        """Count the memory of a tensor until it is freed."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size

    def _tensors(self, tree: Any) -> list[Tensor]:
        leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
        return [leaf for leaf in leaves if leaf.device.type == self.kind]


def _bytes(tensor: Tensor) -> int:
    """Bytes of the numbers of a tensor, those of an expanded one once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def evidence(hmm: BlockHMM, symbols: Tensor, lengths: Tensor) -> Tensor:
    """Log evidence of symbols that are on the CPU, of an HMM that may have no numbers."""
    device = hmm.log_initial.device
    logs = take_rows(hmm.log_emission, symbols.to(device))
    steps = hmm.blocks.symbol_block[symbols]
    seen = BlockLikelihood(steps, logs, lengths, torch.Size((len(lengths),)))
    return hmm.chain.log_evidence(seen, lengths)


def count(
    states: int, two_level: bool, dropout: float, number: int = BLOCKS, dim: int = DIM,
    words: int = WORDS, sequences: int = SEQUENCES, steps: int = STEPS,
) -> dict[str, Any]:  # fmt: skip
    """A step, and what it takes."""
    pyro.set_rng_seed(0)
    partition = blocks.from_clusters(torch.arange(words) % number, states // number)
    options = {"two_level": two_level, "dropout": dropout}
    with torch.device("meta"):
        module = NeuralHMM(states, words, dim, blocks=partition, **options).train()
    symbols = torch.randint(words, (sequences, steps))
    lengths = torch.full((sequences,), steps)
    optimizer = torch.optim.Adam(module.parameters(), foreach=True)
    hmm = loss = None
    no_autocast = mock.patch.object(torch, "is_autocast_enabled", return_value=False)
    with pyro.validation_enabled(False), guessing(), no_autocast:
        for _ in range(2):  # the first step makes the state of Adam
            hmm = loss = None
            optimizer.zero_grad()
            with Counted("meta") as counted, FlopCounterMode(display=False) as flops:
                for parameter in module.parameters():
                    for tensor in (parameter, *optimizer.state.get(parameter, {}).values()):
                        if tensor.device.type == "meta":
                            counted.hold(tensor)
                hmm = module(lengths)
                loss = -evidence(hmm, symbols, lengths).sum() / lengths.sum()
                loss.backward()
                optimizer.step()
        seen = hmm.blocks.symbol_block[symbols]
    pairs = moves_of(hmm.chain.transitions(), seen, lengths).pairs
    table = 4 * len(pairs) * hmm.blocks.width**2
    return {
        "states": states, "kept": hmm.num_states, "levels": 1 + two_level, "dropout": dropout,
        "pairs": int((pairs.index.unique()).numel()), "table": table / 1e9,
        "gigabytes": counted.peak / 1e9, "operations": counted.operations,
        "moved": counted.moved / 1e9,
        "teraflops": flops.get_total_flops() / 1e12, "card": CARDS.get(states),
    }  # fmt: skip


def draw(rows: list[dict[str, Any]]) -> None:
    """Peak memory by states."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for levels, dropout, style in [
        (1, 0.0, "C1s-"),
        (2, 0.0, "C0o-"),
        (1, 0.5, "C1s:"),
        (2, 0.5, "C0o:"),
    ]:
        some = [row for row in rows if (row["levels"], row["dropout"]) == (levels, dropout)]
        label = f"{'two levels' if levels == 2 else 'one level'}, "
        label += "half of the states dropped" if dropout else "no dropout"
        axis.plot([row["states"] for row in some], [row["gigabytes"] for row in some], style,
                  label=label)  # fmt: skip
    for size in sorted(set(CARDS.values())):
        axis.axhline(size, color=PUBLISHED, linewidth=0.8, linestyle="--")
        axis.annotate(f"a card of {size} GB", (8192, size), (0, 2), textcoords="offset points",
                      color=PUBLISHED, fontsize=9)  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.set(
        xlabel="states",
        ylabel="peak memory, GB (counted, not measured)",
        title="a step of training on 8,192 tokens",
    )
    axis.legend(loc="lower right")
    save(figure, NAME)


def main() -> None:
    options = arguments(__doc__)
    if options.draw:
        draw(earlier(NAME))
        return
    rows = []
    for states in [1024] if options.quick else [8192, 16384, *CARDS]:
        for two_level in (True, False):
            for dropout in (0.0, 0.5):
                rows.append(count(states, two_level, dropout))
                print(rows[-1], flush=True)
    if not options.quick:
        write(NAME, rows)
        draw(rows)


if __name__ == "__main__":
    main()
