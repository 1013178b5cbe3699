"""The command ``python -m pyrohmm.language``: train a language model on text files, and use it.

::

    python -m pyrohmm.language train train.txt --valid valid.txt --save model --score test.txt
    python -m pyrohmm.language score model test.txt
    python -m pyrohmm.language generate model 5 --prompt "once upon"
    python -m pyrohmm.language generate model 5 --must sea "the ship" --longest 20
    python -m pyrohmm.language train more.txt --load model --save further
    python -m pyrohmm.language distil gpt2 --states 1024 --save hmm

Files have one sentence a line, its words separated by white space; they may be gzipped, and blank
lines are passed over. Each sentence ends in ``<eos>``, which is predicted and counted. score and
generate stand for the options --load model --lines and --load model --generate; distil makes an HMM
of tokens, which pyrohmm.load_hmm reads. In several processes it is the same command after
``torchrun --nproc-per-node 2 -m``. Ctrl-C and SIGTERM end a training and save the model as it is.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import reduce
from typing import Any

import pyro
import torch
from torch import distributed
from tqdm import tqdm

from .._imports import imported
from ..data.readers import read_lines
from ..data.sequences import Sequences
from ..infer.descent import RunOptions, Validation
from ..infer.process_group import ProcessGroup
from ..io.files import TENSORS, Checkpoint, check_directory
from ..io.persistence import save
from ..ops.automata import Automaton, must_contain, must_not_contain
from .distillation import distil
from .model import LanguageModel
from .text import END, UNKNOWN, count_words, open_corpus, write_corpus

OF_STEPS = ("num_epochs", "batch_tokens", "num_streams")  # what determines how many there are
TRAIN, HELD_OUT = "train.tokens", "held_out.tokens"
SUBCOMMANDS: dict[str, tuple[list[str], float, str]] = {  # options, most names, what is needed
    "train": ([], math.inf, "text files, and --save DIR"),
    "score": (["load", "lines"], math.inf, "the directory of a model, and text files"),
    "generate": (["load", "generate"], 2, "the directory of a model, and how many sentences"),
    "distil": (["distil"], 1, "a model of transformers, --states K, and --save DIR for the HMM"),
}
INTERRUPTED = 130  # the exit status of what Ctrl-C has ended
# Options that are arguments of a function, from which come types, defaults and explanations.
OF_WORDS = {"min-count": "min_count", "max-words": "max_size"}
OF_CLUSTERS = {"states": "num_states", "clusters": "num_clusters"}
OF_MODEL = {
    "dim": "hidden_dim", "dropout": "dropout", "one-level": "two_level", "contiguous": "contiguous",
}  # fmt: skip
OF_FIT = {
    "epochs": "num_epochs", "tokens": "batch_tokens", "streams": "num_streams",
    "rate": "learning_rate", "decay": "weight_decay", "clip": "clip_norm", "patience": "patience",
    "checkpoint": "checkpoint",
}  # fmt: skip
OF_DISTIL = {"states": "num_states", "texts": "num_texts", "epochs": "num_epochs",
             "checkpoint": "checkpoint"}  # fmt: skip
USES: dict[str, set[str]] = {  # options that have a use where others are given
    "distil": {"distil", "save", "seed", *OF_DISTIL.values()},
    "train": {"train", "load", "save", "valid", "hold_out", "seed", "score", "lines", "generate",
              *OF_FIT.values()},
    "load": {"load", "score", "lines", "generate"},
    "generate": {"prompt", "must", "must_not", "longest", "seed"},
    "training a new model": {*(OF_WORDS | OF_CLUSTERS | OF_MODEL).values()},
}  # fmt: skip
LEAST = {"num_states": 1, "num_epochs": 1, "generate": 1, "longest": 1,
         "num_texts": inspect.signature(distil).parameters["max_tokens"].default}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments, by default those of this process, and run the command.

    Raises:
        SystemExit: With what is wrong, if something is.
    """
    if arguments is None:  # the process is this command's own
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        warnings.formatwarning = lambda text, *_: f"warning: {text}\n"
    parser = _parser()
    options = _parsed(parser, sys.argv[1:] if arguments is None else arguments)
    _check(parser, options)
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
        print("interrupted, and not in training; nothing more was saved", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse arguments, those of a subcommand into the options that it stands for."""
    verb, *rest = arguments or [""]
    if verb not in SUBCOMMANDS or os.path.isfile(verb):
        return parser.parse_intermixed_args(arguments)
    shown = USES[{"score": "load"}.get(verb, verb)] | {"help", "device"}
    shown |= USES["training a new model"] | USES["generate"] if verb == "train" else set()
    for action in parser._actions:  # those of other subcommands are not on its page of help
        action.help = action.help if action.dest in shown else argparse.SUPPRESS
    options = parser.parse_intermixed_args(rest)
    names, (flags, most, needed) = options.train, SUBCOMMANDS[verb]
    if clash := [flag for flag in flags if vars(options)[flag]]:
        parser.error(f"{verb} stands for --{clash[0]}, which must not be given, too")
    if not max(len(flags), 1) <= len(names) <= most:
        parser.error(f"{verb} needs {needed}; got {' '.join(names) or 'no name'}")
    for flag, values in zip(flags, (names[:1], names[1:])):
        parser.parse_args([f"--{flag}", *values], options)  # which leaves no text to train on
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with an error if options are missing, without use or too small."""
    doing = "distil" if options.distil else "train" if options.train else "load"
    if options.distil and not (options.save and "num_states" in options):
        parser.error("distil needs --save DIR, where the HMM goes, and --states K")
    if not options.train and not options.load and not options.distil:
        parser.error("give text files to train on, --load DIR or both")
    if absent := [name for name in options.train if not os.path.exists(name)]:
        parser.error(f"{absent[0]} is no file, and none of {', '.join(SUBCOMMANDS)}")
    if options.train and not options.save:
        parser.error("training needs --save DIR, where the model goes")
    used = {"device"} | USES[doing] | (USES["generate"] if options.generate else set())
    used |= USES["training a new model"] if doing == "train" and not options.load else set()
    for action in parser._actions:
        name, flag = action.dest, "/".join(action.option_strings) or "a text file to train on"
        value = getattr(options, name, action.default)
        if value != action.default and name not in used:
            others = " or ".join(key for key in USES if name in USES[key])
            parser.error(f"{flag} has no use here, but with {others}")
        if value != action.default and value < LEAST.get(name, value):
            parser.error(f"{flag} must be at least {LEAST[name]}; got {value}")


def _check_free(options: argparse.Namespace) -> None:
    """Raise unless --save can be written, without a saved model that this does not continue."""
    check_directory(options.save)
    goes_on = os.path.exists(getattr(options, "checkpoint", ""))
    if options.load:
        goes_on |= os.path.realpath(options.load) == os.path.realpath(options.save)
    if os.path.exists(os.path.join(options.save, TENSORS)) and not goes_on:
        text = f"--save {options.save} holds a model already. Name another directory, or remove it"
        further = "" if options.distil else "; to train that model on, name it with --load, too"
        raise ValueError(f"{text}{further}.")


def _keep(model: LanguageModel, options: argparse.Namespace) -> None:
    """Save the trained model; else beside the checkpoint or elsewhere, and exit saying where."""
    places = [os.path.dirname(getattr(options, "checkpoint", "")) or ".", tempfile.gettempdir()]
    try:
        return model.save(options.save)
    except (OSError, ValueError) as error:
        for place in places:
            with suppress(OSError):
                model.save(other := tempfile.mkdtemp(prefix="pyrohmm-", dir=place))
                sys.exit(f"not saved to {options.save} ({error}), but to {other}")
        raise


def run(options: argparse.Namespace) -> None:
    """Distil; or train or load, then score and generate, as the options say."""
    if options.distil:
        return run_distil(options)
    texts = {name: _read(name) for name in [*options.score, *options.lines]}
    model = train(options) if options.train else LanguageModel.load(options.load)
    model.module.to(options.device)
    if not ProcessGroup.of().is_first:
        return
    if options.load and not options.train and not options.lines:
        print(model, file=sys.stderr)
    for name in options.lines:
        for nats, line in zip(model.score(texts[name]).tolist(), texts[name]):
            print(f"{nats:.4f}\t{line.strip()}")
    for name in options.score:
        lines, unknown = texts[name], model.num_unknown(texts[name])
        print(f"{name}: {model.perplexity(lines)}, {END} included; {unknown:,} unknown words")
    if options.generate:
        generator = torch.Generator()
        generator.seed() if options.seed is None else generator.manual_seed(options.seed)
        for sentence in model.generate(
            options.generate, generator, options.longest, options.prompt, constraint(options)
        ):
            print(sentence)


def run_distil(options: argparse.Namespace) -> None:
    """Distil an HMM from a model of ``transformers``, and save it."""
    transformers = imported("transformers")
    _check_free(options)
    pyro.set_rng_seed(options.seed or 0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.distil)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.distil).to(options.device)
    found = distil(model, tokenizer, **_given(options, OF_DISTIL))
    save(found.hmm, options.save)
    print(f"{found.fit}; saved to {options.save}\nheld out: {found.perplexity}")


