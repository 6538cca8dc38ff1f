"""Stop strings in streamed text, wherever the pieces are cut.

Rule 13.4: the match that ends first wins; of those that end together, the longest. It is decided character by character,
so it does not depend on how the text is cut into pieces, and generation stops as early as it can.

An Aho-Corasick automaton (Aho and Corasick, "Efficient string matching", CACM 1975) reads each character once. Its
state is the longest suffix of the text that is a prefix of some stop string; that suffix, and no more, is held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs


@attrs.define(eq=False, repr=False)
class _Node:
    """A prefix of some stop string. ``match``: the longest stop string that the text ends with here."""

    depth: int
    children: dict[str, _Node] = attrs.field(factory=dict)
    fail: _Node | None = None  # the longest proper suffix that is also a prefix; None at the root
    match: str | None = None


class StopSet:
    """The stop strings of a request, compiled once; it never changes, so all texts of the request share it. Building it
    costs time and memory by the character of the stop strings, following a text in it next to none."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.root = _automaton(stops)


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces. What is kept for each text is a place in the set's
    automaton and the text held back."""

    def __init__(self, stops: Sequence[str] | StopSet, *, include_stop: bool = False) -> None:
        self.matched: str | None = None
        self._include = include_stop
        self._root = (stops if isinstance(stops, StopSet) else StopSet(stops)).root
        self._node = self._root
        self._held = ""  # always the last ``_node.depth`` characters

    def push(self, piece: str) -> str:
        """The text that may be shown now. Once ``matched`` is set nothing follows."""
        if self.matched is not None:
            return ""
        if not self._root.children:
            return piece
        text = self._held + piece
        node = self._node
        for end, char in enumerate(piece, start=len(self._held) + 1):
            node = _next(node, char)
            if node.match is not None:
                return self._finish(text, end, node.match)
        self._node = node
        cut = len(text) - node.depth
        self._held = text[cut:]
        return text[:cut]

    def release(self) -> str:
        """Gives up what is held and starts afresh: nothing seen so far can be part of a match."""
        held, self._held, self._node = self._held, "", self._root
        return held

    def _finish(self, text: str, end: int, match: str) -> str:
        self.matched = match
        self.release()
        return text[: end if self._include else end - len(match)]


def _next(node: _Node, char: str) -> _Node:
    """The automaton's step; amortised one move, since a failure link undoes what earlier characters built up."""
    while True:
        child = node.children.get(char)
        if child is not None:
            return child
        if node.fail is None:
            return node
        node = node.fail


def _automaton(stops: Sequence[str]) -> _Node:
    root = _Node(depth=0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.children.setdefault(char, _Node(depth=node.depth + 1))
        if node is not root:
            node.match = stop
    queue = deque([root])
    while queue:  # breadth first, so a node's failure link, being shorter, is complete before it is used
        parent = queue.popleft()
        for char, node in parent.children.items():
            node.fail = root if parent.fail is None else _next(parent.fail, char)
            node.match = node.match or node.fail.match
            queue.append(node)
    return root
