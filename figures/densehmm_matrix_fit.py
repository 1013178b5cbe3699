"""Transition matrices as softmaxes of products of thin matrices: Table 1 and Fig. 3 of DenseHMM.

As in section 4 of the paper, n x n matrices A, whose rows are sampled from a Dirichlet distribution
of concentration 0.1, are approximated by the normalised rows of ``|U Z|`` (normAbsLin) or of
``exp(U Z)`` (softmax), with vectors of length l. The loss is ``|A' - A| / |A|`` (Frobenius), and a
row of the table is the median of 200 fits: 10 matrices with 20 initial values from N(0, 1) each,
shared by both factorisations.

``decaying`` is 30,000 steps of Adam with a rate that falls from 0.03 to zero; ``as in the code`` is
what the authors ran, a rate of 0.01 for as many steps or until the loss, in float32, does not
change between two steps after the first 2,000. All problems of a row are one batch, with a
hand-written gradient.

A median over ten matrices depends on the matrices: ``draws`` repeats the rows with l < n for ten
samples of ten matrices. At n = 3 and l = 1 this matters: the ten medians range from 0.006 to 0.134,
three of them at or below the paper's 0.048; those of the table, the first sample, are easy ones.

``rank`` is the rank of the fitted matrices, and of their centred logarithms. ``exactness``
constructs positive matrices from vectors of length n - 1. All parts take ten minutes on two cores,
with as many processes as torch has threads.

Writes ``densehmm_matrix_fit.json`` and ``densehmm_matrix_fit.png``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import torch
from common import arguments, earlier, pyplot, save, write
from torch import Tensor

from pyrohmm import dense

NAME = "densehmm_matrix_fit"
NUM_MATRICES, NUM_STARTS, NUM_STEPS, NUM_DRAWS = 10, 20, 30_000, 10
PAPER = {  # (n, l): lower quartile, median and upper quartile of normAbsLin, then of softmax
    (3, 1): ((0.652, 0.678, 0.696), (0.004, 0.048, 0.110)),
    (3, 2): ((0.002, 0.162, 0.270), (0.000, 0.001, 0.001)),
    (3, 3): ((0.001, 0.001, 0.001), (0.000, 0.001, 0.001)),
    (3, 5): ((0.001, 0.001, 0.001), (0.001, 0.001, 0.001)),
    (5, 1): ((0.745, 0.769, 0.827), (0.321, 0.453, 0.505)),
    (5, 3): ((0.093, 0.346, 0.396), (0.001, 0.001, 0.003)),
    (5, 5): ((0.001, 0.001, 0.002), (0.001, 0.001, 0.001)),
    (5, 10): ((0.001, 0.001, 0.002), (0.001, 0.002, 0.003)),
    (10, 1): ((0.851, 0.862, 0.868), (0.581, 0.616, 0.645)),
    (10, 5): ((0.235, 0.310, 0.345), (0.005, 0.012, 0.028)),
    (10, 10): ((0.002, 0.002, 0.002), (0.002, 0.003, 0.005)),
    (10, 15): ((0.002, 0.002, 0.002), (0.003, 0.003, 0.043)),
}


class Factorisation(NamedTuple):
    """A kernel of the package, and the same from scores ``(n, n, B)`` with what a gradient needs.

    ``rows`` returns probabilities p, normalised over the middle dimension, and
    ``p * d log k(s) / ds``, where k is the kernel and s the scores.
    """

    name: str
    place: int  # in the rows of PAPER
    kernel: dense.Kernel
    rows: Callable[[Tensor], tuple[Tensor, Tensor]]


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    probs = scores.softmax(1)
    return probs, probs


def _norm_abs_lin(scores: Tensor) -> tuple[Tensor, Tensor]:
    sizes = scores.abs()
    total = sizes.sum(1, keepdim=True)
    return sizes / total, scores.sign() / total


SOFTMAX = Factorisation("softmax", 1, dense.exponential, _softmax)
NORM_ABS_LIN = Factorisation("normAbsLin", 0, dense.absolute, _norm_abs_lin)


class Schedule(NamedTuple):
    """Adam's rate falls from ``first`` to ``last``; ``stops`` once the loss does not change."""

    name: str
    first: float
    last: float
    stops: bool


DECAYING = Schedule("decaying", 0.03, 0.0, False)
AS_IN_CODE = Schedule("as in the code", 0.01, 0.01, True)
NEVER_BEFORE = 2_000  # steps


