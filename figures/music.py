"""Polyphonic music: minus log evidence of test chords, in nats per step, of HMMs of many kinds.

JSB chorales, Nottingham, Piano-midi and MuseData with the usual splits (Boulanger-Lewandowski et
al., 2012): at each step, which of 88 keys are down. Averages are over all steps of a split. Keys
that no training sequence has are given one probability, that of Laplace's rule; ``seen_keys`` is
the same without them, as in Pyro's example. Of each kind of model the one with the best validation
is named; its test result is read once. Rows are saved as they come. Writes ``music.json`` and
``music.png``; ``--only`` takes kinds, ``--data`` sets of music.

Kinds: ``hmm``, independent keys given the state, by EM; ``durations``, an HSMM; ``pairs``, two
chains, each pair of whose states has keys of its own; ``repeat``, where a key depends on the state
and on whether it was down before, also as ``durations-repeat`` and ``pairs-repeat``, all by EM;
``factorial``, two chains whose logits add; ``linear``, ``chord`` and ``keys``, whose
logits are those of the state plus a function of the chord before: linear, of a network, and of a
network that also reads the lower keys of the same chord, by MAP with early stopping; ``example``,
the first model of Pyro's example of HMMs, by MAP with batches of 8 sequences, once with states
enumerated in ``pyro.markov`` and once with them summed out here, step by step on the same batches.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from statistics import median
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from common import PUBLISHED as GREY
from common import alone, earlier, public_files, pyplot, save, write
from pyro import poutine
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, init_to_value
from pyro.nn import PyroSample
from torch import Tensor, nn
from torch.nn import functional

from pyrohmm import (
    HMM,
    HMMModule,
    MarginalModel,
    Sequences,
    TabularFactorialHMM,
    TabularHMM,
    TabularHSMM,
    additive_bernoulli,
    bernoulli,
    fit_em,
    fit_map,
    negative_binomial_durations,
)

NAMES = {
    "jsb": "jsb-chorales",
    "nottingham": "nottingham",
    "piano": "piano-midi",
    "muse": "muse-data",
}
TITLES = {
    "jsb": "JSB chorales",
    "nottingham": "Nottingham",
    "piano": "Piano-midi",
    "muse": "MuseData",
}
LABELS = {  # of the picture, before the number of states
    "hmm": "HMM",
    "pairs": "two chains",
    "chord": "neural, last chord",
    "linear": "logits, last chord",
    "durations": "durations",
    "repeat": "autoregressive",
    "durations-repeat": "durations, autoregressive",
    "pairs-repeat": "two chains, autoregressive",
    "factorial": "two chains, added logits",
    "keys": "neural, key by key",
}
KINDS = [
    "hmm", "durations", "pairs", "repeat", "durations-repeat", "pairs-repeat", "factorial",
    "linear", "chord", "keys", "example",
]  # fmt: skip
PUBLISHED = {  # nats per step, quoted from memory: not yet checked against the papers
    "HMM (Obermeyer et al., 2019)": {"jsb": 8.28, "piano": 9.41, "nottingham": 4.49},
    "arHMM (Obermeyer et al., 2019)": {"jsb": 8.00, "piano": 7.30, "nottingham": 3.29},
    "nnHMM (Obermeyer et al., 2019)": {"jsb": 6.73, "piano": 7.32, "nottingham": 2.67},
    "HMM (Chiu et al., 2021)": {"nottingham": 2.43, "piano": 8.51, "muse": 7.34, "jsb": 5.74},
    "RNN-NADE (Boulanger-Lewandowski et al., 2012)": {
        "nottingham": 2.31,
        "piano": 7.05,
        "muse": 5.60,
        "jsb": 5.19,
    },
}
PIECE = 100  # steps into which training sequences are cut for gradient steps
CELLS = 1 << 22  # numbers N T K of one evaluated batch, times keys


class Music:
    """One set of music, on the keys that its training set has.

    Args:
        splits: Training, validation and test set.
    """

    def __init__(self, splits: dict[str, Sequences]) -> None:
        train = splits["train"]
        counts = train.values[train.observed].sum(0)
        self.keys = counts > 0
        self.splits = {
            name: Sequences(data.values[..., self.keys].contiguous(), data.lengths)
            for name, data in splits.items()
        }
        rate = 1 / (train.num_observed + 2)
        self.unseen = {}  # nats per step of the other keys
        for name, data in splits.items():
            rolls = data.values[data.observed][:, ~self.keys]
            downs = rolls.sum().item()
            ups = rolls.numel() - downs
            nats = -(downs * math.log(rate) + ups * math.log1p(-rate))
            self.unseen[name] = nats / data.num_observed
        self.num_keys = int(self.keys.sum())

    def told_apart(self, split: str) -> Sequences:
        """A split with two columns for each key, of which one is missing at each step.

        A key that was up before stands in the first, one that was down in the second. Independent
        Bernoulli columns are then keys that depend on the state and on their own last value.
        """
        data = self.splits[split]
        was_down = functional.pad(data.values[:, :-1], (0, 0, 1, 0)) == 1
        columns = [data.values.masked_fill(gone, torch.nan) for gone in (was_down, ~was_down)]
        return Sequences(torch.cat(columns, -1), data.lengths)

    def with_past(self, split: str, piece: int | None = None) -> Sequences:
        """A split with the chord before each as covariates, in pieces of up to some steps."""
        data = self.splits[split]
        past = functional.pad(data.values[:, :-1], (0, 0, 1, 0))
        if piece is None:
            return Sequences(data.values, data.lengths, covariates=past)
        pieces = [
            (values[start : start + piece], before[start : start + piece])
            for values, before, length in zip(data.values, past, data.lengths.tolist())
            for start in range(0, length, piece)
            for values, before in [(values[:length], before[:length])]
        ]
        return Sequences.from_list([v for v, _ in pieces], covariates=[c for _, c in pieces])


# Keys whose logits depend on the state and on other keys ------------------------------------------


class Keys(TorchDistribution):
    """Keys whose logits are those of the state ``(K, D)`` plus those of the context.

    Args:
        of_state: ``(K, D)``.
        of_context: ``(N, T, D)``, or a function that makes it of values ``(N, T, D)``, whose
            result for a key does not depend on it or higher ones.
        shape: N and T.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012
    support = dist.constraints.independent(dist.constraints.boolean, 1)

    def __init__(
        self, of_state: Tensor, of_context: Callable[[Tensor], Tensor], shape: torch.Size
    ) -> None:
        self.of_state, self.of_context = of_state, of_context
        super().__init__(
            torch.Size((*shape, len(of_state))), of_state.shape[-1:], validate_args=False
        )

    def log_prob(self, value: Tensor) -> Tensor:
        """``(N, T, K)`` of values ``(N, T, 1, D)``."""
        values = value.squeeze(-2)
        context = self.of_context(values)
        flat, logits = values.flatten(0, 1), context.flatten(0, 1)
        size = max(1, CELLS // self.of_state.numel())
        parts = [
            functional.softplus(part.unsqueeze(-2) + self.of_state).sum(-1)
            for part in logits.split(size)
        ]
        chosen = (flat * logits).sum(-1, keepdim=True) + flat @ self.of_state.mT
        return (chosen - torch.cat(parts)).unflatten(0, values.shape[:2])


class Masked(nn.Module):
    """A network of the chord before, and perhaps of the lower keys of the chord itself.

    Its hidden units each read the keys below some key, and feed the keys from there on (Germain et
    al., 2015).

    Args:
        num_keys: D.
        num_hidden: Of units; none for a linear function.
        below: Whether lower keys are read.
    """

    def __init__(self, num_keys: int, num_hidden: int, below: bool, drop: float) -> None:
        super().__init__()
        self.below = below
        self.before = nn.Linear(num_keys, num_keys)
        self.drop = nn.Dropout(drop)
        self.num_hidden = num_hidden
        nn.init.normal_(self.before.weight, 0.0, 0.01)
        place = torch.arange(num_keys)
        self.register_buffer("lower", (place < place[:, None]).float())
        self.same = nn.Parameter(0.01 * torch.randn(num_keys, num_keys))
        if num_hidden:
            first = torch.arange(num_hidden) % num_keys  # the lowest key that a unit feeds
            self.register_buffer("reads", (place < first[:, None]).float())
            feeds = place[:, None] >= first if below else torch.ones(num_keys, num_hidden)
            self.register_buffer("feeds", feeds.float())
            self.hidden = nn.Linear(num_keys, num_hidden)
            self.within = nn.Parameter(torch.randn(num_hidden, num_keys) / num_keys**0.5)
            self.out = nn.Parameter(0.1 * torch.randn(num_keys, num_hidden) / num_hidden**0.5)

    def forward(self, past: Tensor, values: Tensor) -> Tensor:
        """Logits ``(N, T, D)``."""
        logits = self.before(past)
        if self.below:
            logits = logits + values @ (self.same * self.lower).mT
        if self.num_hidden:
            units = self.hidden(past)
            if self.below:
                units = units + values @ (self.within * self.reads).mT
            logits = logits + self.drop(units.relu()) @ (self.out * self.feeds).mT
        return logits


class MusicHMM(HMMModule):
    """K states; logits of keys are those of the state plus those of a network of other keys."""

    def __init__(self, num_states: int, chords: Tensor, network: Masked) -> None:
        super().__init__()
        rate = chords.mean(0).clamp(min=1e-4)
        pick = chords[torch.randint(len(chords), (num_states,))]
        self.initial = nn.Parameter(torch.zeros(num_states))
        self.transition = nn.Parameter(torch.randn(num_states, num_states))
        self.keys = nn.Parameter(rate.logit() + pick - rate + 0.1 * torch.randn_like(pick))
        self.network = network

    def forward(
        self, lengths: Tensor, observed: Tensor | None = None, covariates: Tensor | None = None
    ) -> HMM:
        """The HMM, given the chord before each, ``(N, T, D)``."""
        past: Any = covariates
        emission = Keys(self.keys, lambda values: self.network(past, values), past.shape[:2])
        initial, transition = self.initial.log_softmax(-1), self.transition.log_softmax(-1)
        return HMM(
            initial, transition, emission, lengths, observed,
            validate_args=False, emission_per_step=True,
        )  # fmt: skip


# Fits ---------------------------------------------------------------------------------------------


def nats(build: Callable[[Sequences], HMM], data: Sequences, num_states: int) -> float:
    """Minus log evidence per step, in batches of similar length."""
    total, order = 0.0, data.lengths.argsort()
    size = max(1, (CELLS << 2) // (num_states * data.num_steps))
    with torch.no_grad():
        for part in order.split(size):
            batch = data[part]
            total -= build(batch).log_prob(batch.values).double().sum().item()
    return total / data.num_observed


def by_em(music: Music, kind: str, size: int, steps: int) -> dict[str, float]:
    """Nats per step of one or two chains, or an HSMM, with independent columns, by EM."""
    chain, _, repeat = kind.partition("-") if kind != "repeat" else ("hmm", "", kind)
    splits = {name: music.told_apart(name) if repeat else data
              for name, data in music.splits.items()}  # fmt: skip
    emission = bernoulli(splits["train"].values.size(-1), 1.02, 1.2)
    modules: dict[str, Callable[[], HMMModule]] = {
        "hmm": lambda: TabularHMM(size, emission, 1.01, 1.01),
        "durations": lambda: TabularHSMM(size, emission, negative_binomial_durations(MAX_DURATION)),
        "pairs": lambda: TabularFactorialHMM((math.isqrt(size),) * 2, emission, 1.01, 1.01),
    }
    fit = fit_em(
        modules[chain](), splits["train"], num_iterations=steps, tolerance=1e-5, progress=False
    )
    return {name: nats(fit.hmm, splits[name], size) for name in ("valid", "test")}


def by_gradient(music: Music, kind: str, size: int, epochs: int) -> dict[str, float]:
    """Nats per step of states and a network of other keys, by MAP with early stopping."""
    pieces = music.with_past("train", PIECE)
    chords = music.splits["train"].values[music.splits["train"].observed]
    hidden = 0 if kind == "linear" else HIDDEN
    network = Masked(music.num_keys, hidden, kind == "keys", drop=0.2)
    module = MusicHMM(size, chords, network)
    steps = max(1, pieces.num_observed // BATCH)

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, epochs * steps)

    fit = fit_map(
        MarginalModel(module),
        pieces,
        num_iterations=epochs * steps,
        tolerance=None,
        optimizer=lambda p: torch.optim.AdamW(p, lr=RATE, weight_decay=0.01),
        schedule=schedule,
        batch_tokens=BATCH,
        validation=music.with_past("valid", 4 * PIECE),
        validate_every=max(1, epochs // 5) * steps,
        patience=3,
        clip_norm=5.0,
        progress=False,
        report=lambda past: print("   ", past.step // steps, round(past.nats, 4), flush=True),
    )
    module.eval()  # also where the HMM reads its network after it has been built
    return {
        name: nats(fit.hmm, music.with_past(name), size * music.num_keys)
        for name in ("valid", "test")
    }


def by_map(music: Music, kind: str, size: int, steps: int) -> dict[str, float]:
    """Nats per step of two chains of as many states each, whose logits of keys add, by MAP."""
    train, sizes = music.splits["train"], (math.isqrt(size),) * 2
    rate = train.values[train.observed].mean(0).mean().logit().item()
    emission = additive_bernoulli(sizes, music.num_keys, loc=rate, scale=2.0)
    model = MarginalModel(TabularFactorialHMM(sizes, emission, 1.01, 1.01))
    fit = fit_map(
        model, train, num_iterations=steps, learning_rate=0.1, tolerance=None, progress=False,
        schedule=lambda adam: torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps),
    )  # fmt: skip
    return {name: nats(fit.hmm, music.splits[name], size) for name in ("valid", "test")}


# The first model of Pyro's example of HMMs --------------------------------------------------------


def example_priors(num_states: int, num_keys: int) -> dict[str, TorchDistribution]:
    """Those of the example: states that stay, and few keys in each."""
    rows = 0.1 + 0.9 * torch.eye(num_states)
    return {
        "transition": dist.Dirichlet(rows).to_event(1),
        "probs": dist.Beta(0.1, 0.9).expand([num_states, num_keys]).to_event(2),
    }


class ExampleHMM(HMMModule):
    """The model with its states summed out; state 0 comes before the first step."""

    def __init__(self, num_states: int, num_keys: int) -> None:
        super().__init__()
        priors = example_priors(num_states, num_keys)
        self.transition = PyroSample(priors["transition"])
        self.probs = PyroSample(priors["probs"])

    def forward(self, lengths: Tensor, observed: Tensor | None = None) -> HMM:
        """The HMM."""
        rows = self.transition.log()
        return HMM(rows[0], rows, dist.Bernoulli(self.probs).to_event(1), lengths, observed)


def example_in_pyro(num_states: int, data: Sequences) -> Callable[[Tensor], None]:
    """The model with a site for each state, enumerated, and keys in a plate."""
    num_keys = data.values.size(-1)

    def model(batch: Tensor) -> None:
        sites = {n: pyro.sample(n, p) for n, p in example_priors(num_states, num_keys).items()}
        keys = pyro.plate("keys", num_keys, dim=-1)
        with pyro.plate("sequences", len(data), subsample=batch, dim=-2):
            values, lengths = data.values[batch], data.lengths[batch]
            state: Any = 0
            for t in pyro.markov(range(int(lengths.max()))):
                with poutine.mask(mask=(t < lengths).unsqueeze(-1)):
                    state = pyro.sample(
                        f"state_{t}", dist.Categorical(sites["transition"][state]),
                        infer={"enumerate": "parallel"},
                    )  # fmt: skip
                    with keys:
                        probs = sites["probs"][state.squeeze(-1)]
                        pyro.sample(f"keys_{t}", dist.Bernoulli(probs), obs=values[:, t])

    return model


def judge(values: dict[str, Tensor], music: Music) -> dict[str, float]:
    """Nats per step with these parameters."""
    parameters = {name.split(".")[-1]: value.detach() for name, value in values.items()}
    module = ExampleHMM(len(parameters["transition"]), music.num_keys)
    with poutine.block(), poutine.condition(data=parameters):
        hmm = module(torch.tensor([1]))
    return {
        split: nats(
            lambda part: hmm.with_lengths(part.lengths), music.splits[split], hmm.num_states
        )
        for split in ("valid", "test")
    }


def by_example(music: Music, kind: str, size: int, steps: int) -> dict[str, dict[str, Any]]:
    """Nats per step, and seconds a step, of both forms from one start on the same batches."""
    data = music.splits["train"]
    module = ExampleHMM(size, music.num_keys)
    enumerated, marginal = example_in_pyro(size, data), MarginalModel(module)
    hidden = poutine.block(enumerated, hide_fn=lambda site: site["name"].startswith("state"))
    guide = AutoDelta(hidden)
    guide(torch.arange(1))
    same = init_to_value(values={f"module.{n}": v.clone() for n, v in guide.median().items()})
    adam = {"lr": 0.05}
    pyro.clear_param_store()
    elbo = TraceEnum_ELBO(max_plate_nesting=2)
    forms = {
        "example, pyro.markov": SVI(enumerated, guide, pyro.optim.Adam(adam), elbo),
        "example, pyrohmm": SVI(
            marginal, AutoDelta(marginal, init_loc_fn=same), pyro.optim.Adam(adam), Trace_ELBO()
        ),
    }
    rows: dict[str, dict[str, Any]] = {
        name: {"valid": math.inf, "seconds": [], "losses": []} for name in forms
    }
    batches = [batch for _ in range(-(-MORE * steps * EXAMPLE_BATCH // len(data)))
               for batch in torch.randperm(len(data)).split(EXAMPLE_BATCH)]  # fmt: skip
    for step, batch in enumerate(batches[: MORE * steps], 1):
        if step == steps + 1:  # ours goes on
            svi = forms.pop("example, pyrohmm")
            forms = {f"example, pyrohmm, {MORE} times the steps": svi}
            rows[next(iter(forms))] = deepcopy(rows["example, pyrohmm"])
        for name, svi in forms.items():
            start_time = time.process_time()
            part = batch if svi.model is enumerated else data.batch(batch, data.total)
            rows[name]["losses"].append(svi.step(part))
            rows[name]["seconds"].append(time.process_time() - start_time)
            if step % steps == 0 or step == steps // 2:
                found = judge(svi.guide.median(), music)
                if found["valid"] < rows[name]["valid"]:
                    rows[name] |= found | {"best_step": step}
    firsts = [row["losses"][0] for row in rows.values()]
    assert abs(firsts[0] / firsts[1] - 1) < 1e-4, "the forms disagree"
    return {
        name: {
            **{key: row[key] for key in ("valid", "test", "best_step")},
            "batch": EXAMPLE_BATCH,
            "steps": len(row["losses"]),
            "processor_seconds_a_step": median(row["seconds"]),
            "first_and_last_loss": [row["losses"][0], row["losses"][-1]],
        }
        for name, row in rows.items()
    }


EXAMPLE_BATCH, MORE = 8, 10
MAX_DURATION, HIDDEN, BATCH, RATE = 20, 264, 1600, 0.01
# (states, EM iterations or epochs), by set and kind
PLAN = {
    "nottingham": {
        "hmm": [(16, 20), (64, 20), (256, 20), (512, 20)],
        "pairs": [(64, 20)],
        "repeat": [(16, 20), (64, 20), (128, 20)],
        "pairs-repeat": [(64, 20)],
        "linear": [(16, 4)],
        "chord": [(16, 5)],
        "keys": [(32, 8), (64, 12)],
    },
    "piano": {
        "hmm": [(16, 20), (64, 20), (256, 20), (512, 20)],
        "pairs": [(64, 20)],
        "repeat": [(16, 20), (64, 20), (128, 20)],
        "pairs-repeat": [(64, 20)],
        "linear": [(16, 5)],
        "chord": [(16, 6)],
        "keys": [(16, 10)],
    },
    "muse": {
        "hmm": [(16, 15), (64, 15), (256, 15)],
        "pairs": [(64, 15)],
        "repeat": [(16, 15), (64, 15), (128, 15)],
        "pairs-repeat": [(64, 15)],
        "linear": [(16, 3)],
        "chord": [(16, 3)],
        "keys": [(16, 6)],
    },
    "jsb": {
        "hmm": [(16, 50), (64, 50), (128, 50), (256, 50), (512, 50), (1024, 50), (2048, 50)],
        "durations": [(32, 15)],
        "pairs": [(64, 50)],
        "repeat": [(16, 50), (64, 50), (128, 50), (256, 50), (512, 50)],
        "durations-repeat": [(32, 15)],
        "pairs-repeat": [(64, 50)],
        "example": [(16, 58)],
        "factorial": [(64, 200)],
        "linear": [(16, 20), (64, 30)],
        "chord": [(64, 25)],
        "keys": [(16, 25), (64, 40)],
    },
}
FITS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(KINDS, by_em),
    **dict.fromkeys(("linear", "chord", "keys"), by_gradient),
    "factorial": by_map,
    "example": by_example,
}


def keep_row(row: dict[str, Any]) -> None:
    """Add a row, in place of one of the same set, kind and size."""
    which = "music", "model", "states"
    with alone("music"):
        rows = [old for old in earlier("music") if any(old.get(x) != row.get(x) for x in which)]
        order = [*NAMES]
        rows = sorted([*rows, row], key=lambda r: (order.index(r["music"]), str(r["model"])))
        write("music", marked(rows), published=PUBLISHED)


def marked(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with a mark where a model is the best of its kind on validation."""
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        which = row["music"], row["model"]
        best[which] = min(row["valid"], best.get(which, math.inf))
    return [row | {"chosen": row["valid"] == best[row["music"], row["model"]]} for row in rows]


def runs(options: argparse.Namespace) -> Iterator[tuple[str, str, int, int]]:
    """Set, kind, states and iterations of each run."""
    for kind in options.only:
        for name in options.data:
            planned = PLAN[name].get(kind, [])
            for size, steps in [(4, 1)] if options.quick and planned else planned:
                if not options.states or size in options.states:
                    yield name, kind, size, steps


def draw(rows: list[dict[str, Any]]) -> None:
    """The best of each kind beside published numbers."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(10, 8), layout="constrained")
    for axis, name in zip(axes.flat, NAMES):
        ours = [row for row in rows if row["music"] == name and row["chosen"]]
        ours = [row for row in ours if not row["model"].startswith("example")]
        bars = [(f"{LABELS[row['model']]}, {row['states']}", row["test"], "C0") for row in ours]
        bars += [
            (kind.split(" (")[0] + ", " + kind[-5:-1], nats[name], GREY)
            for kind, nats in PUBLISHED.items()
            if name in nats
        ]
        bars.sort(key=lambda bar: -bar[1])
        labels, lengths, colours = zip(*bars)
        axis.barh(labels, lengths, color=colours)
        axis.set(title=TITLES[name], xlabel="test nats per step")
        axis.grid(visible=False, axis="y")
    figure.suptitle("the best of each kind and its number of states; grey: published, by year",
                    fontsize=10)  # fmt: skip
    save(figure, "music")


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes; nothing is written")
    parser.add_argument("--draw", action="store_true", help="only redraw the written results")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--data", nargs="+", choices=[*NAMES], default=[*NAMES])
    parser.add_argument("--states", nargs="+", type=int, help="only these numbers of states")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    loaded: dict[str, Music] = {}
    for name, kind, size, steps in () if options.draw else runs(options):
        if name not in loaded:
            loaded[name] = Music(public_files.read_piano_rolls(public_files.find(NAMES[name])))
        music = loaded[name]
        torch.manual_seed(0)
        start_time = time.perf_counter()
        found = FITS[kind](music, kind, size, steps)
        seconds = time.perf_counter() - start_time
        for model, each in (found if kind == "example" else {kind: found}).items():
            row = {
                **each,
                "music": name,
                "model": model,
                "states": size,
                "valid": each["valid"] + music.unseen["valid"],
                "test": each["test"] + music.unseen["test"],
                "test_seen_keys": each["test"],
                "seen_keys": music.num_keys,
                "most_steps": each.get("steps", steps),
                "seconds": seconds,
            }
            print(row, flush=True)
            if not options.quick:
                keep_row(row)
    if not options.quick:
        draw(earlier("music"))


if __name__ == "__main__":
    main()
