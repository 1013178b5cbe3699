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
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

import pyro
import torch
from torch import distributed
from tqdm import tqdm

from ..analysis.metrics import Perplexity
from ..data.readers import read_lines
from ..data.sequences import Sequences
from ..infer.process_group import ProcessGroup
from ..infer.results import Fit
from ..infer.validation import Validation
from ..io.checkpoints import Checkpoint
from ..io.files import check_directory
from ..ops.automata import Automaton, must_contain, must_not_contain
from .model import LanguageModel
from .text import END, UNKNOWN, count_words, encode

OF_MODEL = ["states", "clusters", "mass-power", "dim", "dropout", "one-level", "contiguous",
            "min-count", "max-words"]  # fmt: skip
OF_TRAINING = ["save", "valid", "checkpoint", "epochs", "tokens", "streams", "rate", "decay",
               "clip", "patience", "hold-out"]  # fmt: skip
INTERRUPTED = 130  # the exit status of what Ctrl-C has ended
EXAMPLES = """examples:
  python -m pyrohmm.language train.txt --valid valid.txt --save model --score test.txt
  python -m pyrohmm.language --load model --generate 5 --prompt "once upon"
  python -m pyrohmm.language --load model --generate 5 --must sea "the ship" --longest 20
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        arguments: Of the command line; those of this process by default.

    Raises:
        SystemExit: With what is wrong, if something is.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    given = {
        name
        for name in [*OF_MODEL, *OF_TRAINING]
        if getattr(options, name.replace("-", "_")) != parser.get_default(name.replace("-", "_"))
    }
    if not options.train and not options.load:
        parser.error("give text files to train on, --load DIR or both")
    if options.train and not options.save:
        parser.error("training needs --save DIR, where the model goes")
    for name in OF_MODEL if options.load else []:
        if name in given:
            parser.error(f"--{name} belongs to a new model, without --load")
    for name in [] if options.train else OF_TRAINING:
        if name in given:
            parser.error(f"--{name} belongs to training: give text files to train on")
    if not (options.train or options.score or options.generate):
        parser.error("with --load give --score FILE, --generate N or both, or text to train on")
    for name in ("per-line", "per-token"):
        if getattr(options, name.replace("-", "_")) and not options.score:
            parser.error(f"--{name} tells more of --score FILE, which is not given")
    if options.prompt is not None and not options.generate:
        parser.error("--prompt is where --generate N begins, which is not given")
    if (options.must or options.must_not) and not options.generate:
        parser.error("--must and --must-not are of what --generate N writes, which is not given")
    if (
        not options.load
        and options.streams != parser.get_default("streams")
        and not options.contiguous
    ):
        parser.error("--streams belongs to --contiguous, which is not given")
    if options.states < options.clusters:
        parser.error(
            f"--states must be at least --clusters = {options.clusters}; got {options.states}"
        )
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
            options.generate, generator, options.longest, options.prompt or "", constraint(options)
        ):
            print(sentence)


def constraint(options: argparse.Namespace) -> Automaton | None:
    """What the sentences that are written must and must not contain."""
    parts = [must_contain(*options.must)] if options.must else []
    parts += [must_not_contain(*options.must_not)] if options.must_not else []
    return reduce(Automaton.__and__, parts) if parts else None


def train(options: argparse.Namespace) -> LanguageModel:
    """Train a model on the files and save it."""
    check_directory(options.save)
    if options.checkpoint:
        Checkpoint(options.checkpoint, {})  # raises if no file can be there
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
        if model.blocks.num_blocks < options.clusters and not options.load:
            print(f"note: {model.blocks.num_blocks} clusters, not {options.clusters}: few words")
        if not bool((data.values == vocabulary.index(UNKNOWN))[data.exists].any()):
            print(f"note: no word was left out, so that {UNKNOWN} does not occur, and unknown "
                  "words will be very improbable; see --min-count")  # fmt: skip
        if options.checkpoint and os.path.exists(options.checkpoint):
            print(f"going on from checkpoint {options.checkpoint}")
        print(f"ready after {time.perf_counter() - start_time:.1f} s", flush=True)

    num_steps = model.num_steps(data, options.epochs, options.tokens, options.streams)
    tell = _Progress(options.epochs, num_steps)
    try:
        fit = _fit(model, data, validation, tell, options)
    except KeyboardInterrupt:
        if processes.is_first:
            model.save(options.save)
            print(_how_to_go_on(options), file=sys.stderr)
        sys.exit(INTERRUPTED)
    if processes.is_first:
        model.save(options.save)
        print(f"ended after {len(fit.losses):,} steps: {fit.reason}; saved to {options.save}")
        print(f"held out: {model.perplexity(validation)}, {END} included")
    return model


def _untrained(lines: list[str], options: argparse.Namespace) -> LanguageModel:
    """A new model for some lines."""
    vocabulary = count_words(lines, options.min_count, options.max_words)
    return LanguageModel.from_data(
        vocabulary, encode(lines, vocabulary), options.states, options.clusters, options.dim,
        mass_power=options.mass_power, two_level=not options.one_level, dropout=options.dropout,
        contiguous=options.contiguous,
    )  # fmt: skip


def _fit(
    model: LanguageModel,
    data: Sequences,
    validation: Sequences,
    tell: Callable[[Validation], object],
    options: argparse.Namespace,
) -> Fit:
    return model.fit(
        data,
        validation,
        num_epochs=options.epochs,
        batch_tokens=options.tokens,
        num_streams=options.streams,
        learning_rate=options.rate,
        weight_decay=options.decay,
        clip_norm=options.clip,
        patience=options.patience,
        generator=torch.Generator().manual_seed(options.seed or 0),
        checkpoint=options.checkpoint,
        report=tell,
    )


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


def _how_to_go_on(options: argparse.Namespace) -> str:
    """Message after Ctrl-C in training."""
    kept = f"interrupted; the model as it is now was saved to {options.save}\n"
    if options.checkpoint and os.path.exists(options.checkpoint):
        return f"{kept}the same command goes on from checkpoint {options.checkpoint}"
    return f"{kept}to train on from there, give the same text files with --load {options.save}"


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
def _process_group(device: torch.device) -> Iterator[None]:
    """A process group of the data-parallel ranks, where ``torchrun`` has started some."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        distributed.destroy_process_group()


