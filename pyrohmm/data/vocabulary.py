"""``Vocabulary``: symbols and their codes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from .._checks import check_integers, check_range, check_size

Classes = Callable[[str], Sequence[str]]  # what may stand for a symbol, the first choice first
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ENDINGS = (  # of English words, the longer of two first
    "ing ness ment able ible tion sion ation ology less ship ism ist ity ous ful ive ish est ary "
    "ic al ly ed er or an en us es ss 's s y"
).split()
CLASS_COUNT = 10  # how many steps a symbol must stand for, for the vocabulary to list it


class Vocabulary(tuple[str, ...]):
    """An ordered list of distinct symbols; a symbol's code is its place.

    Args:
        symbols: The V symbols, in order.
        unknown: The one of them that stands for every symbol not listed. Or a function, such as
            :func:`word_classes`, that returns those which may stand for a symbol: the first of them
            that is listed does. Where nothing does, a symbol that is not listed is an error.

    Raises:
        ValueError: If there is no symbol, one occurs twice, or ``unknown`` is not among them.

    Example:
        >>> words = Vocabulary(["<unk>", "the", "die"], unknown="<unk>")
        >>> words.encode(["the", "loaded", "die"])
        tensor([1, 0, 2])
        >>> words.decode(torch.tensor([1, 0, 2]))
        ['the', '<unk>', 'die']
    """

    unknown: str | Classes | None
    _codes: dict[str, int]

    def __new__(cls, symbols: Iterable[str], unknown: str | Classes | None = None) -> Vocabulary:
        """Number the symbols."""
        self = super().__new__(cls, symbols)
        self.unknown = unknown
        self._codes = {symbol: code for code, symbol in enumerate(self)}
        if not self:
            raise ValueError("symbols is empty; wanted at least one. Give those of the data.")
        if len(self._codes) < len(self):
            twice = Counter(self).most_common(1)[0][0]
            text = f"symbols must be distinct; {twice!r} occurs more than once"
            raise ValueError(f"{text}. Pass each once, by dict.fromkeys(symbols).")
        if not (unknown is None or callable(unknown) or unknown in self):
            raise ValueError(
                f"unknown must be one of the symbols, or a function; got {unknown!r}. Add it to "
                "symbols."
            )
        return self

    @classmethod
    def from_counts(
        cls,
        symbols: Iterable[str],
        min_count: int = 1,
        max_size: int | None = None,
        unknown: str | Classes | None = None,
    ) -> Vocabulary:
        """List symbols by falling count, those of equal count alphabetically.

        Args:
            symbols: The symbols as they occur, or a mapping from symbol to count.
            min_count: Symbols that occur less often are left out.
            max_size: Largest length of the list, ``unknown`` included; the rarest give way.
            unknown: Stands for every symbol not listed. It comes first, whether or not it occurs.
                If it is a function, there come first, by falling count, the symbols that stand for
                those left out. One that would stand for fewer than ``CLASS_COUNT`` gives way to the
                next that the function names, so that each has been seen often.

        Example:
            >>> list(Vocabulary.from_counts("abracadabra", min_count=2, unknown="?"))
            ['?', 'a', 'b', 'r']
            >>> text = ["to"] * 9 + "walking talking rises fjord Oslo".split() * 6
            >>> list(Vocabulary.from_counts(text, min_count=7, unknown=word_classes))
            ['<unk>', '<unk-ing>', 'to']
        """
        if max_size is not None:
            check_size("max_size", max_size)
        counts = Counter(symbols)
        kept = [s for s, count in counts.items() if count >= min_count and s != unknown]
        if others := {type(s).__name__ for s in counts if not isinstance(s, str)}:
            text = f"symbols must be texts; got {', '.join(sorted(others))} among them"
            raise TypeError(f"{text}. Leave out what is missing, and convert numbers by str.")
        kept.sort(key=lambda symbol: (-counts[symbol], symbol))
        if callable(unknown):
            if max_size is not None:
                text = f"max_size must be None where unknown is a function; got {max_size}"
                raise ValueError(f"{text}. Give min_count.")
            rare = {s: unknown(s) for s, count in counts.items() if count < min_count}
            return cls(_classes(rare, counts) + kept, unknown)
        first = [] if unknown is None else [unknown]
        return cls((first + kept)[:max_size], unknown)

    def encode(self, symbols: Iterable[str]) -> Tensor:
        """Codes of T symbols, ``(T,)`` long; a string is taken as its characters.

        Raises:
            ValueError: If a symbol is not listed and nothing stands for the unknown.
        """
        symbols = list(symbols)
        codes = [*map(self._codes.get, symbols)]
        if None in codes:
            codes = [*map(self._code, symbols)]
        if None in codes:
            text = f"symbol {symbols[codes.index(None)]!r} is none of the {len(self)} symbols"
            raise ValueError(f"{text} of the vocabulary. Build it with unknown=, for all others.")
        return torch.tensor(codes, dtype=torch.long)

    def _code(self, symbol: str) -> int | None:
        """Code of a symbol, or of the first known one that may replace it; None without one."""
        if symbol not in self._codes and self.unknown is not None:
            others = self.unknown(symbol) if callable(self.unknown) else (self.unknown,)
            symbol = next((other for other in others if other in self._codes), symbol)
        return self._codes.get(symbol)

    def decode(self, codes: Tensor | Sequence[int]) -> list[str]:
        """Symbols of ``codes``, ``(T,)`` integers; cut off the padding first.

        Raises:
            ValueError: If one is not between 0 and V - 1.
        """
        codes = torch.as_tensor(codes)
        check_integers("codes", codes if len(codes) else codes.long())
        check_range("codes", codes, len(self), "V - 1", "Cut off padding and unknown labels (-1).")
        return [self[code] for code in codes.tolist()]

    def __contains__(self, symbol: object) -> bool:
        return symbol in self._codes

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:5])) + (", ..." if len(self) > 5 else "")
        return f"Vocabulary({len(self)} symbols: {shown})"


def word_classes(word: str) -> list[str]:
    """Symbols that may replace an unknown word, the most informative first.

    They say what can be seen of a word by itself: its last letters, whether it begins with a
    capital or has no small letter, whether there are digits or hyphens in it.

    Example:
        >>> word_classes("Osloing"), word_classes("unblinkingly"), word_classes("24")
        (['<unk-Aa-ing>', '<unk-Aa>', '<unk>'], ['<unk-ly>', '<unk>'], ['<unk-9>', '<unk>'])
    """
    letters = any(each.isalpha() for each in word)
    if any(each.isdigit() for each in word):
        shapes = ["-9a", "-9"] if letters else ["-9"]
    elif not letters:
        shapes = ["-."]
    elif word == word.upper():
        shapes = ["-AA", "-Aa"]
    else:
        shape = "-Aa" if word[0].isupper() else ""
        shape += "-a-b" if "-" in word[1:-1] else ""
        ending = next((each for each in ENDINGS if word.lower().endswith(each)), None)
        shapes = [shape] if ending is None else [f"{shape}-{ending}", shape]
    return list(dict.fromkeys([*(f"<unk{each}>" for each in shapes), "<unk>"]))


def _classes(rare: dict[str, Sequence[str]], counts: Counter[str]) -> list[str]:
    """Classes that stand for rare symbols, by falling count."""
    used, rest = Counter[str](), dict(rare)
    while rest:
        totals = Counter[str]()
        for symbol, names in rest.items():
            totals[names[0]] += counts[symbol]
        last = {names[0] for names in rest.values() if len(names) == 1}
        stay = {n for n, total in totals.items() if total >= CLASS_COUNT or n in last or n in used}
        used.update({name: totals[name] for name in stay})
        rest = {s: names[1:] for s, names in rest.items() if names[0] not in stay}
    return sorted(used, key=lambda name: (-used[name], name))


Counting = Callable[[Iterable[str]], Vocabulary]  # makes a vocabulary of symbols as they occur
