"""The command ``python -m pyrohmm.language``: train a language model on text files, and use it.

::

    python -m pyrohmm.language train.txt --valid valid.txt --save model --score test.txt
    python -m pyrohmm.language --load model --score test.txt --generate 5
    python -m pyrohmm.language more.txt --load model --save further

Files have one sentence a line, its words separated by white space; they may be gzipped, and blank
lines are passed over. Each sentence ends in ``<eos>``, which is predicted and counted. In several
processes it is the same command after ``torchrun --nproc-per-node 2 -m``.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import pyro
import torch
from torch import distributed
from tqdm import tqdm

from ..analysis.metrics import Perplexity
from ..data.readers import read_lines
from ..infer.options import RunOptions, Validation
from ..infer.process_group import ProcessGroup
from ..io.checkpoints import Checkpoint
from ..io.files import check_directory
from ..ops.automata import Automaton, must_contain, must_not_contain
from .model import LanguageModel
from .text import END, UNKNOWN, count_words, encode

OF_STEPS = ("num_epochs", "batch_tokens", "num_streams")  # what determines how many there are
INTERRUPTED = 130  # the exit status of what Ctrl-C has ended
EXAMPLES = """examples:
  python -m pyrohmm.language train.txt --valid valid.txt --save model --score test.txt
  python -m pyrohmm.language --load model --generate 5 --prompt "once upon"
  python -m pyrohmm.language --load model --generate 5 --must sea "the ship" --longest 20
"""


def _number(kind: type[int] | type[float], low: float = 0.0) -> Callable[[str], float]:
    """A reader of finite numbers of at least ``low``."""

    def read(text: str) -> float:
        value = kind(text)
        if not low <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {low:g} and finite; got {text!r}")
        return value

    read.__name__ = kind.__name__  # for the message about what is no number
    return read


COUNT, REAL = _number(int, 1), _number(float)
# Options that are arguments of a function, from which come types, defaults and explanations.
OF_WORDS = {"min-count": "min_count", "max-words": "max_size"}
OF_MODEL = {
    "states": "num_states", "clusters": "num_clusters", "mass-power": "mass_power",
    "dim": "hidden_dim", "dropout": "dropout", "one-level": "two_level", "contiguous": "contiguous",
}  # fmt: skip
OF_FIT = {
    "epochs": "num_epochs", "tokens": "batch_tokens", "streams": "num_streams",
    "rate": "learning_rate", "decay": "weight_decay", "clip": "clip_norm", "patience": "patience",
    "checkpoint": "checkpoint",
}  # fmt: skip
# Options, the one they need, and how that is given.
NEEDS = [
    (["per-line", "per-token"], "score", "--score FILE"),
    (["prompt", "must", "must-not", "longest"], "generate", "--generate N"),
    ([*OF_FIT, "save", "valid", "hold-out"], "train", "text files to train on"),
]
DEFAULTS: dict[str, Any] = {
    "train": [], "load": None, "save": None, "valid": [], "score": [], "generate": 0,
    "prompt": "", "must": [], "must_not": [], "longest": 100, "per_line": False,
    "per_token": False, "hold_out": 0.05, "seed": None, "contiguous": False,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        arguments: Of the command line; those of this process by default.

    Raises:
        SystemExit: With what is wrong, if something is.
    """
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    if not {"train", "load"} & given.keys():
        parser.error("give text files to train on, --load DIR or both")
    if "train" in given and "save" not in given:
        parser.error("training needs --save DIR, where the model goes")
    if not {"train", "score", "generate"} & given.keys():
        parser.error("with --load give --score FILE, --generate N or both, or text to train on")
    for flags, needed, shown in NEEDS:
        for flag in flags if needed not in given else ():
            if _name(flag) in given:
                parser.error(f"--{flag} needs {shown}, which is not given")
    for flag in [*OF_WORDS, *OF_MODEL] if "load" in given else ():
        if _name(flag) in given:
            parser.error(f"--{flag} belongs to a new model, without --load")
    if "num_streams" in given and not {"load", "contiguous"} & given.keys():
        parser.error("--streams belongs to --contiguous, which is not given")
    options = argparse.Namespace(**DEFAULTS | given)
    try:
        with _process_group(options.device):
            run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads it, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (OSError, ValueError, FloatingPointError) as error:
        sys.exit(f"{parser.prog}: {error}")
    except KeyboardInterrupt:
        print("interrupted before training; nothing was saved", file=sys.stderr)
        sys.exit(INTERRUPTED)


