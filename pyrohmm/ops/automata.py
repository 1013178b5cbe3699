r"""Finite automata over words: which sentences satisfy a constraint.

Q states, of which the first is the start. Of the words, those that an automaton names are in
classes, and all others in one, so that a table of next states has Q rows and few columns, whatever
the size of the vocabulary. Automata are made by the functions below and combined by ``&`` (both),
``|`` (one or both) and ``~`` (not); what comes out has the least number of states. The mark at the
end of a sentence is none of its words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import chain
from operator import and_, or_
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from .._checks import check_kind, check_size

Symbol = str | int
Phrase = str | int | Sequence[str | int]
Edge = tuple[Any, int]
ANY: Any = object()  # the words of an edge that any word takes


class Automaton:
    """A deterministic finite automaton over words.

    Args:
        default: For each of the Q states, the next one after a word that is no exception.
        exceptions: For each state, the next one after some words, by word or by code.
        accepting: The states in which a sentence may end.
        name: In errors and when it is printed.

    Attributes:
        table: ``(Q, C)`` integers, the next state after a word of each class. Class 0 has all words
            that are in no other.
        classes: The class of each word that is in another.
        accepting: ``(Q,)`` booleans, in which states a sentence may end.
        name: As above.

    Raises:
        TypeError: If a word is neither a string nor a code.
        ValueError: If there is no state, ``default`` and ``exceptions`` disagree in length, or a
            state is not one of 0 to Q - 1.

    Example:
        >>> pairs = Automaton([0, 1], [{"(": 1}, {")": 0}], [0], "closed brackets")
        >>> pairs
        Automaton(closed brackets; 2 states)
        >>> pairs.accepts("a ( rose ) is"), pairs.accepts("( a rose")
        (True, False)
    """

    def __init__(
        self,
        default: Sequence[int],
        exceptions: Sequence[Mapping[str | int, int]],
        accepting: Sequence[int],
        name: str = "a constraint",
    ) -> None:
        count, ends = len(default), list(accepting)
        if not count or len(exceptions) != count:
            raise ValueError(
                "default and exceptions must have an item for each state, of which there is at "
                f"least one; got {count} and {len(exceptions)}."
            )
        symbols = dict.fromkeys(chain.from_iterable(exceptions))
        _check_symbols("exceptions", symbols)
        rows = [
            [other, *(some.get(symbol, other) for symbol in symbols)]
            for other, some in zip(default, exceptions)
        ]
        reached = [*chain.from_iterable(rows), *ends]
        if not all(isinstance(state, int) and 0 <= state < count for state in reached):
            raise ValueError(
                "states in default, exceptions and accepting must lie between 0 and Q - 1 = "
                f"{count - 1}; got {sorted(set(reached), key=str)}. Count states from 0."
            )
        classes = {symbol: number for number, symbol in enumerate(symbols, 1)}
        self._set(rows, classes, [state in ends for state in range(count)], name)

    def __bool__(self) -> bool:
        raise TypeError("an Automaton is neither true nor false; join constraints by &, | and ~.")

    def _set(self, rows: Any, classes: dict[Symbol, int], ends: Any, name: str) -> Automaton:
        """Minimise an automaton, and set its tables (Moore 1956)."""
        table, accepting = torch.as_tensor(rows), torch.as_tensor(ends)
        reached, count = torch.arange(len(table)) == 0, 0
        while int(reached.sum()) > count:
            count = int(reached.sum())
            reached[table[reached].flatten()] = True
        table, accepting = (reached.cumsum(0) - 1)[table[reached]], accepting[reached]
        kind, count = accepting.long(), 0
        while int(kind.max()) + 1 > count:  # states that differ in what follows
            count = int(kind.max()) + 1
            parts = torch.cat([kind.unsqueeze(1), kind[table]], 1)
            kind = parts.unique(dim=0, return_inverse=True)[1]
        kind, first = _first_seen(kind)
        table, self.accepting = kind[table[first]], accepting[first]
        columns, first = _first_seen(table.unique(dim=1, return_inverse=True)[1])
        self.table, self.name = table[:, first], name
        of_symbol = {symbol: int(columns[place]) for symbol, place in classes.items()}
        self.classes = {symbol: place for symbol, place in of_symbol.items() if place}
        return self

    @property
    def num_states(self) -> int:
        """Q, the number of states."""
        return len(self.table)

    def accepts(self, sentence: str | Sequence[str | int]) -> bool:
        """Whether a sentence satisfies the constraint.

        Args:
            sentence: Words separated by white space, or a list of words or codes.
        """
        words = sentence.split() if isinstance(sentence, str) else sentence
        _check_symbols("sentence", words)
        state, table = 0, self.table.numpy()
        for word in words:
            state = table[state, self.classes.get(word, 0)]
        return bool(self.accepting[state])

    def __and__(self, other: Automaton) -> Automaton:
        """Intersection: sentences that satisfy both constraints."""
        return self._product(other, and_, "{} & {}")

    def __or__(self, other: Automaton) -> Automaton:
        """Union: sentences that satisfy at least one of the constraints."""
        return self._product(other, or_, "({} | {})")

    def __invert__(self) -> Automaton:
        """Complement: sentences that do not satisfy the constraint."""
        name = f"~({self.name})" if " & " in self.name else f"~{self.name}"
        return self._alike(self.table, self.classes, ~self.accepting, name)

    def _product(
        self, other: Automaton, both: Callable[[bool, bool], bool], form: str
    ) -> Automaton:
        """Product construction: reachable pairs of states, and whether each is accepting."""
        wanted = "an Automaton, as & and | combine two"
        check_kind("other", other, Automaton, wanted, "Make one, such as by must_contain.")
        columns = {(0, 0): 0}
        classes = {
            symbol: columns.setdefault(
                (self.classes.get(symbol, 0), other.classes.get(symbol, 0)), len(columns)
            )
            for symbol in self.classes | other.classes
        }
        mine, theirs = self.table.tolist(), other.table.tolist()
        pairs, rows = _explored(
            (0, 0), lambda pair: [(mine[pair[0]][i], theirs[pair[1]][j]) for i, j in columns]
        )
        ends = self.accepting.tolist(), other.accepting.tolist()
        accepting = [both(ends[0][i], ends[1][j]) for i, j in pairs]
        return self._alike(rows, classes, accepting, form.format(self.name, other.name))

    def _alike(self, *parts: Any) -> Automaton:
        return object.__new__(Automaton)._set(*parts)

    def _named(self, name: str) -> Automaton:
        self.name = name
        return self

    def __repr__(self) -> str:
        states = f"{self.num_states} state{'s' * (self.num_states != 1)}"
        return f"Automaton({self.name}; {states})"


def template(*items: str | int | EllipsisType | None) -> Automaton:
    """Sentences that match fixed words with gaps of one word, or of any number.

    Args:
        *items: Words, of which a string may have several; None for any one word; ``...`` for any
            number of words, or none.

    Raises:
        TypeError: If an item is something else.

    Example:
        >>> two = template("the", None, "sat", ...)
        >>> two.accepts("the cat sat on the mat"), two.accepts("the sat")
        (True, False)
        >>> template(...).accepts("whatever there is")
        True
    """
    edges: list[list[Edge]] = []
    for item in items:
        if item is Ellipsis:
            edges.append([(ANY, len(edges)), (None, len(edges) + 1)])
            continue
        words = [ANY] if item is None else [[word] for word in _words("items of a template", item)]
        edges += [[(word, number)] for number, word in enumerate(words, len(edges) + 1)]
    shown = ", ".join("..." if item is Ellipsis else repr(item) for item in items)
    return determinised([*edges, []], len(edges), f"template({shown})")


def determinised(edges: Sequence[Sequence[Edge]], last: int, name: str) -> Automaton:
    """Subset construction: a deterministic automaton over sets of nodes.

    Args:
        edges: Of each node, of which the first is the start: the words of an edge, ``ANY``, or None
            if it is taken without a word; and the node to which it leads.
        last: The node at which a sentence may end.
        name: As of :class:`Automaton`.
    """

    def closed(nodes: Iterable[int]) -> frozenset[int]:
        """Epsilon closure of nodes."""
        queue = [*nodes]
        for node in queue:  # which grows
            queue += [to for words, to in edges[node] if words is None and to not in queue]
        return frozenset(queue)

    listed = [words for some in edges for words, _ in some if words not in (None, ANY)]
    symbols = dict.fromkeys(chain.from_iterable(listed))

    def after(nodes: frozenset[int]) -> list[frozenset[int]]:
        leaving = [edge for node in nodes for edge in edges[node] if edge[0] is not None]
        return [
            closed(to for words, to in leaving if words is ANY or symbol in words)
            for symbol in (None, *symbols)  # None: any other
        ]

    found, rows = _explored(closed([0]), after)
    exceptions = [dict(zip(symbols, row[1:])) for row in rows]
    accepting = [number for number, nodes in enumerate(found) if last in nodes]
    return Automaton([row[0] for row in rows], exceptions, accepting, name)


def must_contain(*phrases: Phrase) -> Automaton:
    """Sentences in which each of some words or phrases occurs.

    Args:
        *phrases: A word, several separated by white space that follow each other, a code, or a list
            of words or codes. For one of several forms combine by ``|``.

    Raises:
        TypeError: If a phrase is something else.
        ValueError: If there is none, or one has no word.

    Example:
        >>> both = must_contain("a rose", "is") & (must_contain("red") | must_contain("white"))
        >>> both.accepts("a rose is red"), both.accepts("is a red rose")
        (True, False)
        >>> both
        Automaton(must_contain('a rose', 'is') & (must_contain('red') | must_contain('white')); \
12 states)
    """
    each = (template(..., *words, ...) for words in _phrases(phrases))
    return reduce(Automaton.__and__, each)._named(_called("must_contain", phrases))


def must_not_contain(*phrases: Phrase) -> Automaton:
    """Sentences in which none of some words or phrases occurs.

    Args:
        *phrases: As for :func:`must_contain`.

    Raises:
        TypeError, ValueError: As :func:`must_contain`.

    Example:
        >>> must_not_contain("daisy", "a rose").accepts("rose is a daisy")
        False
    """
    parts = _phrases(phrases)
    single = {words[0]: 1 for words in parts if len(words) == 1}
    found = Automaton([0, 1], [single, {}], [1])
    for words in parts:
        if len(words) > 1:
            found = found | template(..., *words, ...)
    return (~found)._named(_called("must_not_contain", phrases))


def starts_with(prefix: Phrase) -> Automaton:
    """Sentences that begin with some words.

    Args:
        prefix: As a phrase of :func:`must_contain`.

    Raises:
        TypeError, ValueError: As :func:`must_contain`.

    Example:
        >>> starts_with("a rose").accepts("a rose is a rose")
        True
    """
    return template(*_phrases([prefix], "prefix")[0], ...)._named(_called("starts_with", [prefix]))


def ends_with(suffix: Phrase) -> Automaton:
    """Sentences whose last words are these.

    Args:
        suffix: As a phrase of :func:`must_contain`.

    Raises:
        TypeError, ValueError: As :func:`must_contain`.

    Example:
        >>> ends_with("a rose").accepts("a rose is a rose")
        True
    """
    return template(..., *_phrases([suffix], "suffix")[0])._named(_called("ends_with", [suffix]))


def of_length(low: int, high: int | None = None) -> Automaton:
    """Sentences of a number of words, without their end.

    Args:
        low: The least number.
        high: The largest, at least ``low``; the same by default.

    Raises:
        ValueError: If ``high`` is less than ``low``, or a number is negative or no integer.

    Example:
        >>> of_length(2, 3).accepts("a rose"), of_length(3).accepts("a rose")
        (True, False)
    """
    check_size("low", low, 0)
    last = low if high is None else high
    if high is not None:
        check_size("high", high, low)
    steps = [*range(1, last + 2), last + 1]
    name = f"of_length({low})" if high is None else f"of_length({low}, {high})"
    return Automaton(steps, [{}] * len(steps), range(low, last + 1), name)


def _phrases(phrases: Iterable[Phrase], name: str = "phrases") -> list[list[Symbol]]:
    parts = [_words(name, phrase) for phrase in phrases]
    if not parts or not all(parts):
        text = f"{name} must be at least one, each of at least one word; got {list(phrases)!r}"
        raise ValueError(f"{text}. Give a word, or a list of words.")
    return parts


def _words(name: str, phrase: Any) -> list[Symbol]:
    """Words or codes of a phrase."""
    words = [phrase] if isinstance(phrase, str | int) else phrase
    check_kind(name, words, list | tuple, "words, codes or lists of these")
    _check_symbols(name, words)
    return [each for word in words for each in (word.split() if isinstance(word, str) else [word])]


def _check_symbols(name: str, symbols: Iterable[object]) -> None:
    for symbol in symbols:
        if not isinstance(symbol, str | int) or isinstance(symbol, bool):
            raise TypeError(
                f"{name} must have words (str) or codes (int); got {type(symbol).__name__}."
            )
        if isinstance(symbol, int) and symbol < 0:
            text = f"codes in {name} must be at least 0; got {symbol}"
            raise ValueError(f"{text}. Count codes from 0.")


def _called(function: str, phrases: Iterable[Phrase]) -> str:
    """A call as it was written, shortened if it is long."""
    shown = ", ".join(map(repr, phrases))
    return f"{function}({shown if len(shown) < 80 else shown[:77] + '...'})"


def _explored(start: Any, after: Callable[[Any], list[Any]]) -> tuple[list[Any], list[list[int]]]:
    """Breadth-first search: items reached from ``start``, and successors of each by number."""
    numbers, rows, queue = {start: 0}, [], [start]
    for item in queue:  # which grows
        following = after(item)
        queue += [each for each in dict.fromkeys(following) if each not in numbers]
        rows.append([numbers.setdefault(each, len(numbers)) for each in following])
    return queue, rows


def _first_seen(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Relabel from 0 by first occurrence; also the index of each first occurrence."""
    _, place = labels.unique(return_inverse=True)
    first = torch.full((int(place.max()) + 1,), len(labels))
    first = first.scatter_reduce(0, place, torch.arange(len(labels)), "amin")
    return first.argsort().argsort()[place], first.sort().values