def constraint(options: argparse.Namespace) -> Automaton | None:
    """Build the constraint on generated sentences from the options."""
    parts = [must_contain(*options.must)] if options.must else []
    parts += [must_not_contain(*options.must_not)] if options.must_not else []
    return reduce(Automaton.__and__, parts) if parts else None


def train(options: argparse.Namespace) -> LanguageModel:
    """Train a model on the files and save it."""
    _check_free(options)
    of_fit = _given(options, OF_FIT)
    if checkpoint := of_fit.get("checkpoint"):
        Checkpoint(checkpoint, {})  # raises if no file can be there
    start_time, processes = time.perf_counter(), ProcessGroup.of()
    pyro.set_rng_seed(options.seed or 0)
    place = f"{os.path.normpath(options.save)}.prepared"
    processes.of_first(lambda: prepare(options, place))
    torch.set_rng_state(processes.from_first(torch.get_rng_state()))
    try:
        model = LanguageModel.load(os.path.join(place, "model"))
        data = open_corpus(os.path.join(place, TRAIN), model.vocabulary)
        held = open_corpus(os.path.join(place, HELD_OUT), model.vocabulary)
        validation = Sequences.from_concatenated(held.values, held.lengths, dtype=torch.long)
        processes.together()
    finally:  # files that are open stay until they are closed
        if processes.is_first:
            shutil.rmtree(place)
    model.module.to(options.device)
    if processes.is_first:
        count = sum(parameter.numel() for parameter in model.module.parameters())
        print(f"training on {len(data):,} sentences, {data.num_observed:,} tokens with {END}")
        print(f"held out    {len(validation):,} sentences, {validation.num_observed:,} tokens")
        print(f"{model}, {count:,} parameters, processes: {processes.size}")
        if checkpoint and os.path.exists(checkpoint):
            print(f"going on from checkpoint {checkpoint}")
        print(f"ready after {time.perf_counter() - start_time:.1f} s", flush=True)

    num_iterations = model.num_iterations(data, **{n: of_fit[n] for n in OF_STEPS if n in of_fit})

    def tell(found: Validation) -> None:
        perplexity, seconds = math.exp(min(found.nats, 700.0)), time.perf_counter() - start_time
        tqdm.write(f"step {found.step:,} of {num_iterations:,}: held-out perplexity "
                   f"{perplexity:.2f}, {seconds:.0f} s")  # fmt: skip
        sys.stdout.flush()  # for those who follow a file

    generator = torch.Generator().manual_seed(options.seed or 0)
    try:
        fit = model.fit(data, validation, generator=generator, report=tell, **of_fit)
    except (KeyboardInterrupt, OSError) as error:  # the latter of the checkpoint
        if processes.is_first:
            _keep(model, options)
            print(f"{str(error) or 'interrupted'}; the model as it is now was saved to "
                  f"{options.save}. Give it with --load to train on, or the same command if it has "
                  "a --checkpoint.", file=sys.stderr)  # fmt: skip
        sys.exit(1 if isinstance(error, OSError) else INTERRUPTED)
    if processes.is_first:
        _keep(model, options)
        print(f"ended after {len(fit.losses):,} steps: {fit.reason}; saved to {options.save}")
        print(f"held out: {model.perplexity(validation)}, {END} included")
    return model