def run(options: argparse.Namespace) -> None:
    """Train or load, then score and generate, as the options say."""
    texts = {name: _read(name) for name in options.score}
    model = train(options) if options.train else LanguageModel.load(options.load)
    model.module.to(options.device)
    if not ProcessGroup.all().is_first:
        return
    if options.load and not options.train:
        print(model)
    for name, lines in texts.items():
        data = model.encode(lines)
        scores = model.score(data)
        if options.per_line:
            for line, score, length in zip(lines, scores.tolist(), data.lengths.tolist()):
                print(f"{score:.6f}\t{length}\t{line}")
        if options.per_token:
            for line, nats in zip(lines, model.surprisal(data)):
                for word, value in zip([*line.split(), END], nats.tolist()):
                    print(f"{value:.6f}\t{word}")
        result = Perplexity.of(scores.sum().item(), data.num_observed)
        print(f"{name}: {result}, {END} included; {model.num_unknown(lines):,} unknown words")
    if options.generate:
        generator = torch.Generator()
        generator.seed() if options.seed is None else generator.manual_seed(options.seed)
        for sentence in model.generate(
            options.generate, generator, options.longest, options.prompt, constraint(options)
        ):
            print(sentence)


def constraint(options: argparse.Namespace) -> Automaton | None:
    """Constraint of the sentences that are written, from the options."""
    parts = [must_contain(*options.must)] if options.must else []
    parts += [must_not_contain(*options.must_not)] if options.must_not else []
    return reduce(Automaton.__and__, parts) if parts else None


