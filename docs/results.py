"""Tables and numbers of the documentation, read from the results in ``figures/``.

Nothing here is typed in by hand: :func:`substitutions` is what pages refer to as ``{{ name }}``.
"""

from __future__ import annotations

import json
import math
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any

FIGURES = Path(__file__).resolve().parent.parent / "figures"
DASH = "—"
SHAPE = "shape N, T, K, V"
Row = dict[str, Any]


@cache
def result(name: str) -> dict[str, Any]:
    """The file ``figures/{name}.json``."""
    return json.loads((FIGURES / f"{name}.json").read_text())


def rows(name: str, /, **where: Any) -> list[Row]:
    """The rows of a result whose entries are those of ``where``; underscores may be spaces."""
    return [
        row
        for row in result(name)["rows"]
        if all(row.get(key, row.get(key.replace("_", " "))) == value
               for key, value in where.items())
    ]  # fmt: skip


def one(name: str, /, **where: Any) -> Row:
    """The only row of a result that has these entries.

    Raises:
        LookupError: If there is none, or more than one.
    """
    chosen = rows(name, **where)
    if len(chosen) != 1:
        raise LookupError(f"{name}.json has {len(chosen)} rows with {where}; one is needed.")
    return chosen[0]


def table(header: list[str], body: list[list[str]]) -> str:
    """A Markdown table, the first column aligned to the left and the others to the right."""
    lines = [header, [":--"] + ["--:"] * (len(header) - 1), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def origin(name: str) -> str:
    """The command that makes a result, and the machine it ran on."""
    found = result(name)
    versions = found["versions"]
    return (
        f"`{found['command']}`, which writes `figures/{name}.json`. Measured on "
        f"{found['machine']}, Python {versions['python']}, torch {versions['torch']}."
    )


def percent(share: float, digits: int = 1) -> str:
    """A share in percent, without the sign."""
    return f"{100 * share:.{digits}f}"


def plain(number: float | None, digits: int = 1) -> str:
    """A number, or a dash if there is none."""
    return DASH if number is None else f"{number:.{digits}f}"


def bounds(numbers: list[float], digits: int) -> str:
    """The least and the largest of some numbers: ``1.2 to 3.4``."""
    return f"{min(numbers):.{digits}f} to {max(numbers):.{digits}f}"


# Speed ------------------------------------------------------------------------------------------

PEERS = ["dynamax", "hmmlearn E-step", "DiscreteHMM", "log space, autograd", "pyro.markov"]


def shapes(quantity: str) -> list[str]:
    """The sizes at which a quantity was measured, in the order of the file."""
    found = (", ".join(map(str, row[SHAPE])) for row in rows("throughput", quantity=quantity))
    return list(dict.fromkeys(found))


def compared(quantity: str, label: str, ours: list[str], peers: list[str]) -> str:
    """Milliseconds of this package, and how many times longer the others take."""
    measured = {
        (", ".join(map(str, row[SHAPE])), row["method"]): row
        for row in rows("throughput", quantity=quantity)
    }
    body = []
    for shape in shapes(quantity):
        line = [shape]
        for method in ours:
            row = measured.get((shape, method))
            line.append(plain(row["milliseconds"]) if row else DASH)
        for method in peers:
            row = measured.get((shape, method))
            line.append(f"{row['times_slower_than_pyrohmm'][0]:.1f}×" if row else DASH)
        body.append(line)
    return table([label, *(f"{method}, ms" for method in ours), *peers], body)


def gradient_table() -> str:
    """Evidence and its gradient, a row for each method: eight columns are too wide for a page."""
    quantity, ours = (
        "evidence and gradient",
        ["pyrohmm", "pyrohmm, one thread", "pyrohmm, no Numba"],
    )
    measured = {
        (", ".join(map(str, row[SHAPE])), row["method"]): row
        for row in rows("throughput", quantity=quantity)
    }
    body = []
    for method in (*ours, *PEERS):
        found = [measured.get((shape, method)) for shape in shapes(quantity)]
        if method in ours:
            line = [plain(row["milliseconds"]) if row else DASH for row in found]
        else:
            line = [f"{row['times_slower_than_pyrohmm'][0]:.1f}×" if row else DASH for row in found]
        body.append([f"{method}, ms" if method in ours else method, *line])
    return table(["N, T, K, V", *shapes(quantity)], body)


def small_table() -> str:
    """Evidence and its gradient of few steps."""
    ours = ["pyrohmm", "pyrohmm, one thread"]
    return compared("evidence and gradient, small", "N, T, K, V", ours, ["dynamax"])


def busy_table() -> str:
    """Evidence and its gradient on a machine with other work."""
    ours = ["pyrohmm", "pyrohmm, one thread", "dynamax"]
    return compared("evidence and gradient, two busy loops beside", "N, T, K, V", ours, [])


def vectors_table() -> str:
    """Normal vectors: evidence, with and without gradient, and iterations of EM."""
    body = []
    for quantity in ("evidence and gradient", "evidence", "EM iteration"):
        found: dict[str, dict[str, Row]] = {}
        for row in rows("throughput", quantity=f"vectors: {quantity}"):
            covariance = {"diag": "diagonal", "separated": "diagonal, far apart"}.get(
                row["covariance"], row["covariance"]
            )
            name = f"{quantity}, {covariance}, {', '.join(map(str, row['shape N, T, K, D']))}"
            found.setdefault(name, {})[row["method"]] = row
        for name, methods in found.items():
            others = (
                f"{methods[peer]['times_slower_than_pyrohmm'][0]:.1f}×" if peer in methods else DASH
                for peer in ("dynamax", "hmmlearn")
            )
            body.append([name, plain(methods["pyrohmm"]["milliseconds"]), *others])
    return table(["covariance; N, T, K, D", "pyrohmm, ms", "dynamax", "hmmlearn"], body)


def families_table() -> str:
    """An iteration of EM, and evidence with gradient, of each family of emissions."""
    em, gradient = (
        {row["family"]: plain(row["milliseconds"]) for row in rows("throughput", quantity=name)}
        for name in ("families: EM iteration", "families: evidence and gradient")
    )
    header = ["emission", "EM iteration, ms", "evidence and gradient, ms"]
    return table(header, [[f"`{name}`", em[name], gradient[name]] for name in em])


def steps_table() -> str:
    """A step of each fit of a small model, and samples of NUTS, beside Pyro's enumerated form."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows("throughput", part="steps"):
        name = f"a step of `{row['fit']}`" if "fit" in row else row["quantity"]
        found.setdefault(name, {})[row["method"]] = row
    body = [
        [name, *(plain(methods.get(method, {}).get("milliseconds")) for method in
                 ("pyrohmm", "Pyro, enumerated"))]
        for name, methods in found.items()
    ]  # fmt: skip
    return table(["N = 20, T = 50, K = 2, V = 6", "pyrohmm, ms", "Pyro, enumerated, ms"], body)


def em_table() -> str:
    """One iteration of EM."""
    return compared("EM iteration", "N, T, K, V of EM", ["pyrohmm"], ["hmmlearn", "dynamax"])


def batches_table() -> str:
    """Perplexity by seconds of training, for batches of different sizes."""
    body = []
    for row in sorted(rows("batch_size"), key=lambda row: row["tokens"]):
        halfway = min(row["course"], key=lambda point: abs(point[0] - row["seconds"] / 2))
        body.append(
            [f"{row['tokens']:,}", f"{row['rate']:g}", f"{row['milliseconds_per_step']:.0f}",
             f"{row['epochs']:.1f}", plain(halfway[1]), plain(row["perplexity"])]
        )  # fmt: skip
    header = ["tokens", "rate", "ms a step", "epochs", "perplexity halfway", "at the end"]
    return table(header, body)


def block_queries_table() -> str:
    """Time of queries of a chain in blocks, over that of its evidence, by missing steps."""
    found: dict[str, dict[int, float]] = {}
    for row in rows("block_queries"):
        found.setdefault(row["query"], {})[row["missing"]] = row["times"][0]
    counts = sorted({row["missing"] for row in rows("block_queries")})
    first = {row["missing"]: row for row in rows("block_queries", query="log_prob")}
    body = [["`log_prob`, ms", *(plain(first[count]["milliseconds"]) for count in counts)]]
    body += [
        [f"`{name}`", *(f"{by[count]:.1f}×" if count in by else DASH for count in counts)]
        for name, by in found.items()
        if name != "log_prob"
    ]
    return table(
        ["query", *(f"{count} missing" if count else "all seen" for count in counts)], body
    )


def structure_table() -> str:
    """Evidence and gradient of chains with more structure, on the same vectors."""
    found = rows("throughput", part="structure")
    plainest = found[0]["milliseconds"]
    body = [
        [
            row["method"].removeprefix("pyrohmm").removeprefix(", ") or "plain",
            plain(row["milliseconds"]),
            f"{row['milliseconds'] / plainest:.1f}×",
        ]
        for row in found
    ]
    return table(["chain", "ms", "over the plain one"], body)


def query_table() -> str:
    """Posterior, Viterbi and path samples."""
    body = []
    for quantity in ("posterior", "viterbi", "path sample"):
        for shape in shapes(quantity):
            found = {
                row["method"].split()[0]: row
                for row in rows("throughput", quantity=quantity)
                if ", ".join(map(str, row[SHAPE])) == shape
            }
            others = (
                f"{found[peer]['times_slower_than_pyrohmm'][0]:.1f}×" if peer in found else DASH
                for peer in ("dynamax", "hmmlearn")
            )
            body.append([f"{quantity}, {shape}", plain(found["pyrohmm"]["milliseconds"]), *others])
    return table(["query; N, T, K, V", "pyrohmm, ms", "dynamax", "hmmlearn"], body)


def restart_bounds() -> str:
    """How many times longer sixteen restarts take than one fit, over fits and sizes."""
    found = rows("throughput", quantity="sixteen restarts over one")
    return bounds([row["ours"][0] for row in found], 1)


def pairs_table() -> str:
    """Loss and gradient of a co-occurrence fit, beside the formula over all pairs of symbols."""
    body = []
    for loss in ("squared distance", "relative distance", "cross-entropy"):
        for row in rows("cooccurrence_scaling", quantity=f"{loss} and gradient", method="ours"):
            where = {"V": row["V"], "pairs": row["pairs"], "method": "dense formula"}
            dense = rows("cooccurrence_scaling", quantity=f"{loss} and gradient", **where)
            times = f"{dense[0]['times_slower_than_ours'][0]:.1f}×" if dense else DASH
            size = f"{loss}, V = {row['V']:,}, {row['pairs']:,} pairs"
            body.append([size, plain(row["milliseconds"]), times])
    return table(["loss and gradient", "ms", "over all pairs"], body)


def fits_table() -> str:
    """Nats per held-out word of the fits of one size, at the end of each."""
    body = []
    last = {
        (row["module"], row["method"]): row  # rows are in the order of their steps
        for row in rows("cooccurrence_scaling", quantity="nats per held-out word")
    }
    for (module, method), row in sorted(last.items(), key=lambda item: item[1]["nats_per_word"]):
        body.append([f"{module}, {method}", f"{row['nats_per_word']:.2f}", f"{row['seconds']:.0f}"])
    return table(["module and fit", "nats per word", "seconds"], body)


def pairs_numbers() -> dict[str, str]:
    """What the page of benchmarks says of fits to co-occurrences: of a DenseHMM, at the end."""
    last = {
        row["method"].removeprefix("co-occurrence, "): row["nats_per_word"]
        for row in rows("cooccurrence_scaling", quantity="nats per held-out word",
                        module="DenseHMM")
    }  # fmt: skip
    (size,) = {row["V"] for row in rows("cooccurrence_scaling", part="relative", module="DenseHMM")}
    dense = one("cooccurrence_scaling", quantity="squared distance and gradient", V=size,
                method="dense formula")  # fmt: skip
    return {
        "faster": f"{dense['times_slower_than_ours'][0]:.0f}",
        "symbols": f"{size:,}",
        "uniform": f"{math.log(size):.2f}",
        "squared": f"{last['squared distance']:.2f}",
        "relative": f"{last['relative distance']:.2f}",
        "entropy": f"{last['cross-entropy']:.2f}",
        "machine": one(
            "cooccurrence_scaling", quantity="relative distance and gradient", V=size, method="ours"
        )["machine"],
    }


# DenseHMM ---------------------------------------------------------------------------------------


def matrix_table() -> str:
    """Table 1 of the DenseHMM paper: the error of the softmax, beside ours."""
    body = []
    for row in rows("densehmm_matrix_fit", factorisation="softmax", schedule="as in the code"):
        if row["quantity"] != "relative error":
            continue
        sizes = {"n": row["n"], "l": row["l"], "quantity": "relative error"}
        decaying = one("densehmm_matrix_fit", factorisation="softmax", schedule="decaying", **sizes)
        other = one("densehmm_matrix_fit", factorisation="normAbsLin", schedule="decaying", **sizes)
        body.append(
            [f"{row['n']}, {row['l']}", f"{row['paper']:.3f}", f"{row['ours']:.4f}",
             f"{decaying['ours']:.4f}", f"{other['ours']:.4f}"]
        )  # fmt: skip
    header = ["n, l", "paper, softmax", "ours, its schedule", "ours, decaying rate", "normAbsLin"]
    return table(header, body)


def claim_table(name: str) -> str:
    """The claims of a figure of the DenseHMM paper, and what holds of each."""
    named = {"penn": "Penn tags: ", "web": "web tags: "}
    body = []
    for claim in result(name)["claims"]:
        line = [named.get(claim["data"], "") + claim["claim"]]
        for protocol in PROTOCOLS:
            found = claim[protocol]
            share = f", in {percent(found['number'], 0)} %" if "of 4 cells" in line[0] else ""
            line.append(("yes" if found["holds"] else "no") + share)
        body.append(line)
    return table(["claim of the text", "protocol of the code", "corrected protocol"], body)


PROTOCOLS = ("as in the code", "done right")


def cells_where(name: str, claim: str, protocol: str, data: str | None = None) -> int:
    """In how many cells of a figure of the DenseHMM paper a claim about all of them holds."""
    found = [
        each
        for each in result(name)["claims"]
        if each["claim"].startswith(claim) and data in (None, each["data"])
    ]
    if len(found) != 1:
        raise LookupError(f"{name}.json has {len(found)} claims {claim!r}; one is needed.")
    return round(found[0][protocol]["number"] * num_cells(name))


def alike(measure: str, protocol: str) -> int:
    """In how many cells of synthetic data the direct fit is best, all models measured alike."""
    best = 0
    for n, length in sorted({(row["n"], row["l"]) for row in rows("densehmm_synthetic")}):
        cell = rows("densehmm_synthetic", protocol=protocol, n=n, l=length)
        best += min(cell, key=lambda row: row[measure]["ours"])["model"] == "dense, direct"
    return best


def num_cells(name: str) -> int:
    """The number of pairs of n and l."""
    return len({(row["n"], row["l"]) for row in rows(name)})


def figure_numbers() -> dict[str, str]:
    """What the page of the DenseHMM says of its figures beside the tables."""
    truth, counts = "MAD from the true distribution", "MAD: direct is best"
    code, right = PROTOCOLS
    sources = [("densehmm_synthetic", "synthetic"), ("densehmm_proteins", "proteins"),
               ("densehmm_tags", "penn"), ("densehmm_tags", "web")]  # fmt: skip
    worst = {
        protocol: [cells_where(name, "MAD: dense EM is worst", protocol, data)
                   for name, data in sources]
        for protocol in PROTOCOLS
    }  # fmt: skip
    labels = one("diversified_tagging", part="dense")
    hmm = one("diversified_tagging", data="penn", weight=0.0)
    return {
        "labels": f"{labels['one_to_one']['ours']:.3f}",
        "labels_runs": str(labels["runs"]),
        "labels_hmm": f"{hmm['one_to_one']['ours']:.3f}",
        "cells": str(num_cells("densehmm_synthetic")),
        "truth": str(cells_where("densehmm_synthetic", truth, code)),
        "counts": str(cells_where("densehmm_synthetic", counts, code)),
        "truth_right": str(cells_where("densehmm_synthetic", truth, right)),
        "alike_sampled": str(alike("mad_sampled_to_truth", code)),
        "alike_exact": str(alike("mad_to_truth", code)),
        "fair_sampled": str(alike("mad_sampled_to_truth", right)),
        "comparable": str(cells_where("densehmm_synthetic", "NLL: all four", code)),
        "close": str(cells_where("densehmm_synthetic", "MAD: standard and fair", code)),
        "worst": f"{min(worst[code])} to {max(worst[code])}",
        "worst_right": f"{min(worst[right])} to {max(worst[right])}",
    }


# Diversified HMM --------------------------------------------------------------------------------


def toy_table() -> str:
    """Accuracy on the toy of the diversified HMM, by start and weight of the prior."""
    body = []
    for row in rows("diversified_toy", part="table"):
        gain = row["gain"]
        change = f"{gain['mean']:+.4f} ({gain['standard_error']:.4f})" if row["weight"] else DASH
        body.append(
            [f"{row['start']}, α = {row['weight']:g}", f"{row['accuracy']['ours']:.3f}", change,
             plain(row["accuracy"].get("paper"), 3)]
        )  # fmt: skip
    return table(["start, weight", "accuracy", "change (standard error)", "paper"], body)


CLUSTERS = "penn from clusters"


def unsupervised_table() -> str:
    """One-to-one accuracy of tags without labels, by weight of the prior."""
    named = {"penn": "Penn", "web": "web", CLUSTERS: "Penn, from clusters"}
    body = []
    for row in rows("diversified_tagging", part="alone"):
        exchanges = ", with exchanges" if "exchanged" in row["start"] else ""
        body.append(
            [f"Penn, Brown clusters alone{exchanges}", plain(row["one_to_one"]["ours"], 3),
             DASH, DASH]
        )  # fmt: skip
    for row in rows("diversified_tagging"):
        if "data" not in row:
            continue
        accuracy, gain = row["one_to_one"], row["gain"]
        change = f"{gain['mean']:+.3f} ({gain['standard_error']:.3f})" if row["weight"] else DASH
        body.append(
            [f"{named[row['data']]}, α = {row['weight']:g}", f"{accuracy['ours']:.3f}", change,
             plain(accuracy["paper"], 3)]
        )  # fmt: skip
    return table(["data, weight", "one-to-one accuracy", "change (standard error)", "paper"], body)


def letters_table() -> str:
    """Accuracy on handwritten letters: baselines, and better emissions."""
    chosen = [
        ("naive Bayes", {"part": "baselines", "model": "naive Bayes"}),
        ("HMM, plain counts", {"part": "baselines", "model": "HMM", "smoothing": 0.0,
                               "decoding": "path"}),
        ("HMM, pseudo-count of one", {"part": "baselines", "model": "HMM", "smoothing": 1.0,
                                      "decoding": "path"}),
        ("optimised HMM", {"part": "baselines", "model": "optimised HMM"}),
        ("HMM, 16 normal styles a letter", {"part": "better", "look": "normal, 16 styles",
                                            "model": "first order"}),
        ("the same, with the diversity prior", {"part": "better", "look": "normal, 16 styles",
                                                "model": "first order, diversity"}),
        ("second-order chain", {"part": "better", "look": "chosen",
                                "model": "first order or second order"}),
    ]  # fmt: skip
    body = []
    for label, where in chosen:
        shared = one("diversified_ocr", split="folds of the file", **where)
        apart = rows("diversified_ocr", split="words apart", **where)
        paper = shared["paper"]
        body.append(
            [label, percent(shared["ours"]), percent(apart[0]["ours"]) if apart else DASH,
             percent(paper) if paper else DASH]
        )  # fmt: skip
    return table(["model", "folds of the file, %", "no shared words, %", "paper, %"], body)


def priors_table() -> str:
    """Gain in nats a step of priors on the transition rows, over a flat one."""
    found = rows("diversified_beyond", part="priors")
    kinds = list(dict.fromkeys(row["prior"] for row in found))
    body = []
    for data in dict.fromkeys(row["data"] for row in found):
        cells = (one("diversified_beyond", part="priors", data=data, prior=kind) for kind in kinds)
        body.append(
            [data, *(f"{cell['gain']:+.3f} ({cell['standard_error']:.3f})" for cell in cells)]
        )
    return table(["data", *kinds], body)


# Neural HMM -------------------------------------------------------------------------------------


def trained(**where: Any) -> Row:
    """The only line of the summary of language models that has these entries."""
    (line,) = (
        line
        for line in result("language_models")["summary"]
        if all(line[key] == value for key, value in where.items())
    )
    return line


BEST = {"panel": "best", "name": "best", "data": "ptb"}
CHECKPOINT = 65536  # states of the paper's model of which it prints no perplexity


def millions(**where: Any) -> str:
    """The number of parameters of the only language model that has these entries."""
    return f"{one('language_models', **where)['parameters'] / 1e6:.1f} M"


def perplexity_table() -> str:
    """Perplexities of language models, beside those of the paper."""
    body = []
    for corpus, data in (("Penn Treebank", "ptb"), ("WikiText-2", "wikitext2")):
        prefix = "" if data == "ptb" else f"{corpus}: "
        for row in rows("language_models", panel="best", data=data):
            label = f"{prefix}{row['states']:,} states, two levels, {row['parameters'] / 1e6:.1f} M"
            if row.get("last_dropout") is not None:
                label += f", dropout falls from {row['dropout']} to {row['last_dropout']}"
            if row.get("average") is not None:
                label += ", parameters averaged"
            if row.get("factored"):
                label = label.replace("two levels", "one level, factored")
            if "parts" in row:
                label += f", {row['name']}"
            if row.get("first") is not None:
                label += f", {row['first']} epochs and {row['epochs'] - row['first']} more"
            printed = row["paper_valid"]
            several = isinstance(printed, list)
            paper = [bounds(printed, 0) if several else plain(printed), plain(row["paper_test"])]
            if CHECKPOINT == row["paper_states"]:
                paper[0] += f" ({CHECKPOINT:,} states, from a file's name)"
            elif row["paper_states"] != row["states"]:
                paper[0] += f" ({row['paper_states']:,} states)"
            body.append([
                label, plain(row["valid_perplexity"]), plain(row["test_perplexity"]), *paper
            ])  # fmt: skip
        for row in rows("language_model_baselines", data=corpus):
            stopped = f", stopped after {row['minutes']:.0f} minutes" if "stopped" in row else ""
            label = prefix + row["model"] + stopped
            body.append(
                [label, plain(row["valid_perplexity"]), plain(row["test_perplexity"]),
                 plain(row["paper_valid"]), plain(row["paper_test"])]
            )  # fmt: skip
    return table(["model", "held out", "test", "paper, held out", "paper, test"], body)


def ngram_table() -> str:
    """Perplexities of a language model mixed with an n-gram."""
    body = [
        [
            row["name"],
            f"{row['weights_fitted_to_tokens']:,}" if "rounds" in row else DASH,
            *(plain(row[f"{part}_perplexity"]) for part in ("fitted", "unseen", "test")),
        ]
        for row in rows("ngram_emission")
    ]
    header = ["model", "tokens for the weights", "held out, first half", "second half", "test"]
    return table(header, body)


ABLATIONS = {
    "no constraint": "no blocks",
    "uniform": "random states for each word",
    "scalar": "logits, no networks",
    "factored": "embedding made of one for the block and one for the state",
    "embeddings begin at 1": "initial embeddings of scale 1",
    "by root of token mass": "states by the square root of the tokens of a block",
}


def ablation_table() -> str:
    """Ablations of language models, means of two seeds."""
    body = []
    for line in result("language_models")["summary"]:
        if line["panel"] == "best":
            continue
        name = f"{line['blocks']} blocks" if line["panel"] == "states" else line["name"]
        name = ABLATIONS.get(name, name)
        paper = line["paper_valid"]
        if isinstance(paper, list):
            paper = bounds(paper, 0)
        elif paper is not None:
            paper = f"{paper:.0f}"
        if paper and line["paper_states"] != line["states"]:
            paper += f" ({line['paper_states']:,} states)"
        body.append(
            [f"{line['states']:,} states, {name}", f"{line['valid']['mean']:.0f}",
             bounds(line["valid"]["range"], 0), paper or DASH]
        )  # fmt: skip
    return table(["model", "held out", "two seeds", "paper"], body)


def tagging_table() -> str:
    """Accuracy of taggers by their marginals, in percent of all and of unknown words."""
    body = [
        [f"{line['data']}: {line['model']}", percent(line["all"]["ours"]),
         percent(line["unknown"]["ours"]), str(line["runs"])]
        for line in result("tagging")["summary"]
        if line["decoding"] == "posterior"
    ]  # fmt: skip
    return table(["tagger", "all words, %", "unknown words, %", "runs"], body)


def epoch_table() -> str:
    """Seconds of an epoch with blocks of states, by size and way."""
    named = {"plain": "straightforward", "one level": "one level", "two levels": "two levels"}
    body = []
    for row in rows("large_hmm_speed", part="compare"):
        alike = row["times_faster_alike"]
        body.append(
            [f"{row['states']:,} states, {named[row['way']]}, batches of {row['tokens']:,}",
             f"{row['seconds_per_epoch']:.0f}", f"{row['times_faster']:.1f}×",
             DASH if alike is None else f"{alike:.1f}×"]
        )  # fmt: skip
    header = ["model", "seconds an epoch", "straightforward, 512 tokens", "straightforward, same"]
    return table(header, body)


def block_ways_table() -> str:
    """What special ways of computing chains in blocks gain over the general one."""
    body = [
        [row["way"], row["shape"], str(row["lines"]), f"{row['times'][0]:.1f}×"]
        for row in rows("block_ways")
    ]
    return table(["way", "shape", "lines", "times faster than the general one"], body)


def engine_ways_table() -> str:
    """What special ways of the compiled recursions gain over the general one."""
    body = [
        [row["kernel"], row["shape"], str(row["lines"]), f"{row['times'][0]:.1f}×"]
        for row in rows("engine_ways")
    ]
    return table(["kernel", "shape", "lines", "times faster than the general one"], body)


def switch_numbers() -> dict[str, str]:
    """What the page of benchmarks says of chains in blocks of states."""
    at = {row["part"]: row["switch"] for row in rows("block_switches")}
    return {"states": f"{at['one level']:,}"}


def clusters_table() -> str:
    """Brown clusters: seconds, information and held-out perplexity."""
    body = [
        [f"{row['data']}, {row['clusters']} clusters, "
         + ("with exchanges" if row["most_sweeps"] else "greedy merges"),
         plain(row["seconds"]), f"{row['average_mutual_information']:.3f}",
         f"{row['held_out_perplexity']:.0f}"]
        for row in rows("brown_clusters", compiled=True)
    ]  # fmt: skip
    header = ["data", "seconds", "mutual information, nats", "perplexity of the class bigram"]
    return table(header, body)


def durations_table() -> str:
    """Explicit durations against the chain over states and durations."""
    body = [
        [f"{row['states']}, {row['longest_duration']}", plain(row["seconds"]),
         str(row["expanded_states"]), plain(row["expanded_seconds"]),
         f"{row['times_faster']:.0f}×"]
        for row in rows("durations")
    ]  # fmt: skip
    header = ["K, D", "HSMM, s", "states of the large chain", "large chain, s", "faster"]
    return table(header, body)


def steering_table() -> str:
    """Sentences that must contain some words: seconds each, of a batch and of one alone."""
    body = [
        [str(row["required_words"])]
        + [plain(part[name][0], 2) for part in (row, row["single"])
           for name in ("processor_seconds_a_sentence", "seconds_a_sentence")]
        for row in rows("steering")
    ]  # fmt: skip
    header = [
        "required words",
        "of 16, processor",
        "of 16, wall",
        "alone, processor",
        "alone, wall",
    ]
    return table(header, body)


def large_data_table() -> str:
    """EM over a file larger than what is held of it: seconds and memory by the number of steps."""
    body = [
        [f"{row['steps']:,}", str(row["parts"]), plain(row["seconds"] / row["e_steps"]),
         plain(row["memory_added_mb"])]
        for row in rows("large_data")
    ]  # fmt: skip
    return table(["steps", "parts", "seconds an iteration", "memory added, MB"], body)


def ranks_table() -> str:
    """Processor time of an iteration on several ranks over that on one, and messages."""
    body = []
    for row in rows("ranks", part="fits", ranks=1):
        two, four = (one("ranks", part="fits", fit=row["fit"], ranks=size) for size in (2, 4))
        times = [plain(each["times"], 2) for each in (two, four)]
        body.append(
            [row["fit"], plain(1000 * row["seconds"], 0), *times, plain(four["calls"], 0),
             plain(four["megabytes"], 2)]
        )  # fmt: skip
    header = ["fit", "ms on one rank", "2 ranks, times", "4 ranks, times", "calls", "MB"]
    return table(header, body)


def ranks_numbers() -> dict[str, str]:
    """What the page on scale says of a corpus in a file, and of minibatches that ranks divide."""
    each = rows("ranks", part="corpus")
    numbers = {
        f"times_{row['fit']}": plain(row["times"]) for row in rows("ranks", part="tokens", ranks=4)
    }
    return numbers | {
        "corpus_tokens": f"{each[0]['tokens']:,}",
        "corpus_before": f"{max(row['memory_before_mb'] for row in each):.0f}",
        "corpus_memory": f"{max(row['memory_mb'] for row in each):.0f}",
        "corpus_ready": f"{max(r['ready_seconds'] + r['first_round_seconds'] for r in each):.0f}",
    }


def growth_table() -> str:
    """Nanoseconds and memory of a row at a million of them, by the shape of the data."""
    found = [row for row in rows("growth") if 0.5e6 < row["rows"] < 2e6]
    shapes = list(dict.fromkeys(row["shape"] for row in found))
    steps = [("normal", row["step"]) for row in found if row["family"] == "normal"]
    steps += [(row["family"], row["step"]) for row in found if row["step"].startswith("an iter")]
    body = []
    for family, step in dict.fromkeys(steps):
        cells = [step if family == "normal" else f"{step}: {family}"]
        for shape in shapes:
            of = [r for r in found if (r["family"], r["step"], r["shape"]) == (family, step, shape)]
            cells += [f"{of[0]['nanoseconds_a_row']:,.0f}" if of else DASH]
        memory = [r["memory_gb"] for r in found if (r["family"], r["step"]) == (family, step)]
        body.append([*cells, plain(max(memory), 2)])
    return table(["", *shapes, "most memory, GB"], body)


def intervals_table() -> str:
    """Estimates and 95 % limits of panel data, beside those of R's msm."""
    ours, theirs = (one("intervals", part="panel", by=who) for who in ("pyrohmm", "msm"))
    kinds = {"rate": "rate {} to {}", "seen": "state {}, seen as {}"}
    body = []
    for name in ours:
        kind, *states = name.split(" ")
        if kind in kinds and len(states) == 2:
            cells = ["{:.4f} ({:.4f}, {:.4f})".format(*row[name]) for row in (ours, theirs)]
            body.append([kinds[kind].format(*states), *cells])
    return table(["", "pyrohmm", "msm"], body)


def fixed_cost_table() -> str:
    """A small HMM: the whole call, the recursion on prepared tensors, torch's graph alone."""
    body = [
        [f"{row['sequences']}, {row['steps']}, {row['states']}, {row['observations']}"]
        + [f"{row['microseconds_' + part]:.0f}" for part in ("hmm", "recursion", "torch")]
        for row in rows("fixed_cost")
    ]
    return table(["N, T, K", "HMM", "recursion alone", "torch alone"], body)


def posterior_table() -> str:
    """Effective samples a second by sampler and model."""
    models = ["casino", "poisson", "normal", "large", "subjects"]
    samplers = list(dict.fromkeys(row["sampler"] for row in rows("posterior")))
    body = []
    for sampler in samplers:
        cells = []
        for model in models:
            found = rows("posterior", sampler=sampler, model=model)
            text = DASH
            if found and found[0].get("bulk a second") is not None:
                apart = "†" if found[0]["rhat"] > 1.01 else ""
                text = f"{found[0]['bulk a second']:,.1f} ({found[0]['rhat']:.3f}{apart})"
            cells.append(text)
        body.append([sampler, *cells])
    return table(["", "casino", "Poisson", "normal", "20 states", "hierarchical"], body)


def evidence_table(part: str) -> str:
    """Log marginal likelihoods by the number of states, and exact ones where they are known."""
    body = []
    for states in dict.fromkeys(row["states"] for row in rows("evidence", part=part)):
        found = {row["sampler"]: row for row in rows("evidence", part=part, states=states)}
        texts = (
            f"{found[name]['bridge']:.3f} ± {found[name]['error']:.3f}" if name in found else DASH
            for name in ("gibbs", "hmc")
        )
        one = found.get("hmc", found["gibbs"])
        trips = ", ".join(plain(row["trips"]) for row in found.values())
        line = [str(states), *texts, plain(one["trapezoid"], 3), plain(one["exact"], 3)]
        body.append([*line, plain(one["bic"]), trips])
    header = ["K", "Gibbs", "HMC", "HMC, trapezoid", "exact", "- BIC / 2", "round trips"]
    return table(header, body)


def calibration_table() -> str:
    """Smallest p-values of uniform ranks, by model and sampler."""
    found = rows("calibration")
    samplers = list(dict.fromkeys(row["sampler"] for row in found))
    body = []
    for model in dict.fromkeys(row["model"] for row in found):
        cells = {row["sampler"]: row for row in found if row["model"] == model}
        texts = (
            f"{cells[name]['p']:.2f} ({cells[name]['data_sets']})" if name in cells else DASH
            for name in samplers
        )
        body.append([model, *texts])
    return table(["p (data sets)", *samplers], body)


def control_table() -> str:
    """Milliseconds a token of steering by processor and wall-clock, and seconds in advance."""
    body = [
        [row["model"],
         f"{row['milliseconds_a_token'][0]:.0f}",
         f"{row['processor_milliseconds_a_token'][0]:.0f}",
         plain(row["seconds_once"]) if "seconds_once" in row else "-"]
        for row in rows("control")
        if not row.get("top_k")
    ]  # fmt: skip
    return table(["model", "wall", "processor", "s for each constraint"], body)


def dense_training_table() -> str:
    """Tokens a second of training of dense HMMs, and what share of a product's rate this is."""
    body = [
        [f"{row['states']:,}", str(row["sequences"]), row["way"],
         f"{row['tokens_a_second']:,.0f}", f"{row['share']:.0%}"]
        for row in rows("dense_training")
    ]  # fmt: skip
    return table(["K", "sequences", "way", "tokens a second", "share"], body)


GPU_METHODS = {
    "pyrohmm": "pyrohmm",
    "pyrohmm, messages by one kernel (prototype)": "one kernel",
    "dynamax, gpu": "dynamax",
    "DiscreteHMM": "DiscreteHMM",
    "DiscreteHMM, CUDA graph": "its graph",
    "log space, CUDA graph": "graph of a loop",
    "pyrohmm, two cores of another CPU": "pyrohmm, CPU",
}


def _measured(part: str) -> list[Row]:
    """Rows of a part that did not fail."""
    return [row for row in rows("gpu_throughput", part=part) if "skipped" not in row]


def _gpu_rows(part: str) -> dict[tuple[str, str], list[Row]]:
    """Rows of a part by date and shape."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in _measured(part):
        shape = " x ".join(map(str, row["shape"]))
        found.setdefault((row["date"], f"{row.get('emission', 'categorical')} {shape}"), [])
        found[row["date"], f"{row.get('emission', 'categorical')} {shape}"].append(row)
    return found


def _milliseconds(found: list[Row], method: str, of: str = "seconds") -> str:
    """Milliseconds of a method, or a dash."""
    numbers = [1e3 * row[of] for row in found if row["method"] == method and of in row]
    return plain(numbers[-1] if numbers else None, 2 if numbers and numbers[-1] < 1 else 1)


def gpu_table() -> str:
    """Milliseconds on a GPU of evidence with gradient, by date and method."""
    body = [
        [date, shape, *(_milliseconds(found, method) for method in GPU_METHODS)]
        for (date, shape), found in _gpu_rows("evidence").items()
    ]
    return table(["date", "N x T x K x V or D", *GPU_METHODS.values()], body)


def gpu_parts_table() -> str:
    """What of a call on a GPU is messages, how long the device works, and how many kernels."""
    names = list(GPU_METHODS)[:2]
    body = []
    messages = _gpu_rows("messages")
    for key, found in _gpu_rows("evidence").items():
        for method in names:
            row = next((row for row in found if row["method"] == method), None)
            alone = _milliseconds(messages.get(key, []), method)
            if row and (alone != DASH or "kernels" in row):
                busy = _milliseconds([row], method, "device_seconds")
                kernels = f"{row['kernels']:.0f}" if "kernels" in row else DASH
                whole = _milliseconds([row], method)
                body.append([*key, GPU_METHODS[method], whole, alone, busy, kernels])
    header = ["date", "N x T x K x V", "messages by", "call", "messages", "device works", "kernels"]
    return table(header, body)


def gpu_fits_table() -> str:
    """Milliseconds of a further iteration of fits on a GPU."""
    body = [
        [row["date"], row["fit"], " x ".join(map(str, row.get("shape", []))) or DASH,
         plain(1e3 * row["seconds"])]
        for row in _measured("fits")
    ]  # fmt: skip
    for (date, shape), found in _gpu_rows("em").items():
        body.append([date, "EM", shape, plain(1e3 * found[0]["seconds"])])
    return table(["date", "fit", "N x T x K x V or D", "ms an iteration"], body)


def gpu_tokens_table() -> str:
    """Tokens a second of dense HMMs on a GPU."""
    body = [
        [row["date"], f"{row['states']:,}", row["method"], f"{row['tokens_a_second'] / 1e6:.2f}"]
        for row in _measured("tokens")
    ]
    return table(["date", "K", "", "million tokens a second"], body)


def gpu_neural_table() -> str:
    """Milliseconds of a step of training of a neural HMM on a GPU."""
    body = []
    for row in _measured("neural"):
        dropped = f"{percent(row['dropout'], 0)} %" if "dropout" in row else "not recorded"
        busy = plain(1e3 * row["device_seconds"]) if "device_seconds" in row else DASH
        kernels = f"{row['kernels']:,.0f}" if "kernels" in row else DASH
        milliseconds = plain(1e3 * row["seconds"])
        body.append(
            [row["date"], f"{row['states']:,}", dropped, row["method"], milliseconds, busy, kernels]
        )
    for row in rows("gpu_throughput", part="epochs"):  # of 42,068 sentences of 22 words
        steps = -(-42_068 * 22 // row["tokens"])
        body.append(
            [row["date"], f"{row['states']:,}", "0 %", row["method"],
             plain(1e3 * row["seconds"] / steps), DASH, DASH]
        )  # fmt: skip
    header = ["date", "K", "states dropped", "precision", "ms a step", "device works", "kernels"]
    return table(header, body)


def block_memory_table() -> str:
    """Gigabytes of a step of training of chains in blocks."""
    kinds = [(levels, dropout) for levels in (2, 1) for dropout in (0.0, 0.5)]
    body = [
        [f"{states:,}"]
        + [
            plain(one("block_memory", states=states, levels=levels, dropout=dropout)["gigabytes"])
            for levels, dropout in kinds
        ]
        for states in dict.fromkeys(row["states"] for row in rows("block_memory"))
    ]
    names = {2: "two levels", 1: "one level"}
    header = [f"{names[level]}{', half dropped' if half else ''}" for level, half in kinds]
    return table(["states", *header], body)


def monarch_table() -> str:
    """Perplexities of HMMs by their transitions, in equal time."""
    body = [
        [row["model"], f"{row['states']:,}", f"{row['epochs']:.1f}",
         f"{row['tokens_a_second']:,.0f}", f"{row['valid']:.1f}", f"{row['test']:.1f}"]
        for row in rows("monarch")
    ]  # fmt: skip
    return table(["transitions", "K", "epochs", "tokens a second", "validation", "test"], body)


# What pages say ---------------------------------------------------------------------------------

MUSIC = {
    "jsb": "JSB chorales",
    "nottingham": "Nottingham",
    "piano": "Piano-midi",
    "muse": "MuseData",
}
MUSIC_MODELS = {
    "hmm": "plain HMM, Bernoulli, by EM",
    "pairs": "two chains, keys of their own for each pair of states",
    "chord": "neural emission, reads the last chord",
    "linear": "logits linear in the last chord",
    "durations": "explicit durations",
    "repeat": "autoregressive: each key reads whether it was down before",
    "durations-repeat": "explicit durations, autoregressive",
    "pairs-repeat": "two chains, autoregressive",
    "factorial": "two chains whose logits add",
    "keys": "neural emission, reads the last chord and the lower keys of this one",
}


def music_table() -> str:
    """Nats a step on test pieces, of the size chosen on the validation pieces; and others'."""
    body = []
    for model, title in MUSIC_MODELS.items():
        found = {row["music"]: row for row in rows("music", model=model, chosen=True)}
        body.append([title] + [
            f"{found[music]['test']:.2f} ({found[music]['states']})" if music in found else DASH
            for music in MUSIC
        ])  # fmt: skip
    for title, numbers in result("music")["published"].items():
        body.append([title, *(str(numbers.get(music, DASH)) for music in MUSIC)])
    return table(["nats a step (states)", *MUSIC.values()], body)


def music_example_table() -> str:
    """The model of Pyro's example of HMMs, in both forms, on the chorales."""
    body = [
        [row["model"].removeprefix("example, "), str(row["steps"]),
         f"{row['processor_seconds_a_step']:.4f}", f"{row['test_seen_keys']:.2f}",
         f"{row['test']:.2f}"]
        for row in rows("music") if row["model"].startswith("example")
    ]  # fmt: skip
    header = ["form", "steps", "s a step", "nats, keys of the training set", "all 88 keys"]
    return table(header, sorted(body, key=lambda line: -float(line[2])))


def music_numbers() -> dict[str, str]:
    """What the page of piano rolls says beside its tables."""
    form = "example, {}"
    theirs, ours = (one("music", model=form.format(x)) for x in ("pyro.markov", "pyrohmm"))
    apart = [row["test"] - row["test_seen_keys"] for row in rows("music", chosen=True)]
    best = one("music", music="jsb", model="hmm", chosen=True)
    others = {row["states"]: row["test"] for row in rows("music", music="jsb", model="hmm")}
    gains: dict[str, list[float]] = {}
    for kind, holding in (
        ("hmm", "repeat"),
        ("pairs", "pairs-repeat"),
        ("durations", "durations-repeat"),
    ):
        for row in rows("music", model=kind):
            where = {"music": row["music"], "states": row["states"]}
            for other in rows("music", model=holding, **where):
                largest = row["music"] == "jsb" and row["states"] > 128
                name = "largest" if largest else "jsb" if row["music"] == "jsb" else "others"
                gains.setdefault(name, []).append(row["test"] - other["test"])
    return {
        "repeat": bounds(gains["jsb"], 2),
        "repeat_largest": bounds([-gain for gain in gains["largest"]], 2),
        "repeat_others": bounds(gains["others"], 2),
        "faster": f"{theirs['processor_seconds_a_step'] / ours['processor_seconds_a_step']:.0f}",
        "unseen": bounds(apart, 3),
        "best": f"{best['states']:,}",
        "fewer": f"{others[128]:.2f}",
        "more": f"{best['test']:.2f}",
    }


def num_states_table() -> str:
    """How many states four ways choose, and what that costs."""
    body = []
    for method in dict.fromkeys(row["method"] for row in rows("num_states")):
        own = rows("num_states", method=method)
        line = [method, f"{sum(row['chosen'] == row['true'] for row in own)} of {len(own)}"]
        for true in sorted({row["true"] for row in own}):
            line.append(", ".join(str(row["chosen"]) for row in own if row["true"] == true))
        lost = sum(row["lost"] for row in own) / len(own)
        seconds = sum(row["seconds"] for row in own) / len(own)
        body.append([*line, f"{lost:.3f}", plain(seconds)])
    numbers = [f"of {true}" for true in sorted({row["true"] for row in rows("num_states")})]
    return table(["chosen by", "right", *numbers, "nats lost", "seconds"], body)


def starts_table() -> str:
    """Percent of problems that end near the best of many fits, and times over that of one start."""
    header = ["problems", "number", "one start, %", "default, %", "eight restarts, %",
              "time of the default", "time of eight"]  # fmt: skip
    body = []
    for kind in dict.fromkeys(row["problems"] for row in rows("starts")):
        ways = [one("starts", problems=kind, way=way)
                for way in ("one start", "default", "eight restarts")]  # fmt: skip
        shares = [percent(row["share_near"], 0) for row in ways]
        times = [f"{row['over_one_start']:.2g}" for row in ways[1:]]
        body.append([kind, str(ways[0]["number"]), *shares, *times])
    return table(header, body)


TABLES = {
    "gradient": gradient_table,
    "small": small_table,
    "busy": busy_table,
    "vectors": vectors_table,
    "families": families_table,
    "steps": steps_table,
    "em": em_table,
    "query": query_table,
    "structure": structure_table,
    "batches": batches_table,
    "block_queries": block_queries_table,
    "block_ways": block_ways_table,
    "engine_ways": engine_ways_table,
    "pairs": pairs_table,
    "fits": fits_table,
    "matrix": matrix_table,
    "toy": toy_table,
    "unsupervised": unsupervised_table,
    "letters": letters_table,
    "priors": priors_table,
    "perplexity": perplexity_table,
    "ablation": ablation_table,
    "tagging": tagging_table,
    "epoch": epoch_table,
    "clusters": clusters_table,
    "durations": durations_table,
    "large_data": large_data_table,
    "growth": growth_table,
    "ranks": ranks_table,
    "steering": steering_table,
    "ngram": ngram_table,
    "music": music_table,
    "music_example": music_example_table,
    "num_states": num_states_table,
    "intervals": intervals_table,
    "fixed_cost": fixed_cost_table,
    "posterior": posterior_table,
    "calibration": calibration_table,
    "evidence": partial(evidence_table, "short"),
    "evidence_casino": partial(evidence_table, "casino"),
    "control": control_table,
    "dense_training": dense_training_table,
    "gpu": gpu_table,
    "gpu_parts": gpu_parts_table,
    "block_memory": block_memory_table,
    "gpu_fits": gpu_fits_table,
    "gpu_tokens": gpu_tokens_table,
    "gpu_neural": gpu_neural_table,
    "monarch": monarch_table,
    "starts": starts_table,
}


def intervals_numbers() -> dict[str, str]:
    """What the page of standard errors says beside its table."""
    covered = one("intervals", part="coverage")
    again = one("intervals", part="replicates")
    ours, theirs = (one("intervals", part="panel", by=who) for who in ("pyrohmm", "msm"))
    large = max(rows("intervals", part="size"), key=lambda row: row["parameters"])
    shares = [percent(share) for share in covered["coverage"].values()]
    return {
        "fits": f"{covered['fits']:,}",
        "coverage": f"{min(shares)} to {max(shares)} %",
        "resampled": ", ".join(percent(share) for share in again["coverage"].values()),
        "batch_fits": f"{again['fits']:,}",
        "parameters": str(large["parameters"]),
        "seconds": plain(large["seconds"]),
        "loss": f"{ours['loss']:.3f}",
        "loss_msm": f"{theirs['loss']:.3f}",
        "time": plain(ours["seconds"]),
        "time_msm": plain(theirs["seconds"]),
        "odds": ", ".join(f"{error:.3f}" for error in ours["log_odds_errors"]),
        "odds_msm": ", ".join(f"{error:.3f}" for error in theirs["log_odds_errors"]),
        **_rates_numbers(),
    }


def _rates_numbers() -> dict[str, str]:
    """Rates by covariates, here and by msm."""
    ours, theirs = (rows("intervals", part="covariates", by=who) for who in ("pyrohmm", "msm"))
    pairs = list(zip(ours, theirs))
    gaps, shares = (
        max(abs(a - b) / (abs(b) if relative else 1)
            for one, two in pairs for a, b in zip(one[name], two[name]))
        for name, relative in (("coefficients", False), ("errors", True))
    )  # fmt: skip
    return {
        "coefficients": f"{math.ceil(gaps * 1e5) / 1e5:.5f}",
        "slopes": f"{math.ceil(shares * 1e4) / 1e2:.2f}",
        "age": f"{ours[0]['loss']:.3f}",
        "age_msm": f"{theirs[0]['loss']:.3f}",
        "years": f"{ours[1]['loss']:.3f}",
        "years_msm": f"{theirs[1]['loss']:.3f}",
        "rates_time": " and ".join(plain(row["seconds"]) for row in ours),
        "rates_time_msm": " and ".join(plain(row["seconds"]) for row in theirs),
    }


def laplace_numbers() -> dict[str, str]:
    """What the page of random effects says."""
    covered, integral, sampled = (
        one("laplace", part=part) for part in ("coverage", "integral", "sampled")
    )
    spread = {name: value if isinstance(value, float) else value[0]
              for name, value in sampled["spread"].items()}  # fmt: skip
    return {
        "fits": str(covered["fits"]),
        "subjects": str(covered["subjects"]),
        "steps": str(covered["steps"]),
        "coverage": ", ".join(percent(share) for share in covered["coverage"].values()),
        "without": str(covered["without"]),
        "theory": " and ".join(percent(share) for share in covered["theory"].values()),
        "theory_few": " and ".join(percent(share) for share in covered["theory_few"].values()),
        "effects": percent(covered["effects"]),
        "laplace": f"{integral['laplace']:.2f}",
        "nodes": f"{integral['nodes']:.2f}",
        "spread": f"{spread['estimate']:.2f} ± {spread['std_error']:.2f}",
        "spread_mcmc": f"{spread['mean']:.2f} ± {spread['deviation']:.2f}",
        "quadrature": f"{integral['quadrature']:.2f}",
    }


def published_numbers() -> dict[str, str]:
    """Log-likelihoods that other packages have published, and ours."""
    speed = rows("published", part="speed")
    classes, moves = one("published", part="balance"), one("published", part="elk", doubled=True)
    return {
        "speed": ", ".join(f"{row['log_likelihood']:.3f}" for row in speed),
        "speed_there": ", ".join(str(row["published"]) for row in speed),
        "balance": f"{classes['log_likelihood']:.2f}",
        "balance_there": str(classes["published"]),
        "elk": f"{moves['log_likelihood']:.5f}",
        "elk_there": f"{moves['published']:.5f}",
        "elk_once": f"{one('published', part='elk', doubled=False)['log_likelihood']:.2f}",
    }


def speed_numbers() -> dict[str, str]:
    """What the page of benchmarks says beside its tables."""
    (large,) = (row for row in rows("throughput", method="sgemm 2048") if row[SHAPE][2] >= 1024)
    small = {"quantity": "growth in N", "N": 1}
    numba = [
        row["milliseconds"] / ours["milliseconds"]
        for row in rows("throughput", method="pyrohmm, no Numba", quantity="evidence and gradient")
        for ours in rows("throughput", method="pyrohmm", quantity="evidence and gradient")
        if row[SHAPE] == ours[SHAPE] and row[SHAPE][2] <= 128
    ]
    long = one("throughput", quantity="one long sequence", method="pyrohmm")
    return {
        "numba": bounds(numba, 1),
        "restarts": restart_bounds(),
        "sgemm": percent(large["share_of_sgemm"], 0),
        "fixed": plain(one("throughput", method="pyrohmm", **small)["milliseconds"]),
        "gpu": result("gpu_throughput")["device"],
        "fixed_dynamax": plain(one("throughput", method="dynamax", **small)["milliseconds"]),
        "million": plain(long["seconds"]),
    }


def matrix_numbers() -> dict[str, str]:
    """What the page of the DenseHMM says beside its tables."""
    sizes = {"part": "table", "quantity": "relative error", "factorisation": "softmax"}
    code, decaying = (
        [row["ours"] - row["paper"] for row in rows("densehmm_matrix_fit", **sizes, schedule=each)]
        for each in ("as in the code", "decaying")
    )
    table_of = {"part": "table", "factorisation": "softmax", "schedule": "as in the code"}
    above = [
        f"({row['n']}, {row['l']})"
        for row in rows("densehmm_matrix_fit", **table_of)
        if row["ours"] > row["paper"]
    ]
    draws = [
        f"({row['n']}, {row['l']}) in {row['draws_at_or_below_paper']}"
        for row in rows("densehmm_matrix_fit", part="draws")
        if row["draws_at_or_below_paper"] < row["runs"]
    ]
    samples = rows("densehmm_matrix_fit", part="draws")
    hardest = min(samples, key=lambda row: row["draws_at_or_below_paper"])
    (steps,) = {row["steps"] for row in samples}
    few = sum(2 * row["draws_at_or_below_paper"] <= row["runs"] for row in samples)
    return {
        "steps": f"{steps:,}",
        "most": str(len(code) - few),
        "hardest": f"{hardest['ours']:.3f}",
        "hardest_paper": f"{hardest['paper']:.3f}",
        "rows": str(len(code)),
        "code": str(sum(excess <= 0 for excess in code)),
        "decaying": str(sum(excess <= 0 for excess in decaying)),
        "excess": f"{max(code):.4f}",
        "above": " and ".join(above),
        "draws": ", ".join(draws),
    }


def diversity_numbers() -> dict[str, str]:
    """What the page of the diversified HMM says beside its tables."""
    cost = [row["determinant_over_evidence"][0] for row in rows("diversified_beyond", part="cost")]
    slower = [
        row["diversity_over_plain"][0] for row in rows("diversified_beyond", part="iterations")
    ]
    toy = rows("diversified_toy", part="table", weight=0.0)
    apart = one("diversified_ocr", split="words apart", part="better", look="chosen",
                model="first order or second order")  # fmt: skip
    letters = {"part": "diversity", "split": "folds of the file", "measure": "accuracy"}
    smoothed = [row["ours"] for row in rows("diversified_ocr", **letters, smoothing=1.0)]
    without = one("diversified_ocr", part="baselines", split="folds of the file", model="HMM",
                  smoothing=1.0, decoding="path")["ours"]  # fmt: skip
    papers = [row for row in rows("diversified_ocr", part="diversity") if row.get("paper")]
    gains = {"part": "diversity", "measure": "gain over alpha = 0"}
    (anchored,) = (
        row["ours"]
        for row in rows("diversified_ocr", **gains, split="folds of the file", anchor_weight=1e5)
        if row["anchor"] == "pseudo-counts of one" and row["alpha"] == papers[-1]["alpha"]
    )
    plain_counts = rows("diversified_ocr", **gains, split="words apart", smoothing=0.0,
                        anchor="the mode without diversity")  # fmt: skip
    best = [
        max((row for row in plain_counts if row["anchor_weight"] == weight),
            key=lambda row: row["ours"])
        for weight in {row["anchor_weight"] for row in plain_counts}
    ]  # fmt: skip
    smoothing = [
        one("diversified_ocr", part="baselines", split="words apart", model="HMM", decoding="path",
            smoothing=count)["ours"]
        for count in (0.0, 1.0)
    ]  # fmt: skip
    more, same = _dirichlet_against_diversity()
    starts = [
        one("diversified_tagging", data=data, weight=0.0)["one_to_one"]["deviation"]
        for data in ("penn", "web")
    ]
    compared = {
        (row["part"], row["start"]): row["one_to_one"]["ours"]
        for row in rows("diversified_tagging")
        if "start" in row
    }
    others = [compared["search", start] for start in ("flat", "peaked")]
    after_em = one("diversified_tagging", data=CLUSTERS, weight=0.0)["one_to_one"]
    return {
        "starts": bounds(starts, 2),
        "search": f"{compared['search', 'clusters']:.3f}",
        "search_others": bounds(others, 3),
        "judged": f"{compared['judged', 'clusters']:.3f}",
        "judged_flat": f"{compared['judged', 'flat']:.3f}",
        "alone": f"{compared['alone', 'clusters']:.3f}",
        "after_em": f"{after_em['ours']:.3f}",
        "letters": percent(max(smoothed) - without),
        "letters_anchored": percent(anchored, 2),
        "letters_apart": bounds([100 * row["ours"] for row in best], 1),
        "letters_deviation": bounds([100 * row["sd"] for row in best], 1),
        "smoothing_apart": percent(smoothing[1] - smoothing[0]),
        "dirichlet_more": " and ".join([", ".join(more[:-1]), more[-1]]),
        "dirichlet_same": " and ".join(same),
        "letters_paper": " to ".join(percent(row["paper"]) for row in papers),
        "cost": f"{100 * min(cost):.0f} to {100 * max(cost):.0f} %",
        "slower": bounds(slower, 1),
        "toy": bounds([row["accuracy"]["ours"] for row in toy], 2),
        "toy_paper": f"{toy[0]['accuracy']['paper']:.2f}",
        "second": percent(apart["ours"]),
    }


def _dirichlet_against_diversity() -> tuple[list[str], list[str]]:
    """Data on which a Dirichlet prior gains more than diversity by two standard errors; others."""
    more, same = [], []
    for row in rows("diversified_beyond", part="priors", prior="Dirichlet"):
        other = one("diversified_beyond", part="priors", prior="diverse", data=row["data"])
        error = (row["standard_error"] ** 2 + other["standard_error"] ** 2) ** 0.5
        clear = row["gain"] - other["gain"] > 2 * error
        (more if clear else same).append(row["data"])
    return more, same


def held_out(panel: str, name: str) -> str:
    """Mean held-out perplexity of an ablation, and what the paper has: ``212 (182)``."""
    line = trained(panel=panel, name=name)
    printed = line["paper_valid"]
    paper = bounds(printed, 0) if isinstance(printed, list) else f"{printed:.0f}"
    return f"{line['valid']['mean']:.0f} ({paper})"


def language_numbers() -> dict[str, str]:
    """What the page of the neural HMM says beside its tables."""
    ptb, wiki = (
        one("language_model_baselines", data=data, model=KNESER_NEY)
        for data in ("Penn Treebank", "WikiText-2")
    )
    alone = [row for row in rows("language_models", panel="best") if "parts" not in row]
    hours = [
        row["minutes"] / 60
        for row in alone
        if (row["data"], row["states"], row["factored"]) == ("ptb", 32768, False)
    ]
    widest = one("large_hmm_speed", part="scaling", states=65536)
    (paper,) = {
        line["paper_on_other_data"]
        for line in result("tagging")["summary"]
        if line["model"] == "neural HMM"
    }
    epochs = [row["epochs"] for row in alone]
    level = one("language_models", panel="best", name="one level, factored")
    small = one("language_models", panel="best", states=8192)
    below = [100 * (1 - level["valid_perplexity"] / paper) for paper in level["paper_valid"]]
    spread = [
        line["valid"]["range"][1] / line["valid"]["range"][0] - 1
        for line in result("language_models")["summary"]
        if len(line["seeds"]) > 1
    ]
    alone_mixed, counted, mixed = (
        one("ngram_emission", name=name)["test_perplexity"]
        for name in ("plain", "n-gram", "emission and transition")
    )
    return {
        "mixed": f"{plain(alone_mixed)} to {plain(mixed)}",
        "mixed_ngram": plain(counted),
        "dropout_40": " and ".join(
            f"{plain(row['perplexity'])} with dropout {row['dropout']}"
            for row in rows("dropout", part="40%")
        ),
        "parameters": millions(**BEST),
        "seeds": f"{percent(max(spread))} %",
        "best": str(len(alone)),
        "chosen": str(sum("unseen_perplexity" not in row for row in alone)),
        "ptb_valid": f"{ptb['valid_tokens']:,}",
        "ptb_test": f"{ptb['test_tokens']:,}",
        "wiki_valid": f"{wiki['valid_tokens']:,}",
        "wiki_test": f"{wiki['test_tokens']:,}",
        "minutes_8192": f"{small['minutes']:.0f}",
        "hours_32768": bounds(hours, 1),
        "hours_wiki": f"{max(row['minutes'] for row in alone) / 60:.1f}",
        "epochs": f"{min(epochs)} to {max(epochs)}",
        "level_epochs": str(level["epochs"]),
        "level_hours": f"{level['minutes'] / 60:.1f}",
        "level_below": bounds(below, 0),
        "dropout_within": dropout_within(),
        "no_dropout": held_out("large", "no dropout"),
        "dropout": held_out("large", "base"),
        "dropout_small": held_out("small", "dropout 0.5"),
        "blocks_8": held_out("small", "base"),
        "blocks_4": held_out("small", "4 blocks"),
        "no_blocks": held_out("small", "no constraint"),
        "tagging_paper": percent(paper),
        "widest_seconds": f"{widest['seconds_per_epoch']:.0f}",
        "widest_gigabytes": plain(widest["gigabytes"]),
    }


def dropout_within() -> str:
    """By how many percent the default dropout is above the best, at most, rounded up: of means."""
    runs: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in rows("dropout"):
        few = row["epochs"] <= 16 * (row["tokens"] / row["parameters"]) ** (1 / 3)
        place = row["part"], row["epochs"], "none" if few else "0.5 to 0.25"
        runs.setdefault(place, {}).setdefault(row["dropout"], []).append(row["perplexity"])
    apart = [
        mean(found[default]) / min(map(mean, found.values())) - 1
        for (_, _, default), found in runs.items()
        if default in found
    ]
    return str(math.ceil(100 * max(apart)))


KNESER_NEY = "Kneser-Ney 5-gram, interpolated, three discounts"
RESULTS = sorted(path.stem for path in FIGURES.glob("*.json"))


def substitutions() -> dict[str, Any]:
    """Everything that pages may name in double braces."""
    claims = ("densehmm_synthetic", "densehmm_proteins", "densehmm_tags")
    return {
        "table": {name: build() for name, build in TABLES.items()}
        | {name: claim_table(name) for name in claims},
        "origin": {name: origin(name) for name in RESULTS},
        "matrix": matrix_numbers(),
        "figure": figure_numbers(),
        "speed": speed_numbers(),
        "pairs": pairs_numbers(),
        "music": music_numbers(),
        "diversity": diversity_numbers(),
        "language": language_numbers(),
        "switch": switch_numbers(),
        "intervals": intervals_numbers(),
        "laplace": laplace_numbers(),
        "published": published_numbers(),
        "ranks": ranks_numbers(),
    }