def problems(n: int, length: int, draw: int = 0) -> tuple[Tensor, Tensor]:
    """Matrices ``(n, n, B)``, one for each start, and starts ``(2, B, n, l)``."""
    matrices = np.random.default_rng(1000 * draw + n).dirichlet(np.full(n, 0.1), (NUM_MATRICES, n))
    targets = torch.tensor(matrices, dtype=torch.float32).repeat_interleave(NUM_STARTS, 0)
    shape = (2, NUM_MATRICES * NUM_STARTS, n, length)
    starts = np.random.default_rng([draw, n, length]).standard_normal(shape)
    return targets.permute(1, 2, 0).contiguous(), torch.tensor(starts, dtype=torch.float32)


def gradient(
    factorisation: Factorisation, embeddings: Tensor, targets: Tensor, sizes: Tensor, out: Tensor
) -> Tensor:
    """Losses ``(B,)`` of ``embeddings`` ``(2, B, n, l)``, whose gradient is written to ``out``.

    The batch is the last dimension wherever sums and softmaxes are over one as short as n.
    """
    left, right = embeddings
    scores = torch.bmm(left, right.mT).permute(1, 2, 0).contiguous()  # (n, n, B)
    probs, slope = factorisation.rows(scores)
    error = probs - targets
    losses = error.flatten(0, 1).square().sum(0).sqrt() / sizes
    error -= (error * probs).sum(1, keepdim=True)
    error *= slope
    error /= (losses * sizes.square()).clamp(min=1e-30)
    by_scores = error.permute(2, 0, 1).contiguous()  # (B, n, n)
    torch.bmm(by_scores, right, out=out[0])
    torch.bmm(by_scores.mT, left, out=out[1])
    return losses


def fit(
    factorisation: Factorisation,
    targets: Tensor,
    starts: Tensor,
    schedules: list[Schedule],
    num_steps: int,
) -> Tensor:
    """Embeddings ``(S, 2, B, n, l)`` after Adam from the same starts, by each of S schedules."""
    num_problems = targets.size(-1)
    targets = targets.repeat(1, 1, len(schedules))
    embeddings = starts.repeat(1, len(schedules), 1, 1)
    sizes = targets.flatten(0, 1).square().sum(0).sqrt()

    def of_problems(values: list[float]) -> Tensor:
        return torch.tensor(values).repeat_interleave(num_problems)[:, None, None]

    first = of_problems([schedule.first for schedule in schedules])
    fall = of_problems([schedule.first - schedule.last for schedule in schedules])
    stops = of_problems([float(schedule.stops) for schedule in schedules]).flatten().bool()
    slopes, mean, square = (torch.zeros_like(embeddings) for _ in range(3))
    before = torch.full_like(sizes, torch.inf)
    for t in range(num_steps):
        losses = gradient(factorisation, embeddings, targets, sizes, slopes)
        if t >= NEVER_BEFORE:
            still = ((losses == before) & stops)[:, None, None]
            first.masked_fill_(still, 0.0)  # and they stay constant from here on
            fall.masked_fill_(still, 0.0)
        before = losses
        mean.lerp_(slopes, 0.1)
        square.mul_(0.999).addcmul_(slopes, slopes, value=0.001)
        unbiased = (1 - 0.999 ** (t + 1)) ** 0.5
        direction = mean / (square.sqrt().add_(1e-8 * unbiased))
        rate = first - fall * (t / num_steps)
        embeddings.addcmul_(direction, rate, value=-unbiased / (1 - 0.9 ** (t + 1)))
    return embeddings.unflatten(1, (len(schedules), num_problems)).transpose(0, 1)


def fitted(factorisation: Factorisation, embeddings: Tensor) -> Tensor:
    """Logarithms ``(*B, n, n)`` of the matrices of ``embeddings``, in float64."""
    left, right = embeddings.double()
    return dense.log_rows(factorisation.kernel, left, right)


def losses_of(log_probs: Tensor, targets: Tensor) -> Tensor:
    """Relative Frobenius distances ``(B,)`` of matrices ``(B, n, n)`` and targets ``(n, n, B)``."""
    truth = targets.double().permute(2, 0, 1)
    distance = torch.linalg.matrix_norm(log_probs.exp() - truth)
    return distance / torch.linalg.matrix_norm(truth)


def quartiles(losses: Tensor) -> dict[str, Any]:
    """Median, quartiles and number of losses."""
    low, middle, high = losses.quantile(torch.tensor([0.25, 0.5, 0.75]).to(losses)).tolist()
    return {"ours": middle, "low": low, "high": high, "runs": len(losses)}


