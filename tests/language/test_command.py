"""The language model and its command: scores, sentences, files, data-parallel ranks."""

import errno
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pyro
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pyrohmm import LanguageModel, blocks, load_hmm
from pyrohmm.data.vocabulary import Vocabulary
from pyrohmm.io import files as checkpoints
from pyrohmm.io.files import read_tensors
from pyrohmm.language import command
from pyrohmm.language.command import main


def full(monkeypatch, *names):
    """No file of these names can be written."""
    replace = os.replace

    def fail(source, target):
        if {*names} & {*Path(target).parts}:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)


@pytest.mark.parametrize("place", ["work", "tmp"])
def test_a_model_that_cannot_be_saved_is_saved_elsewhere(here, monkeypatch, place):
    """Beside the checkpoint; or among temporary files, where that disk is full, too."""
    for name in ("work", "tmp"):
        Path(name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(here / "tmp"))
    monkeypatch.setattr(checkpoints, "SECONDS", 1e9)
    arguments = ["train.txt", *SMALL, "--epochs", "1", "--save", "m", "--checkpoint", "work/c"]
    main(arguments)
    full(monkeypatch, "m", *({"work"} - {place}))
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    found = re.search(
        r"not saved to m \(.*No space.*m/tensors.*\), but to (\S+)", stopped.value.code
    )
    assert Path(found[1]).resolve().is_relative_to(here / place)
    assert LanguageModel.load(found[1]).perplexity(text(20, 1)).value < 20


ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--states", "12", "--clusters", "4", "--dim", "8", "--tokens", "40", "--epochs", "2",
         "--rate", "0.02"]  # fmt: skip