def _device(text: str) -> torch.device:
    """Device, from an option: of several GPUs, each process has one."""
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"must be cpu or cuda; got {text!r}")
    if text == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch finds no GPU here")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _number(
    kind: type[int] | type[float], wanted: str, holds: Callable[[float], bool]
) -> Callable[[str], float]:
    """A reader of a numeric option, whose error says which numbers are ``wanted``."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not holds(value):
            raise argparse.ArgumentTypeError(f"must be {wanted}; got {text!r}")
        return value

    return read


def _at_least(least: int) -> Callable[[str], float]:
    return _number(int, f"a whole number of at least {least}", lambda value: value >= least)


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and examples as they stand."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m pyrohmm.language",
        description="Train a hidden Markov language model on text files, score text, or write "
        f"some. Files have one sentence a line, words separated by blanks; {END} is added to "
        "each, predicted and counted.",
        epilog=EXAMPLES,
        formatter_class=_Help,
    )
    count, positive = _at_least(1), _number(float, "above 0", lambda value: 0 < value < math.inf)
    parser.add_argument("train", nargs="*", metavar="TRAIN", help="text files to train on")
    add = parser.add_argument_group("what to do").add_argument
    add("--save", metavar="DIR", help="where the trained model goes")
    add("--load", metavar="DIR", help="a model that was saved; with text files, to train it on")
    add("--valid", nargs="+", metavar="FILE", default=[],
        help="held-out text; without it some lines of the training text are held out")  # fmt: skip
    add("--score", nargs="+", metavar="FILE", default=[], help="text whose perplexity is wanted")
    add("--per-line", action="store_true",
        help="with --score, also log-probability (nats), tokens and text of each line")  # fmt: skip
    add("--per-token", action="store_true",
        help="with --score, also the surprisal (nats) of each word")  # fmt: skip
    add("--generate", type=count, metavar="N", help="write N sentences")
    add("--prompt", metavar="TEXT", help="with --generate, words with which each begins")
    add("--must", nargs="+", metavar="PHRASE", default=[],
        help="with --generate, words or quoted phrases that occur in each sentence")  # fmt: skip
    add("--must-not", nargs="+", metavar="PHRASE", default=[],
        help="with --generate, words or quoted phrases that occur in none")  # fmt: skip
    add("--longest", type=count, default=100, help="words after which those are cut off")
    add("--checkpoint", metavar="FILE", help="a file from which the same command resumes")
    add = parser.add_argument_group("the model").add_argument
    add("--states", type=count, default=4096, help="of the chain, divided among the clusters")
    add("--clusters", type=_at_least(2), default=128, help=f"of words, that of {END} included")
    add("--mass-power", default=0.0, help="0: equally many states for each cluster; up to 1: in "
        "proportion to how often its words occur; 0.5 may predict better, and takes longer",
        type=_number(float, "from 0 to 1", lambda value: 0 <= value <= 1))  # fmt: skip
    add("--dim", type=count, default=256, help="of embeddings")
    add("--dropout", help="share of states left out at each step; by default none in a "
        "few epochs of the text, and in more 0.5, which falls to 0.25",
        type=_number(float, "at least 0 and below 1", lambda value: 0 <= value < 1))  # fmt: skip
    add("--one-level", action="store_true", help="transitions need a sum over all states: slower")
    add("--contiguous", action="store_true",
        help="read the lines as one text: the state goes on from each to the next")  # fmt: skip
    add("--min-count", type=count, default=1, help=f"rarer words become {UNKNOWN}")
    add("--max-words", type=_at_least(3), help="largest vocabulary; the rarest words give way")
    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=count, default=10,
        help="rounds of the text; more of them than a checkpoint has go on from it")  # fmt: skip
    add("--tokens", type=count, default=2048, help="largest number in a minibatch")
    add("--streams", type=count, default=16,
        help="with --contiguous, parts of the text that are read side by side")  # fmt: skip
    add("--rate", type=positive, default=0.004, help="largest learning rate of AdamW")
    add("--decay", default=0.0, help="weight decay of AdamW",
        type=_number(float, "at least 0", lambda value: value >= 0))  # fmt: skip
    add("--clip", type=positive, default=1.0, help="largest norm of the gradient, per token")
    add("--patience", type=count, help="end after so many epochs that were no better")
    add("--hold-out", default=0.05, help="share of lines, where --valid is not given",
        type=_number(float, "between 0 and 1", lambda value: 0 < value < 1))  # fmt: skip
    add("--seed", help="of random numbers; without it training takes 0, and sentences differ "
        "from run to run",
        type=_number(int, "a whole number from 0 to 2^32 - 1", lambda value: 0 <= value < 1 << 32),
        )  # fmt: skip
    add("--device", type=_device, default="cuda" if torch.cuda.is_available() else "cpu",
        help="where to compute: cpu or cuda")  # fmt: skip
    return parser