def one_row(job: tuple[int, int, Factorisation, int]) -> list[dict[str, Any]]:
    """One line of Table 1 for one factorisation and both schedules, and the ranks of its fits."""
    n, length, factorisation, num_steps = job
    targets, starts = problems(n, length)
    schedules = [DECAYING, AS_IN_CODE]
    by_schedule = fit(factorisation, targets, starts, schedules, num_steps)
    low, middle, high = PAPER[n, length][factorisation.place]
    line = {"n": n, "l": length, "factorisation": factorisation.name}
    rows = []
    for schedule, embeddings in zip(schedules, by_schedule):
        summary = quartiles(losses_of(fitted(factorisation, embeddings), targets))
        rows.append(
            {
                "quantity": "relative error",
                **line,
                "schedule": schedule.name,
                "paper": middle,
                "paper_low": low,
                "paper_high": high,
                **summary,
                "at_or_below_paper": summary["ours"] <= middle,
            }
        )
    return [*rows, {"quantity": "rank", **line, **ranks(factorisation, by_schedule[0], targets)}]


def ranks(factorisation: Factorisation, embeddings: Tensor, targets: Tensor) -> dict[str, Any]:
    """Conditioning of the fitted matrices, and the rank of their logarithms."""
    log_probs = fitted(factorisation, embeddings)
    ratios = _singular_ratios(log_probs.exp())
    result = {
        "share_of_full_rank": (ratios > 1e-12).double().mean().item(),
        "smallest_over_largest_singular_value": ratios.median().item(),
        "of_the_targets": _singular_ratios(targets.double().permute(2, 0, 1)).median().item(),
        "runs": len(log_probs),
    }
    if factorisation == SOFTMAX:  # the other one has zeros
        logs = log_probs - log_probs.mean(-1, keepdim=True)
        fits = torch.linalg.matrix_rank(logs, rtol=1e-9) <= embeddings.size(-1)
        result["share_with_logarithms_of_rank_l_at_most"] = fits.double().mean().item()
    return result


def _singular_ratios(matrices: Tensor) -> Tensor:
    spectrum = torch.linalg.svdvals(matrices)
    return spectrum[..., -1] / spectrum[..., 0]


def many_draws(job: tuple[int, int, int, int]) -> dict[str, Any]:
    """A row of Table 1 for other samples of its matrices, by softmax and the decaying rate."""
    n, length, num_steps, num_draws = job
    samples = [problems(n, length, draw) for draw in range(num_draws)]
    targets = torch.cat([targets for targets, _ in samples], -1)
    starts = torch.cat([starts for _, starts in samples], 1)
    embeddings = fit(SOFTMAX, targets, starts, [DECAYING], num_steps)[0]
    losses = losses_of(fitted(SOFTMAX, embeddings), targets)
    losses = losses.view(num_draws, NUM_MATRICES, NUM_STARTS)
    medians = losses.flatten(1).quantile(0.5, -1)
    paper = PAPER[n, length][1][1]
    return {
        "quantity": "median over ten matrices, by draw of the matrices",
        "n": n,
        "l": length,
        "factorisation": "softmax",
        "schedule": DECAYING.name,
        "steps": num_steps,
        "paper": paper,
        "ours": medians.median().item(),
        "low": medians.min().item(),
        "high": medians.max().item(),
        "medians": sorted(medians.tolist()),
        "ours_by_the_best_start_of_each_matrix": losses.amin(-1).quantile(0.5, -1).median().item(),
        "runs": num_draws,
        "draws_at_or_below_paper": int((medians <= paper).sum()),
    }


def exact(n: int, num_matrices: int) -> dict[str, Any]:
    """The largest error of a construction with vectors of length n - 1."""
    rng = np.random.default_rng(n)
    matrices = torch.tensor(rng.dirichlet(np.full(n, 0.1), (num_matrices, n))).clamp(min=1e-300)
    matrices /= matrices.sum(-1, keepdim=True)
    logs = matrices.log()
    rows = (logs - logs[..., :1])[..., 1:]  # (B, n, n - 1); the first column of scores is zero
    columns = torch.eye(n, dtype=rows.dtype)[:, 1:]  # (n, n - 1)
    probs = dense.log_rows(dense.exponential, rows, columns).exp()
    return {
        "quantity": "largest error of l = n - 1",
        "n": n,
        "l": n - 1,
        "factorisation": "softmax",
        "ours": (probs - matrices).abs().max().item(),
        "runs": num_matrices,
    }


def _initialise() -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # squared gradients underflow float32


def _in_parallel(function: Callable[[Any], Any], jobs: list[Any], part: str) -> list[Any]:
    """Results of ``function`` for all jobs, on as many processes as torch has threads."""
    results = []
    with get_context("spawn").Pool(torch.get_num_threads(), _initialise) as pool:
        for result in pool.imap(function, jobs):
            results.append(result)
            print(part, result, flush=True)
    return results


def table(quick: bool) -> list[dict[str, Any]]:
    """Both factorisations at every n and l of Table 1."""
    lines = [(3, 2), (5, 3)] if quick else list(PAPER)
    num_steps = 200 if quick else NUM_STEPS
    jobs = [(*line, kind, num_steps) for line in lines for kind in (SOFTMAX, NORM_ABS_LIN)]
    return [row for rows in _in_parallel(one_row, jobs, "table") for row in rows]