def text(count, seed=0):
    """Lines of a small grammar."""
    generator = torch.Generator().manual_seed(seed)
    parts = [["the", "a"], ["cat", "dog", "owl"], ["sees", "hears"], ["the", "a"], ["cat", "dog"]]

    def line():
        length = 2 + 3 * int(torch.randint(2, (), generator=generator))
        return " ".join(
            each[int(torch.randint(len(each), (), generator=generator))] for each in parts[:length]
        )

    return [line() for _ in range(count)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with texts, where the command runs."""
    monkeypatch.chdir(tmp_path)
    Path("train.txt").write_text("\n".join(text(60)))
    Path("valid.txt").write_text("\n".join(text(20, 1)))
    Path("test.txt").write_text("\n".join([*text(10, 2), "", "a cat hears pyrohmm"]))
    return tmp_path


def tiny(**options):
    """A model of random parameters: three words and the end, in blocks of 2, 3 and 1 states."""
    pyro.set_rng_seed(0)
    vocabulary = Vocabulary(["<unk>", "<eos>", "a", "b"], "<unk>")
    sizes = torch.tensor([2, 3, 1])
    each = blocks.from_clusters(torch.tensor([0, 2, 1, 0]), sizes)
    model = LanguageModel(vocabulary, each, 4, **options)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.add_(torch.randn_like(parameter) / 4).mul_(0.7)
        if model.module.two_level:  # so that the next word depends on the state
            model.module.block_score.weight.mul_(3.0)
    return model


# The command --------------------------------------------------------------------------------------


def test_text_becomes_a_model_that_scores_and_writes(here, capsys):
    main(["train.txt", "--valid", "valid.txt", "--save", "m", *SMALL])
    shown = capsys.readouterr().out
    model = LanguageModel.load("m")
    held = model.perplexity(text(20, 1))
    assert f"held out: {held}, <eos> included" in shown
    assert held.value < 6 < len(model.vocabulary)
    validated = [float(each) for each in re.findall(r"held-out perplexity (\S+),", shown)]
    assert len(validated) == 2
    assert min(validated) == pytest.approx(held.value, abs=0.005)
    assert "<unk> does not occur" in shown

    main(["--load", "m", "--score", "test.txt", "valid.txt", "--generate", "5", "--seed", "0"])
    shown = capsys.readouterr().out.splitlines()
    lines = [line for line in Path("test.txt").read_text().split("\n") if line]  # no sentence
    assert shown[0] == f"test.txt: {model.perplexity(lines)}, <eos> included; 1 unknown words"
    assert shown[-6].startswith(f"valid.txt: {held}")
    assert shown[-5:] == model.generate(5, torch.Generator().manual_seed(0))


def test_a_training_that_was_stopped_ends_with_the_same_bits(here, monkeypatch, capsys):
    arguments = ["train.txt", *SMALL, "--epochs", "4", "--checkpoint", "c"]
    main([*arguments, "--checkpoint", "d", "--save", "whole"])
    monkeypatch.setattr(checkpoints, "SECONDS", 0.0)
    steps = []

    class Stopping:
        @staticmethod
        def write(line):
            steps.append(int(re.match(r"step (\d+)", line).group(1)))
            if len(steps) == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(command, "tqdm", Stopping)
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--save", "parts"])
    assert stopped.value.code == 130
    shown = capsys.readouterr()
    assert "the model as it is now was saved to parts" in shown.err
    assert LanguageModel.load("parts").perplexity(text(20, 1)).value < 9
    main([*arguments, "--save", "parts"])
    assert "going on from checkpoint c" in capsys.readouterr().out
    assert len(steps) in (5, 6)  # saves take a share of the time: the first one may lack, too
    files = [Path(each, "tensors.safetensors").read_bytes() for each in ("whole", "parts")]
    assert files[0] == files[1]


def test_a_model_is_not_replaced_unasked(here, capsys):
    """But by one that goes on from it, or from the checkpoint of the same training."""
    tiny().save("m")
    before = Path("m", "tensors.safetensors").read_bytes()
    arguments = ["train.txt", *SMALL, "--epochs", "1", "--save", "m"]
    with pytest.raises(SystemExit, match=r"--save m holds a model already\. Name another"):
        main(arguments)
    assert Path("m", "tensors.safetensors").read_bytes() == before
    assert capsys.readouterr().out == ""
    main(["train.txt", "--load", "m/../m", "--epochs", "1", "--save", "m"])
    after = Path("m", "tensors.safetensors").read_bytes()
    assert after != before
    Path("other").mkdir()
    main(["train.txt", *SMALL, "--epochs", "1", "--save", "other", "--checkpoint", "c"])
    main(["train.txt", *SMALL, "--epochs", "2", "--save", "other", "--checkpoint", "c"])


def test_a_checkpoint_that_cannot_be_written_does_not_lose_the_model(here, monkeypatch, capsys):
    full(monkeypatch, "c")
    monkeypatch.setattr(checkpoints, "SECONDS", 0.0)
    with pytest.warns(RuntimeWarning, match="goes on"), pytest.raises(SystemExit) as stopped:
        main(["train.txt", *SMALL, "--save", "m", "--checkpoint", "c"])
    assert stopped.value.code == 1
    assert re.search(r"No space left.*c'.*now was saved to m", capsys.readouterr().err)
    LanguageModel.load("m")


def test_sigterm_saves_the_model(here):
    process = subprocess.Popen(
        [sys.executable, "-m", "pyrohmm.language", "train.txt", *SMALL, "--epochs", "100000",
         "--save", "m", "--device", "cpu"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while "step" not in (line := process.stdout.readline()):
        assert line
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=200)[1]
    assert process.returncode == 130
    assert "interrupted; the model as it is now was saved to m" in errors
    LanguageModel.load("m")


@pytest.mark.parametrize("contiguous", [False, True])
def test_surprisals_are_differences_of_scores(contiguous):
    model = tiny(contiguous=contiguous)
    lines = ["a b", "b", "a a b", ""]
    found = model.surprisal(lines)
    torch.testing.assert_close(
        torch.stack([-each.sum() for each in found]), model.score(lines), rtol=1e-6, atol=1e-8
    )
    assert [len(each) for each in found] == [3, 2, 4, 1]
    first = model.module.eval()(torch.tensor([1]))
    code = model.vocabulary.encode(["a"]).reshape(1, 1)
    assert found[0][0].item() == pytest.approx(-first.log_prob(code).item(), rel=1e-6)


def test_a_prompt_conditions_what_follows():
    """Frequencies of the sentences after it are those of scores, normalised."""
    model, count = tiny(), 4000
    drawn = model.generate(count, torch.Generator().manual_seed(0), 2, "a b")
    assert all(line.startswith("a b") for line in drawn)
    begin = torch.tensor([[2, 3]])
    with torch.no_grad():
        start = model.module.eval()(torch.tensor([2])).log_prob(begin)
    for line in ("a b", "a b a", "a b b"):
        prob = (model.score([line]) - start).exp().item()
        error = (prob * (1 - prob) / count) ** 0.5
        assert drawn.count(line) / count == pytest.approx(prob, abs=4.5 * error)
    with pytest.raises(ValueError, match="must not have <eos>"):
        model.generate(1, prompt="a <eos>")


def test_subcommands_stand_for_options(here, capsys):
    """With a line for each sentence that is scored; a text file may have such a name."""
    model, lines = tiny(), ["a b", "b", "a a"]
    model.save("m")
    Path("text").write_text("\n".join([*lines, ""]))
    main(["score", "m", "text"])
    rows = [row.split("\t") for row in capsys.readouterr().out.splitlines()]
    assert [row[1] for row in rows] == lines
    assert [float(row[0]) for row in rows] == pytest.approx(model.score(lines).tolist(), abs=1e-4)
    shown = []
    for start in (["generate", "m", "3"], ["--load", "m", "--generate", "3"]):
        main([*start, "--seed", "0"])
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    main(["train", "train.txt", "--save", "new", *SMALL])
    os.replace("text", "score")
    main(["score", "valid.txt", "--save", "other", *SMALL])
    assert LanguageModel.load("other").num_unknown(lines) == 0
    for arguments, wanted in {
        ("perplexity", "m", "text"): "perplexity is no file, and",
        ("distil", "gpt2"): "distil needs --save DIR, where the HMM goes, and --states K",
    }.items():
        with pytest.raises(SystemExit):
            main(arguments)
        assert wanted in capsys.readouterr().err


DISTIL = "distil gpt --states 4 --save h"


@pytest.mark.parametrize(("line", "wanted"), {
    "train --save m": "train needs text files, and --save DIR; got no name",
    "score": "score needs the directory of a model, and text files; got no name",
    "score m": "and text files; got m",
    "generate": "generate needs the directory of a model, and how many sentences; got no name",
    "generate m 5 6": "how many sentences; got m 5 6",
    "generate m -1": "--generate must be at least 1; got -1",
    "score m valid.txt --load n": "score stands for --load, which must not be given",
    "distil": "distil needs a model of transformers, --states K, and --save DIR for the HMM; got",
    f"{DISTIL} train.txt": "and --save DIR for the HMM; got gpt train.txt",
    "train.txt --distil gpt --states 4 --save h": "a text file to train on has no use here, but",
    f"{DISTIL} --score valid.txt": "--score has no use here, but with train or load",
    f"{DISTIL} --rate 0.3": "--rate has no use here, but with train",
    f"{DISTIL} --generate 3": "--generate has no use here, but with train or load",
    f"{DISTIL} --dim 3": "--dim has no use here, but with training a new model",
    f"{DISTIL} --texts 10": "--texts must be at least 32; got 10",
    "distil gpt --states 0 --save h": "--states must be at least 1; got 0",
    "score m valid.txt --save n": "--save has no use here, but with distil or train",
    "score m valid.txt --prompt a": "--prompt has no use here, but with generate",
    "generate m 2 --states 3": "--states has no use here, but with distil or training a new model",
    "train train.txt --save n --load m --dim 3": "--dim has no use here, but with training a",
    "train train.txt --save n --texts 50": "--texts has no use here, but with distil",
    "train train.txt --save n --epochs 0": "--epochs must be at least 1; got 0",
}.items())  # fmt: skip
def test_what_has_no_use_or_lacks_is_refused_before_a_model_is_loaded(here, capsys, line, wanted):
    """There is neither ``gpt`` nor ``m``."""
    with pytest.raises(SystemExit):
        main(line.split())
    shown = capsys.readouterr().err
    assert wanted in shown
    assert len(shown.splitlines()) <= 3
    assert sorted(map(str, Path().iterdir())) == ["test.txt", "train.txt", "valid.txt"]


@pytest.mark.parametrize(("verb", "options", "others"), [
    ("train", "--save --clusters --epochs --must", "--texts --distil"),
    ("distil", "--save --states --texts", "--clusters --must --valid"),
    ("score", "--device", "--states --prompt"),
    ("generate", "--prompt --must --seed", "--epochs --states"),
])  # fmt: skip
def test_help_of_a_subcommand_has_its_options_alone(capsys, verb, options, others):
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    shown = set(re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE))
    assert set(options.split()) <= shown
    assert not set(others.split()) & shown


def test_standard_output_has_sentences_alone(here):
    """Of the command; what there is to say of the model and of the prompt are lines of stderr."""
    tiny().save("m")
    done = subprocess.run(
        [sys.executable, "-m", "pyrohmm.language", "generate", "m", "3", "--prompt", "unheard"],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert len(done.stdout.splitlines()) == 3
    assert re.fullmatch(r"LanguageModel\(.*\)\nwarning: .*<unk>.*\n", done.stderr)


def test_options_may_stand_before_names(here, capsys):
    tiny().save("m")
    shown = []
    for line in ("score m valid.txt --device cpu", "score --device cpu m valid.txt",
                 "score m --device cpu valid.txt"):  # fmt: skip
        main(line.split())
        shown.append(capsys.readouterr().out)
    assert len(shown[0].splitlines()) == 20
    assert shown[0] == shown[1] == shown[2]


def test_a_transformer_is_distilled(here, capsys):
    """From the files of a tiny one, by the name of their directory."""
    words = {"<s>": 0, "</s>": 1, "a": 2, "b": 3}
    tokens = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "a")), bos_token="<s>", eos_token="</s>"
    )
    tokens.save_pretrained("gpt")
    config = transformers.GPT2Config(vocab_size=4, n_embd=8, n_layer=1, n_head=2, n_positions=40)
    transformers.GPT2LMHeadModel(config).save_pretrained("gpt")
    main(["distil", "--states", "3", "gpt", "--texts", "50", "--epochs", "2", "--save", "hmm"])
    shown = capsys.readouterr().out
    assert "saved to hmm\nheld out: perplexity" in shown
    assert load_hmm("hmm").emission.probs.shape == (3, 4)
    tiny().save("m")
    before = Path("m", "tensors.safetensors").read_bytes()
    for name in ("m", "hmm"):
        with pytest.raises(SystemExit, match=f"--save {name} holds a model already.*remove it.$"):
            main(["distil", "no such model", "--states", "3", "--save", name])
    assert Path("m", "tensors.safetensors").read_bytes() == before


def test_sentences_contain_what_they_must(here, capsys):
    tiny().save("m")
    options = ["--must", "a", "b b", "--must-not", "a b", "<unk>", "--longest", "5"]
    main(["--load", "m", "--generate", "30", "--prompt", "b", *options])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 30
    for line in lines:
        words = f" {line} "
        assert words.startswith(" b ")
        assert " a " in words
        assert " b b " in words
        assert " a b " not in words
        assert " <unk> " not in words
        assert len(line.split()) <= 6  # of which the prompt is one
    with pytest.raises(SystemExit, match="'sea' is none of its 4"):
        main(["--load", "m", "--generate", "2", "--must", "sea"])


SCRIPT = """
import sys, torch
from pyrohmm.language.command import main
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
main(sys.argv[1:])
"""


def test_two_processes_train_what_one_trains(here, capsys):
    command = ["train.txt", "--valid", "valid.txt", *SMALL, "--score", "test.txt", "--save"]
    main([*command, "one"])
    one = capsys.readouterr().out
    Path("script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "script.py", *command, "two"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo",
             "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "processes: 2" in done.stdout
    perplexities = [re.findall(r"perplexity ([\d.]+)", shown) for shown in (one, done.stdout)]
    assert len(perplexities[0]) == 4
    assert perplexities[0] == perplexities[1]
    (first, meta), (second, other) = (
        read_tensors(Path(each, "tensors.safetensors")) for each in ("one", "two")
    )
    assert meta == other
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        if name != "module.num_drawn":  # several processes build it more often
            torch.testing.assert_close(tensor, second[name], msg=name)


# Its parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("two_level", [False, True])
def test_sentences_are_sampled_from_the_distribution_that_scores_them(two_level):
    """How often each of the short sentences occurs, within 4.5 standard deviations."""
    model, count = tiny(two_level=two_level), 20_000
    drawn = model.generate(count, torch.Generator().manual_seed(0), max_words=3)
    words = ["a", "b", "<unk>"]
    short = [" ".join(w) for n in (0, 1, 2) for w in itertools.product(words, repeat=n)]
    probs = model.score(short).exp()
    frequencies = torch.tensor([drawn.count(line) / count for line in short])
    deviations = (frequencies - probs) / (probs * (1 - probs) / count).sqrt()
    assert len(short) == 13
    assert probs.min() * count > 10
    assert deviations.abs().max() < 4.5
    ended = probs.sum().item()  # the others have three words, and may have been cut off
    longer = sum(len(line.split()) == 3 for line in drawn) / count
    assert longer == pytest.approx(1 - ended, abs=4.5 * math.sqrt(ended * (1 - ended) / count))
