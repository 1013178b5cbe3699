"""Regular expressions as automata over the tokens of a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ..ops.automata import Automaton
from .control import joined, token_texts

_parser: Any = re._parser  # type: ignore[attr-defined]  # the tree that ``re`` itself compiles
ASCII = frozenset(range(128))
_LATER = frozenset(range(0x80, 0xC0))  # bytes of a character in UTF-8 after the first one
_WIDE = [(range(0xC2, 0xE0), 1), (range(0xE0, 0xF0), 2), (range(0xF0, 0xF5), 3)]
_CATEGORIES = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}


def matching(pattern: str, tokenizer: Any) -> Automaton:
    r"""Texts that match a regular expression from their first to their last character.

    However the tokens divide them. What comes back has the codes of tokens, and combines by ``&``
    and ``|`` with what :func:`.over_tokens` returns. ``\d``, ``\s`` and ``\w`` are of ASCII.

    Args:
        pattern: In the syntax of :mod:`re`, without references, anchors, and looking ahead or back.
        tokenizer: As for :func:`.token_texts`.

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
        raise ValueError(f"pattern must be without flags such as (?i); got {pattern!r}.")
    last = machine.add(tree, 0)
    name = f"matching({pattern!r})"
    return joined(machine.automaton(last, name), token_texts(tokenizer))


class _Machine:
    """Nodes with edges ``(bytes, next)``; those of None are taken without a byte."""

    def __init__(self) -> None:
        self.edges: list[list[tuple[frozenset[int] | None, int]]] = [[]]

    def step(self, node: int, of_bytes: Iterable[int] | None, to: int | None = None) -> int:
        """An edge from ``node`` to another, which is new by default, and returned."""
        if to is None:
            self.edges.append([])
            to = len(self.edges) - 1
        self.edges[node].append((None if of_bytes is None else frozenset(of_bytes), to))
        return to

    def add(self, items: Any, node: int) -> int:
        """What matches ``items`` from ``node`` on; the node after it."""
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
        """One of some ASCII characters, or one of ``wide``, or if that is None any wider one."""
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
        """The node that is reached from each of these."""
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

    def _closed(self, nodes: Iterable[int]) -> frozenset[int]:
        """Nodes, and all that follow without a byte."""
        found, queue = set(nodes), [*nodes]
        for node in queue:  # which grows
            free = {to for of_bytes, to in self.edges[node] if of_bytes is None} - found
            found |= free
            queue += free
        return frozenset(found)

    def automaton(self, last: int, name: str) -> Automaton:
        """The automaton over bytes whose states are sets of nodes."""
        states = {self._closed([0]): 0}
        rows: list[dict[str | int, int]] = []
        queue = [*states]
        for nodes in queue:  # which grows
            edges = [edge for node in nodes for edge in self.edges[node] if edge[0] is not None]
            row: dict[str | int, int] = {}
            for byte in range(256):
                after = frozenset(to for of_bytes, to in edges if byte in of_bytes)  # type: ignore[operator]
                if (closed := self._closed(after)) not in states:
                    states[closed] = len(states)
                    queue.append(closed)
                row[byte] = states[closed]
            rows.append(row)
        accepting = [number for nodes, number in states.items() if last in nodes]
        return Automaton([0] * len(rows), rows, accepting, name)


def _characters(kind: str, value: Any) -> tuple[frozenset[int], list[str] | None]:
    """ASCII characters of a class, and wider ones; None for all of these."""
    if kind == "ANY":
        return ASCII - {ord("\n")}, None
    items = [("NEGATE", None), ("LITERAL", value)] if kind == "NOT_LITERAL" else value
    narrow: set[int] = set()
    wide: list[str] = []
    all_wide = False
    for part, inner in items:
        if str(part) == "LITERAL":
            narrow |= {inner} & ASCII
            wide += [chr(inner)] if inner not in ASCII else []
        elif str(part) == "RANGE" and inner[1] < 128:
            narrow |= {*range(inner[0], inner[1] + 1)}
        elif str(part) == "CATEGORY":
            name = str(inner).removeprefix("CATEGORY_").removeprefix("NOT_")
            of_name = {c for c in ASCII if re.match(_CATEGORIES[name], chr(c), re.ASCII)}
            excluded = "NOT" in str(inner)
            narrow |= ASCII - of_name if excluded else of_name
            all_wide |= excluded
        elif str(part) != "NEGATE":
            raise ValueError("pattern must have ranges of ASCII characters only.")
    if str(items[0][0]) != "NEGATE":
        return frozenset(narrow), None if all_wide else wide
    if wide:
        raise ValueError("pattern must exclude ASCII characters only.")
    return ASCII - narrow, [] if all_wide else None