def draws(quick: bool) -> list[dict[str, Any]]:
    """Dependence of the medians on the sampled matrices, where l is less than n."""
    jobs = [(n, length, 10_000, NUM_DRAWS) for n, length in PAPER if length < n]
    return _in_parallel(many_draws, [(3, 1, 200, 2)] if quick else jobs, "draws")


def exactness(quick: bool) -> list[dict[str, Any]]:
    """Any positive matrix from vectors of length n - 1."""
    rows = [exact(n, 1_000) for n in (3, 5, 10)]
    print(rows)
    return rows


def draw(rows: list[dict[str, Any]]) -> None:
    """Fig. 3: errors against l, one panel for each n; the paper's as hollow markers."""
    from matplotlib.lines import Line2D

    plt = pyplot()

    errors = [row for row in rows if row["quantity"] == "relative error"]
    figure, axes = plt.subplots(1, 3, figsize=(10, 4.4), layout="constrained", sharey=True)
    bottom, finest = 5e-8, 5e-4  # the paper prints three decimals
    colors = {"softmax": "C2", "normAbsLin": "C0"}
    for panel, n in zip(axes, (3, 5, 10)):
        lengths = [length for size, length in PAPER if size == n]
        width = lengths[-1] - lengths[0]
        panel.axhspan(bottom, finest, color="0.95", linewidth=0, zorder=-2)
        panel.axvline(n, color="0.6", linewidth=0.8, zorder=-1)
        for name, color in colors.items():
            mine = [row for row in errors if (row["n"], row["factorisation"]) == (n, name)]
            decaying = [row for row in mine if row["schedule"] == DECAYING.name]
            as_in_code = [row for row in mine if row["schedule"] == AS_IN_CODE.name]
            aside = width if name == "softmax" else -width
            places = [length + 0.012 * aside for length in lengths]
            beside = [length + 0.04 * aside for length in lengths]
            _bars(panel, places, decaying, "low ours high", bottom, color=color, fmt="o-")
            panel.plot(places, [row["ours"] for row in as_in_code], ":", color=color, linewidth=1.2)
            _bars(
                panel, beside, decaying, "paper_low paper paper_high", finest,
                color=color, fmt="o", markerfacecolor="white",
            )  # fmt: skip
        panel.set_xticks(lengths)
        panel.set_xlim(1 - 0.1 * width, lengths[-1] + 0.1 * width)
        panel.set_xlabel("l, length of the vectors")
        panel.set_title(f"n = {n}")
    axes[0].set_yscale("log")
    axes[0].set_ylim(bottom, 2)
    axes[0].set_ylabel("relative error, median and quartiles of 200 fits")
    axes[2].text(
        0.03, 0.04, "grey: printed as\n0.000 in the paper", transform=axes[2].transAxes, color="0.4"
    )
    handles = [Line2D([], [], color=c, linewidth=4, label=name) for name, c in colors.items()]
    ink = "0.3"
    handles += [
        Line2D([], [], color=ink, marker="o", label="ours, decaying rate"),
        Line2D([], [], color=ink, linestyle=":", label="ours, constant rate (authors' code)"),
        Line2D([], [], color=ink, marker="o", markerfacecolor="white", linestyle="", label="paper"),
        Line2D([], [], color="0.6", linewidth=0.8, label="l = n"),
    ]
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=6,
        fontsize=8.5,
        columnspacing=1.2,
        frameon=False,
    )
    save(figure, NAME)


def _bars(
    panel: Any,
    places: list[float],
    rows: list[dict[str, Any]],
    keys: str,
    floor: float,
    **style: Any,
) -> None:
    """Medians and quartiles; values below ``floor`` are drawn at it."""
    low, middle, high = (np.array([max(row[key], floor) for row in rows]) for key in keys.split())
    panel.errorbar(places, middle, [middle - low, high - middle], elinewidth=1.2, **style)


def main() -> None:
    """Fit, then write."""
    parts = (table, draws, exactness)
    options = arguments(__doc__, [part.__name__ for part in parts])
    if options.draw:
        draw(earlier(NAME))
        return
    old = earlier(NAME)
    rows = []
    for part in parts:
        if part.__name__ in options.only:
            rows += [{"part": part.__name__, **row} for row in part(options.quick)]
        else:
            rows += [row for row in old if row["part"] == part.__name__]
    used = round(sum(os.times()[:4]))  # of this process and its children
    print(f"{used} seconds of processor time")
    if not options.quick:
        write(NAME, rows, processes=torch.get_num_threads(), processor_seconds=used)
        draw(rows)


if __name__ == "__main__":
    main()