def train(options: argparse.Namespace) -> LanguageModel:
    """Train a model on the files and save it."""
    check_directory(options.save)
    of_fit = _given(options, OF_FIT)
    checkpoint = of_fit.get("checkpoint")
    if checkpoint:
        Checkpoint(checkpoint, {})  # raises if no file can be there
    start_time = time.perf_counter()
    lines = [line for name in options.train for line in _read(name)]
    if options.valid:
        held = [line for name in options.valid for line in _read(name)]
    else:
        lines, held = hold_out(lines, options.hold_out, options.contiguous)
    pyro.set_rng_seed(options.seed or 0)
    model = LanguageModel.load(options.load) if options.load else _untrained(lines, options)
    vocabulary = model.vocabulary
    data, validation = model.encode(lines), model.encode(held)
    model.module.to(options.device)

    processes = ProcessGroup.all()
    if processes.is_first:
        count = sum(parameter.numel() for parameter in model.module.parameters())
        print(f"training on {len(data):,} sentences, {data.num_observed:,} tokens with {END}")
        print(f"held out    {len(validation):,} sentences, {validation.num_observed:,} tokens, "
              f"{model.num_unknown(held):,} unknown words")  # fmt: skip
        print(f"{model}, {count:,} parameters, processes: {processes.size}")
        if not bool((data.values == vocabulary.index(UNKNOWN))[data.exists].any()):
            print(f"note: no word was left out, so that {UNKNOWN} does not occur, and unknown "
                  "words will be very improbable; see --min-count")  # fmt: skip
        if checkpoint and os.path.exists(checkpoint):
            print(f"going on from checkpoint {checkpoint}")
        print(f"ready after {time.perf_counter() - start_time:.1f} s", flush=True)

    lasts = {name: of_fit[name] for name in OF_STEPS if name in of_fit}
    num_steps = model.num_steps(data, **lasts)
    one_epoch = model.num_steps(data, **lasts | {"num_epochs": 1})
    tell = _Progress(num_steps // one_epoch, num_steps)
    generator = torch.Generator().manual_seed(options.seed or 0)
    try:
        fit = model.fit(data, validation, generator=generator, report=tell, **of_fit)
    except KeyboardInterrupt:
        if processes.is_first:
            model.save(options.save)
            kept = f"interrupted; the model as it is now was saved to {options.save}"
            how = f"to train on from there, give the same text files with --load {options.save}"
            if checkpoint and os.path.exists(checkpoint):
                how = f"the same command goes on from checkpoint {checkpoint}"
            print(kept, how, sep="\n", file=sys.stderr)
        sys.exit(INTERRUPTED)
    if processes.is_first:
        model.save(options.save)
        print(f"ended after {len(fit.losses):,} steps: {fit.reason}; saved to {options.save}")
        print(f"held out: {model.perplexity(validation)}, {END} included")
    return model


def _untrained(lines: list[str], options: argparse.Namespace) -> LanguageModel:
    """A new model for some lines."""
    vocabulary = count_words(lines, **_given(options, OF_WORDS))
    data = encode(lines, vocabulary)
    return LanguageModel.from_data(vocabulary, data, **_given(options, OF_MODEL))


class _Progress:
    """Prints each validation, the epoch, and about how long the rest will take."""

    def __init__(self, num_epochs: int, num_steps: int) -> None:
        self.num_epochs, self.num_steps = num_epochs, num_steps
        self.start_time = time.perf_counter()
        self.before: tuple[int, float] | None = None  # the validation before, and its time

    def __call__(self, found: Validation) -> None:
        now = time.perf_counter()
        epoch = min(self.num_epochs, round(found.step * self.num_epochs / self.num_steps))
        perplexity = math.exp(min(found.nats, 700.0))
        text = f"step {found.step:,} (epoch {epoch} of {self.num_epochs}): held-out perplexity "
        text += f"{perplexity:.2f}, {now - self.start_time:.0f} s"
        if self.before is not None and found.step > self.before[0]:
            pace = (now - self.before[1]) / (found.step - self.before[0])
            text += f", about {pace * max(self.num_steps - found.step, 0):.0f} s to go"
        self.before = found.step, now
        tqdm.write(text)
        sys.stdout.flush()  # for those who follow a file


def hold_out(
    lines: list[str], share: float, contiguous: bool = False
) -> tuple[list[str], list[str]]:
    """Lines to train on, and those held out: every so many-th, at least one of each.

    Args:
        lines: All of them.
        share: About which share to hold out, between 0 and 1.
        contiguous: Whether to hold out the last ones instead, lest the text have gaps.

    Raises:
        ValueError: If there are fewer than two lines, or ``share`` is out of range.

    Example:
        >>> hold_out(["a", "b", "c", "d", "e"], 0.4)
        (['a', 'c', 'e'], ['b', 'd'])
    """
    if not 0 < share < 1:
        raise ValueError(f"share must be between 0 and 1, such as 0.05; got {share}.")
    if len(lines) < 2:
        raise ValueError("one sentence cannot be divided into those to train on and those held "
                         "out; give --valid FILE, or more text.")  # fmt: skip
    count = min(max(1, round(share * len(lines))), len(lines) - 1)
    if contiguous:
        return lines[:-count], lines[-count:]
    held = {(2 * n + 1) * len(lines) // (2 * count) for n in range(count)}
    return (
        [line for number, line in enumerate(lines) if number not in held],
        [lines[number] for number in sorted(held)],
    )


def _read(name: str) -> list[str]:
    """Lines of a file that are not blank; the mark that is added to each is written in none."""
    lines = read_lines(name)
    for number, line in enumerate(lines, 1):
        if END in line.split():
            raise ValueError(
                f"{name}, line {number}: lines must not have {END} in them, which is added at the "
                "end of each. Take it out."
            )
    return [line for line in lines if line.strip()]


@contextmanager
def _process_group(device: str) -> Iterator[None]:
    """A process group of the data-parallel ranks, where ``torchrun`` has started some."""
    if device == "cuda":  # of several GPUs, each process has one
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        yield
        return
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield
    finally:
        distributed.destroy_process_group()


def _name(flag: str) -> str:
    """Name of an option as an attribute of what is read."""
    return (OF_WORDS | OF_MODEL | OF_FIT).get(flag, flag.replace("-", "_"))


def _given(options: argparse.Namespace, flags: dict[str, str]) -> dict[str, Any]:
    """The arguments of a function that were given."""
    return {name: vars(options)[name] for name in flags.values() if name in options}


def _add(group: Any, function: Callable[..., Any], flags: dict[str, str]) -> None:
    """Options of a function's arguments, with its defaults, and what its docstring says of them."""
    parameters = inspect.signature(function).parameters
    texts = _explained(RunOptions) | _explained(function)
    for flag, name in flags.items():
        annotation, default = RunOptions.__annotations__.get(name, ""), None
        if name in parameters:
            annotation, default = parameters[name].annotation, parameters[name].default
        kind: dict[str, Any] = {"metavar": flag.upper()}
        if isinstance(default, bool):
            kind = {"action": "store_const", "const": not default}
        elif "int" in str(annotation):
            kind["type"] = COUNT
        elif "float" in str(annotation):
            kind["type"] = REAL
        text = f"Not so: {texts[name]}" if default is True else texts[name]
        shown = "" if isinstance(default, bool | None) else f" (default: {default})"
        group.add_argument(f"--{flag}", dest=name, help=f"{text}{shown}", **kind)


def _explained(function: object) -> dict[str, str]:
    """Explanation of each argument, from a docstring."""
    text = re.sub(r":\w+:`~?(.*?)`|`", r"\1", inspect.getdoc(function) or "").replace("%", "%%")
    entries = re.findall(r"^    (\w+): ((?:.|\n {8})*)", text, re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in entries}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m pyrohmm.language",
        description="Train a hidden Markov language model on text files, score text, or write "
        f"some. Files have one sentence a line, words separated by blanks; {END} is added to "
        "each, predicted and counted.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("train", nargs="*", metavar="TRAIN", help="text files to train on")
    add = parser.add_argument_group("what to do").add_argument
    add("--save", metavar="DIR", help="where the trained model goes")
    add("--load", metavar="DIR", help="a model that was saved; with text files, to train it on")
    add("--valid", nargs="+", metavar="FILE",
        help="held-out text; without it some lines of the training text are held out")  # fmt: skip
    add("--score", nargs="+", metavar="FILE", help="text whose perplexity is wanted")
    add("--per-line", action="store_true",
        help="with --score, also log-probability (nats), tokens and text of each line")  # fmt: skip
    add("--per-token", action="store_true",
        help="with --score, also the surprisal (nats) of each word")  # fmt: skip
    add("--generate", type=COUNT, metavar="N", help="write N sentences")
    add("--prompt", metavar="TEXT", help="with --generate, words with which each begins")
    add("--must", nargs="+", metavar="PHRASE",
        help="with --generate, words or quoted phrases that occur in each sentence")  # fmt: skip
    add("--must-not", nargs="+", metavar="PHRASE",
        help="with --generate, words or quoted phrases that occur in none")  # fmt: skip
    add("--longest", type=COUNT, help="words after which those are cut off (default: 100)")
    add("--hold-out", type=REAL, help="share of lines, without --valid (default: 0.05)")
    add("--seed", type=int, help="of random numbers; without it training takes 0, and sentences "
        "differ from run to run")  # fmt: skip
    devices = ["cpu", "cuda"][: 1 + torch.cuda.is_available()]
    add("--device", choices=devices, default=devices[-1], help="where to compute")
    new = parser.add_argument_group("the model")
    _add(new, LanguageModel.from_data, OF_MODEL)
    _add(new, count_words, OF_WORDS)
    _add(parser.add_argument_group("training"), LanguageModel.fit, OF_FIT)
    return parser
