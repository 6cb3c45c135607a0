"""A small GraphQL: reads query documents and projects them out of a tree of resolvers.

There is no schema. A *node* is a mapping from field name to a value, or to a function
of the field's arguments that returns one. A field that a node lacks answers null, so
that clients newer than this server still get an answer; only an unknown mutation is an
error, because pretending to have changed something would be a lie.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

Args: TypeAlias = dict[str, Any]
Resolver: TypeAlias = Callable[[Args], object]
Node: TypeAlias = Mapping[str, object]

_TOKEN = re.compile(
    r"""(?:[\s,\ufeff]|\#[^\n\r]*)*
    (?:(?P<block>\"\"\"(?:[^"\\]|\\.|"(?!""))*\"\"\")
      |(?P<string>"(?:[^"\\\n]|\\.)*")
      |(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)
      |(?P<name>[_A-Za-z]\w*)
      |(?P<punct>\.\.\.|[!$&()\[\]{}:=@|])
      |(?P<end>\Z))""",
    re.VERBOSE | re.DOTALL,
)
_CONSTANTS: dict[str, object] = {"true": True, "false": False, "null": None}


class GraphQLError(Exception):
    """A request that was understood and refused; becomes an entry of `errors`."""


@dataclass(frozen=True)
class Variable:
    """A `$name` that stands for a value sent beside the document."""

    name: str


@dataclass(frozen=True)
class Selection:
    """One entry of a selection set: a field, a fragment spread or an inline fragment."""

    kind: str
    name: str = ""
    alias: str = ""
    arguments: Mapping[str, object] = field(default_factory=dict)
    directives: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    selections: tuple[Selection, ...] = ()


@dataclass(frozen=True)
class Operation:
    """A query or a mutation, with the defaults of its variables."""

    kind: str
    name: str
    defaults: Mapping[str, object]
    selections: tuple[Selection, ...]


@dataclass(frozen=True)
class Document:
    """All operations and fragments of one request text."""

    operations: tuple[Operation, ...]
    fragments: Mapping[str, tuple[Selection, ...]]

    def operation(self, name: str | None) -> Operation:
        """Return the operation of this name, or the only one when no name is given."""
        for operation in self.operations:
            if not name or operation.name == name:
                return operation
        raise GraphQLError(f'Unknown operation named "{name}".')


class _Parser:
    """Recursive descent over the tokens of one document."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokenize(text))
        self._at = 0

    def document(self) -> Document:
        operations: list[Operation] = []
        fragments: dict[str, tuple[Selection, ...]] = {}
        while self._kind != "end":
            if self._accept("fragment"):
                name = self._take("name")
                self._expect("on")
                self._take("name")
                self._directives()
                fragments[name] = self._selections()
            else:
                operations.append(self._operation())
        if not operations:
            raise GraphQLError("Syntax Error: the document holds no operation.")
        return Document(tuple(operations), fragments)

    def _operation(self) -> Operation:
        if self._text == "{":
            return Operation("query", "", {}, self._selections())
        kind = self._take("name")
        name = self._take("name") if self._kind == "name" else ""
        defaults = self._variable_defaults()
        self._directives()
        return Operation(kind, name, defaults, self._selections())

    def _variable_defaults(self) -> dict[str, object]:
        defaults: dict[str, object] = {}
        if self._accept("("):
            while not self._accept(")"):
                self._expect("$")
                name = self._take("name")
                self._expect(":")
                self._type()
                if self._accept("="):
                    defaults[name] = self._value()
                self._directives()
        return defaults

    def _type(self) -> None:
        if self._accept("["):
            self._type()
            self._expect("]")
        else:
            self._take("name")
        self._accept("!")

    def _selections(self) -> tuple[Selection, ...]:
        self._expect("{")
        found: list[Selection] = []
        while not self._accept("}"):
            found.append(self._fragment() if self._accept("...") else self._field())
        return tuple(found)

    def _field(self) -> Selection:
        alias = name = self._take("name")
        if self._accept(":"):
            name = self._take("name")
        arguments = self._arguments()
        directives = self._directives()
        selections = self._selections() if self._text == "{" else ()
        return Selection("field", name, alias, arguments, directives, selections)

    def _fragment(self) -> Selection:
        if self._kind == "name" and self._text != "on":
            name = self._take("name")
            return Selection("spread", name, directives=self._directives())
        if self._accept("on"):
            self._take("name")
        directives = self._directives()
        return Selection("inline", directives=directives, selections=self._selections())

    def _arguments(self) -> dict[str, object]:
        arguments: dict[str, object] = {}
        if self._accept("("):
            while not self._accept(")"):
                name = self._take("name")
                self._expect(":")
                arguments[name] = self._value()
        return arguments

    def _directives(self) -> dict[str, Mapping[str, object]]:
        directives: dict[str, Mapping[str, object]] = {}
        while self._accept("@"):
            name = self._take("name")
            directives[name] = self._arguments()
        return directives

    def _value(self) -> object:
        if self._accept("$"):
            return Variable(self._take("name"))
        if self._accept("["):
            items: list[object] = []
            while not self._accept("]"):
                items.append(self._value())
            return items
        if self._accept("{"):
            members: dict[str, object] = {}
            while not self._accept("}"):
                name = self._take("name")
                self._expect(":")
                members[name] = self._value()
            return members
        return self._scalar()

    def _scalar(self) -> object:
        kind, text = self._kind, self._text
        if kind == "name":
            self._at += 1
            return _CONSTANTS.get(text, text)
        if kind == "block":
            self._at += 1
            return text[3:-3]
        if kind in {"string", "number"}:
            self._at += 1
            return json.loads(text)
        raise GraphQLError(f"Syntax Error: expected a value, found {text!r}.")

    @property
    def _kind(self) -> str:
        return self._tokens[self._at][0]

    @property
    def _text(self) -> str:
        return self._tokens[self._at][1]

    def _accept(self, text: str) -> bool:
        kind, found = self._tokens[self._at]
        if found != text or kind not in {"punct", "name"}:
            return False
        self._at += 1
        return True

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise GraphQLError(f"Syntax Error: expected {text!r}, found {self._text!r}.")

    def _take(self, kind: str) -> str:
        found, text = self._tokens[self._at]
        if found != kind:
            raise GraphQLError(f"Syntax Error: expected a {kind}, found {text!r}.")
        self._at += 1
        return text