def prepare(options: argparse.Namespace, place: str) -> None:
    """Build or load the model, and encode the text; both are written to the directory ``place``."""
    lines = [line for name in options.train for line in _read(name)]
    if options.valid:
        held = [line for name in options.valid for line in _read(name)]
    else:
        lines, held = hold_out(lines, options.hold_out, "contiguous" in options)
    model = LanguageModel.load(options.load) if options.load else None
    words = model.vocabulary if model else count_words(lines, **_given(options, OF_WORDS))
    os.makedirs(place, exist_ok=True)
    data = write_corpus(os.path.join(place, TRAIN), lines, words)
    write_corpus(os.path.join(place, HELD_OUT), held, words)
    if model is None:
        model = LanguageModel.from_data(words, data, **_given(options, OF_CLUSTERS | OF_MODEL))
    model.save(os.path.join(place, "model"))
    print(f"{model.num_unknown(held):,} unknown words in what is held out")
    if not bool((torch.from_numpy(data.values) == words.index(UNKNOWN)).any()):
        print(f"note: no word was left out, so that {UNKNOWN} does not occur, and unknown "
              "words will be very improbable; see --min-count")  # fmt: skip


def hold_out(
    lines: list[str], share: float, contiguous: bool = False
) -> tuple[list[str], list[str]]:
    """Hold out about a share of lines: evenly spaced ones, or the last, lest the text have gaps.

    Raises:
        ValueError: If there are fewer than two lines, or ``share`` is out of range.

    Example:
        >>> hold_out(["a", "b", "c", "d", "e"], 0.4)
        (['a', 'c', 'e'], ['b', 'd'])
    """
    if not 0 < share <= 0.5:
        raise ValueError(f"share must be above 0 and at most 0.5, such as 0.05; got {share}.")
    if len(lines) < 2:
        raise ValueError("one sentence cannot be divided into those to train on and those held "
                         "out; give --valid FILE, or more text.")  # fmt: skip
    every = min(round(1 / share), len(lines))
    if contiguous:
        count = len(lines) // every
        return lines[:-count], lines[-count:]
    kept = list(lines)
    del kept[every // 2 :: every]
    return kept, lines[every // 2 :: every]


def _read(name: str) -> list[str]:
    """Read the lines of a file that are not blank."""
    return [line for line in read_lines(name) if line.strip()]


@contextmanager
def _process_group(device: str) -> Iterator[None]:
    """Context manager: process group of data-parallel ranks, if ``torchrun`` has started some."""
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


def _given(options: argparse.Namespace, flags: dict[str, str]) -> dict[str, Any]:
    """Command-line options that are arguments of a function, by name."""
    return {name: vars(options)[name] for name in flags.values() if name in options}


def _add(group: Any, function: Callable[..., Any], flags: dict[str, str]) -> None:
    """Add options for a function's arguments, with defaults and help from its docstring."""
    parameters = inspect.signature(function).parameters
    texts = _explained(RunOptions) | _explained(function)
    for flag, name in flags.items():
        annotation, default = RunOptions.__annotations__.get(name, ""), None
        if name in parameters:
            annotation, default = parameters[name].annotation, parameters[name].default
        kinds: tuple[type, ...] = (int, float)
        of = next((each for each in kinds if each.__name__ in str(annotation)), str)
        kind: dict[str, Any] = {"metavar": flag.upper(), "type": of}
        if isinstance(default, bool):
            kind = {"action": "store_const", "const": not default}
        text = f"without this: {texts[name]}" if default is True else texts[name]
        text += f" At least {LEAST[name]}." if name in LEAST else ""
        shown = "" if isinstance(default, bool | None) else f" (default: {default})"
        group.add_argument(
            f"--{flag}", dest=name, default=argparse.SUPPRESS, help=f"{text}{shown}", **kind
        )


def _explained(function: object) -> dict[str, str]:
    """Explanation of each argument, from a docstring."""
    text = re.sub(r":\w+:`~?(.*?)`|`", r"\1", inspect.getdoc(function) or "").replace("%", "%%")
    entries = re.findall(r"^    (\w+): ((?:.|\n {8})*)", text, re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in entries}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m pyrohmm.language",
        usage=f"%(prog)s {{{','.join(SUBCOMMANDS)}}} ..., as %(prog)s --help has it",
        description=(__doc__ or "").replace("\n::\n", "").replace("``", ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    several: dict[str, Any] = {"nargs": "+", "default": []}
    parser.add_argument("train", nargs="*", metavar="TRAIN", default=[], help="text to train on")
    add = parser.add_argument_group("what to do").add_argument
    add("--save", metavar="DIR", help="where the trained model goes")
    add("--load", metavar="DIR", help="a model that was saved; with text files, to train it on")
    add("--distil", metavar="MODEL", help="a model of transformers that an HMM is to imitate")
    add("--valid", metavar="FILE", **several, help="held-out text, instead of lines of TRAIN")
    add("--score", metavar="FILE", **several, help="text whose perplexity is wanted")
    add("--lines", metavar="FILE", **several, help="text for log-probabilities (nats) by sentence")
    add("--generate", type=int, default=0, metavar="N", help="write N sentences")
    add("--prompt", default="", metavar="TEXT", help="words with which each of them begins")
    add("--must", metavar="PHRASE", **several, help="words or quoted phrases in each of them")
    add("--must-not", metavar="PHRASE", **several, help="words or quoted phrases in none of them")
    add("--longest", type=int, default=100, help="words after which they are cut off (100)")
    add("--hold-out", type=float, default=0.05, help="share of lines, without --valid (0.05)")
    add("--seed", type=int, help="of random numbers: in training 0, of sentences any by default")
    devices = ["cpu", "cuda"][: 1 + torch.cuda.is_available()]
    add("--device", choices=devices, default=devices[-1], help="where to compute")
    new = parser.add_argument_group("the model")
    _add(new, LanguageModel.from_data, OF_CLUSTERS)
    _add(new, LanguageModel, OF_MODEL)
    _add(new, count_words, OF_WORDS)
    _add(new, distil, {"texts": "num_texts"})
    _add(parser.add_argument_group("training"), LanguageModel.fit, OF_FIT)
    return parser
