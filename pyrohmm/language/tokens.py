"""Constraints on the tokens of a tokenizer: from those on words, and from regular expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..data.vocabulary import Vocabulary
from ..ops.automata import Automaton, determinised

IN_WORDS = bytes(b for b in range(256) if b >= 128 or chr(b).isalnum() or b in b"_'")
BETWEEN, OTHER = 0, 1  # places in the text: between words, and in a word that none begins with
# what ``re`` itself compiles
_parser: Any = re._parser  # type: ignore[attr-defined]
_compiler: Any = re._compiler  # type: ignore[attr-defined]
ASCII = frozenset(range(128))
_LATER = frozenset(range(0x80, 0xC0))  # bytes of a character in UTF-8 after the first one
_WIDE = [(range(0xC2, 0xE0), 1), (range(0xE0, 0xF0), 2), (range(0xF0, 0xF5), 3)]


def token_texts(tokenizer: Any) -> list[bytes | None]:
    """Bytes of each token of a tokenizer, with the space before a word; None for special ones.

    Args:
        tokenizer: Of ``transformers`` or ``tokenizers`` (byte-level, SentencePiece or WordPiece); a
            :class:`Vocabulary`, whose words are separated by spaces; or the text of each token,
            None if it is special.

    Example:
        >>> token_texts(["a", " cat", None])
        [b'a', b' cat', None]
    """
    if isinstance(tokenizer, str):
        raise TypeError(
            f"tokenizer must be AutoTokenizer.from_pretrained(name); got {tokenizer!r}."
        )
    if isinstance(tokenizer, Vocabulary):
        tokenizer = [None if word[:1] == "<" else f" {word}" for word in tokenizer]
    if not hasattr(tokenizer, "get_vocab"):
        return [text.encode() if isinstance(text, str) else text for text in tokenizer]
    codes = tokenizer.get_vocab()
    special = {*getattr(tokenizer, "all_special_ids", ())}
    decoder: dict[int, Any] = getattr(tokenizer, "get_added_tokens_decoder", dict)()
    special |= {code for code, token in decoder.items() if token.special}
    texts: list[bytes | None] = [None] * (max(codes.values()) + 1)
    joined = "".join(codes)
    bytes_of = _bytes_of_characters()
    for token, code in codes.items():
        if code in special:
            continue
        if "Ġ" in joined:  # the space, of byte-level tokens
            texts[code] = b"".join(bytes_of.get(letter, letter.encode()) for letter in token)
        elif re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            texts[code] = bytes([int(token[3:5], 16)])
        elif "##" in joined and "▁" not in joined:
            texts[code] = (token[2:] if token.startswith("##") else f" {token}").encode()
        else:
            texts[code] = token.replace("▁", " ").encode()
    return texts


def _bytes_of_characters() -> dict[str, bytes]:
    """The byte for which each character of a byte-level token stands (GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = [*map(chr, plain), *(chr(256 + number) for number in range(len(others)))]
    return dict(zip(letters, (bytes([byte]) for byte in [*plain, *others])))


def over_tokens(constraint: Automaton, tokenizer: Any, ignore_case: bool = False) -> Automaton:
    """Convert a constraint on words to one on tokens, however these divide the words.

    A word is a run of letters, digits, ``_``, ``'`` and characters that are not ASCII. Special
    tokens are excluded. What comes back has the codes of tokens and combines with others of these.

    Args:
        constraint: Over words.
        tokenizer: As for :func:`token_texts`.
        ignore_case: Whether A to Z in the text count as small letters.

    Raises:
        ValueError: If what ``constraint`` names is a code, or not one word.

    Example:
        >>> wanted = over_tokens(automata.must_contain("cat"), ["c", "at", " ", "s", None])
        >>> wanted.accepts([0, 1, 2, 3]), wanted.accepts([0, 1, 3])  # "cat s", "cats"
        (True, False)
    """
    texts = token_texts(tokenizer)
    words = {symbol: str(symbol).encode() for symbol in constraint.classes}
    for symbol, word in words.items():
        if isinstance(symbol, int) or not word or word.translate(None, IN_WORDS):
            raise ValueError(
                "constraint must be over words, which are letters, digits, _ and '; got "
                f"{symbol!r}. Codes of tokens combine with what over_tokens returns."
            )
    places, ends = _places(words, ignore_case)
    table = constraint.table
    classes = [constraint.classes.get(ends.get(place, ""), 0) for place in range(len(places))]
    ended = table[:, classes]
    ended[:, BETWEEN] = torch.arange(len(table))  # (Q, places), after the word at the place
    count = len(places)
    nexts = places.clamp(min=0) + count * torch.arange(len(table)).view(-1, 1, 1)
    after = torch.where(places < 0, count * ended.unsqueeze(-1), nexts).flatten(0, 1)
    accepting = constraint.accepting[ended].flatten()
    each = {byte: byte for byte in range(256)}
    return bytes_to_tokens(constraint._alike(after, each, accepting, constraint.name), texts)


def _places(
    words: dict[str | int, bytes], ignore_case: bool
) -> tuple[Tensor, dict[int, str | int]]:
    """Trie of words: next node by byte ``(nodes, 256)``, -1 after a word, and words by node."""
    prefixes = {b"": BETWEEN}
    for word in words.values():
        for end in range(1, len(word) + 1):
            prefixes.setdefault(word[:end], len(prefixes) + 1)
    table = torch.full((len(prefixes) + 1, 256), -1)
    table[:, list(IN_WORDS)] = OTHER
    for prefix, place in prefixes.items():
        if prefix:
            table[prefixes[prefix[:-1]], prefix[-1]] = place
    if ignore_case:
        table[:, ord("A") : ord("Z") + 1] = table[:, ord("a") : ord("z") + 1]
    return table, {prefixes[word]: symbol for symbol, word in words.items()}


def bytes_to_tokens(of_bytes: Automaton, texts: list[bytes | None]) -> Automaton:
    """Convert an automaton over bytes to one over tokens; special tokens end in a dead state."""
    table = of_bytes.table
    dead = len(table)
    kind = bytes(of_bytes.classes.get(byte, 0) for byte in range(256))
    again = [c for c in range(table.size(1)) if table[table[:, c], c].equal(table[:, c])]
    repeated = re.compile(b"(" + b"|".join(b"\\x%02x" % c for c in again) + b")\\1+")
    columns, places, classes = [torch.full((dead + 1,), dead)], {}, {}
    for code, text in enumerate(texts):
        if text is None:
            continue
        key = repeated.sub(rb"\1", text.translate(kind))  # which leads to the same states
        if key not in places:
            places[key] = len(columns)
            state = torch.arange(dead)
            for each in key:
                state = table[state, each]
            columns.append(pad(state, (0, 1), value=dead))
        classes[code] = places[key]
    accepting = pad(of_bytes.accepting, (0, 1))
    return of_bytes._alike(torch.stack(columns, 1), classes, accepting, of_bytes.name)


# Regular expressions -----------------------------------------------------------------------------


def matching(pattern: str, tokenizer: Any) -> Automaton:
    r"""Automaton of the texts that match a regular expression from first to last character.

    However the tokens divide them. What comes back has the codes of tokens, and combines by ``&``
    and ``|`` with what :func:`over_tokens` returns. ``\d``, ``\s`` and ``\w`` are of ASCII.

    Args:
        pattern: In the syntax of :mod:`re`, without references, anchors, and looking ahead or back.
        tokenizer: As for :func:`token_texts`.

    Raises:
        re.error: If it is no regular expression.
        ValueError: If it has a part that is left out here.

    Example:
        >>> times = matching(r"\d\d?:\d\d (am|pm)", ["1", "0", ":", " ", "am", "pm", "0:", None])
        >>> times.accepts([0, 6, 1, 1, 3, 4]), times.accepts([0, 1, 2, 1, 3, 4])
        (True, False)
    """
    machine, tree = _Machine(), _parser.parse(pattern)
    if tree.state.flags & ~(re.UNICODE | re.ASCII | re.VERBOSE):
        text = f"pattern must be without flags such as (?i); got {pattern!r}"
        raise ValueError(f"{text}. Write classes such as [aA].")
    last = machine.add(tree, 0)
    name = f"matching({pattern!r})"
    return bytes_to_tokens(determinised(machine.edges, last, name), token_texts(tokenizer))


class _Machine:
    """Nondeterministic automaton: nodes with edges ``(bytes, next)``, epsilon if bytes are None."""

    def __init__(self) -> None:
        self.edges: list[list[tuple[frozenset[int] | None, int]]] = [[]]

    def step(self, node: int, of_bytes: Iterable[int] | None, to: int | None = None) -> int:
        """Add an edge from ``node`` to ``to``, by default a new node; returns that."""
        if to is None:
            self.edges.append([])
            to = len(self.edges) - 1
        self.edges[node].append((None if of_bytes is None else frozenset(of_bytes), to))
        return to

    def add(self, items: Any, node: int) -> int:
        """Append the NFA fragment of ``items`` at ``node``; returns its end node."""
        for kind, value in items:
            node = self._add(str(kind), value, node)
        return node

    def _add(self, kind: str, value: Any, node: int) -> int:
        if kind == "LITERAL":
            for byte in chr(value).encode():
                node = self.step(node, [byte])
            return node
        if kind in ("ANY", "NOT_LITERAL", "IN"):
            return self._character(*_characters(kind, value), node)
        if kind == "SUBPATTERN" and not value[1] and not value[2]:  # without flags
            return self.add(value[3], node)
        if kind == "BRANCH":
            return self._joined(self.add(each, self.step(node, None)) for each in value[1])
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            low, high, inner = value
            return self._repeated(low, high, inner, node)
        raise ValueError(
            "pattern must be of characters, classes, groups, alternatives and repetitions; got "
            f"{kind.lower().replace('_', ' ')}. A pattern is matched as a whole, without anchors."
        )

    def _character(self, narrow: frozenset[int], wide: list[str] | None, node: int) -> int:
        """Append one character: of ``narrow`` or ``wide``, any non-ASCII one if that is None."""
        after = self.step(node, narrow)
        for character in wide or ():
            self.step(self._add("LITERAL", ord(character), node), None, after)
        for first, count in _WIDE if wide is None else ():
            inner = self.step(node, first)
            for _ in range(count):
                inner = self.step(inner, _LATER)
            self.step(inner, None, after)
        return after

    def _joined(self, ends: Iterable[int]) -> int:
        """Join NFA branches by epsilon edges; returns the common end."""
        after: int | None = None
        for end in ends:
            after = self.step(end, None, after)
        assert after is not None
        return after

    def _repeated(self, low: int, high: Any, items: Any, node: int) -> int:
        for _ in range(low):
            node = self.add(items, node)
        if high is _parser.MAXREPEAT:
            node = self.step(node, None)
            self.step(self.add(items, node), None, node)
            return self.step(node, None)
        ends = [node]
        for _ in range(int(high) - low):
            ends.append(self.add(items, ends[-1]))
        return self._joined(ends)


def _characters(kind: str, value: Any) -> tuple[frozenset[int], list[str] | None]:
    """ASCII and non-ASCII characters of a class; None for all non-ASCII ones."""
    state = _parser.State()
    state.flags = re.ASCII
    item = getattr(_parser, kind), value
    one = _compiler.compile(_parser.SubPattern(state, [item]))
    narrow = frozenset(code for code in ASCII if one.match(chr(code)))
    parts = value if kind == "IN" else [item]
    wide = [chr(c) for part, c in parts if str(part).endswith("LITERAL") and c not in ASCII]
    other = next(letter for letter in map(chr, range(0x10FFFF, 0, -1)) if letter not in wide)
    for part, inner in parts:
        if str(part) == "RANGE" and inner[1] not in ASCII:
            text = "pattern must have ranges of ASCII characters only"
            raise ValueError(f"{text}; got range {inner}. List other characters.")
    if not one.match(other):  # which stands for all that are not named
        return narrow, [letter for letter in wide if one.match(letter)]
    if excluded := "".join(letter for letter in wide if not one.match(letter)):
        text = f"pattern must exclude ASCII characters only, as [^a-z]; got {excluded!r}"
        raise ValueError(f"{text}. List what is allowed.")
    return narrow, None