def _tokenize(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while True:
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise GraphQLError(f"Syntax Error: unexpected text at character {at}.")
        yield match.lastgroup, match.group(match.lastgroup)
        if match.lastgroup == "end":
            return
        at = match.end()


@lru_cache(maxsize=256)
def parse(text: str) -> Document:
    """Parse a document; clients send the same few texts again and again."""
    return _Parser(text).document()


@dataclass(frozen=True)
class Execution:
    """One operation about to be answered from a root node."""

    document: Document
    operation: Operation
    variables: Mapping[str, object]

    @classmethod
    def prepare(
        cls, text: str, variables: Mapping[str, object] | None, name: str | None
    ) -> Execution:
        """Parse `text` and choose the operation to run."""
        document = parse(text)
        operation = document.operation(name)
        return cls(document, operation, {**operation.defaults, **(variables or {})})

    @property
    def root_fields(self) -> list[str]:
        """The names of the fields asked for at the top."""
        return [selection.name for selection in self._flat(self.operation.selections)]

    def answer(self, root: Node) -> dict[str, object]:
        """Project the operation's selections out of `root`."""
        if self.operation.kind == "mutation":
            for name in self.root_fields:
                if name not in root and name != "__typename":
                    raise GraphQLError(f'Cannot query field "{name}" on type "Mutation".')
        return self._project(root, self.operation.selections)

    def _project(self, node: Node, selections: tuple[Selection, ...]) -> dict[str, object]:
        answer: dict[str, object] = {}
        for selection in self._flat(selections):
            value = node.get(selection.name)
            if callable(value):
                value = value({k: self._bind(v) for k, v in selection.arguments.items()})
            if selection.selections:
                value = self._complete(value, selection.selections)
            previous = answer.get(selection.alias)
            if isinstance(previous, dict) and isinstance(value, dict):
                value = _merge(previous, value)
            answer[selection.alias] = value
        return answer

    def _complete(self, value: object, selections: tuple[Selection, ...]) -> object:
        if isinstance(value, (list, tuple)):
            return [self._complete(item, selections) for item in value]
        if isinstance(value, Mapping):
            return self._project(value, selections)
        return value

    def _flat(self, selections: tuple[Selection, ...]) -> Iterator[Selection]:
        # Type conditions are not checked: a field of a type that a node is not is
        # unknown to the node and answers null, which clients accept.
        for selection in selections:
            if not self._included(selection):
                continue
            if selection.kind == "field":
                yield selection
            elif selection.kind == "inline":
                yield from self._flat(selection.selections)
            elif selection.name in self.document.fragments:
                yield from self._flat(self.document.fragments[selection.name])
            else:
                raise GraphQLError(f'Unknown fragment "{selection.name}".')

    def _included(self, selection: Selection) -> bool:
        for name, unwanted in (("include", False), ("skip", True)):
            directive = selection.directives.get(name)
            if directive and bool(self._bind(directive.get("if"))) is unwanted:
                return False
        return True

    def _bind(self, value: object) -> object:
        if isinstance(value, Variable):
            return self.variables.get(value.name)
        if isinstance(value, list):
            return [self._bind(item) for item in value]
        if isinstance(value, dict):
            return {key: self._bind(item) for key, item in value.items()}
        return value


def _merge(left: dict[str, object], right: dict[str, object]) -> dict[str, object]:
    merged = dict(left)
    for key, value in right.items():
        before = merged.get(key)
        both = isinstance(before, dict) and isinstance(value, dict)
        merged[key] = _merge(before, value) if both else value  # type: ignore[arg-type]
    return merged
