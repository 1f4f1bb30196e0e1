"""Python as items. It is read token by token, so that broken code (a page that lost its indentation, a snippet) is read
too: `ast` gives nothing for such a file, nor the places inside implicitly joined strings. A test compares with `ast`.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from keyword import kwlist
from typing import NamedTuple

from nibblas.index import languages
from nibblas.index.items import Item, ItemKind, Parsed
from nibblas.index.positions import Mapped

_TOKEN = re.compile(
    r"""(?:[ \t\f\v\x00\ufeff]++|\\\r?\n)*+
    (?:(?P<name>[^\W\d]\w*+(?:\.[^\W\d]\w*+)*+)(?!["'])
    |(?P<newline>\r\n|\n|\r)
    |(?P<comment>\#[^\r\n]*+)
    |(?P<string>(?:[rR][bBfFtT]?|[bBfFtT][rR]?|[uU])?+
        (?:\"{3}(?:[^\\"]++|\\.|"(?!""))*+(?:\"{3}|\\?\Z)
        |'{3}(?:[^\\']++|\\.|'(?!''))*+(?:'{3}|\\?\Z)
        |"(?:[^\\"\r\n]++|\\(?:\r\n|.))*+"?
        |'(?:[^\\'\r\n]++|\\(?:\r\n|.))*+'?))
    |(?P<number>(?:0[xXoObB][\da-fA-F_]++|(?:\d[\d_]*+\.?[\d_]*+|\.\d[\d_]*+)(?:[eE][-+]?\d[\d_]*+)?+)[jJ]?)
    |(?P<word>[^\W\d]\w*+)
    |(?P<op>->|:=|==|!=|\*\*=?|//=?|>>=?|<<=?|[<>+\-*/%@&|^]=|\.\.\.|.)|(?P<end>\Z))""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(?:(?P<newline>\r\n|\n|\r)|(?P<octal>[0-7]{1,3})|x(?P<x>[\da-fA-F]{2})|u(?P<u>[\da-fA-F]{4})"
    r"|U(?P<U>[\da-fA-F]{8})|N\{(?P<N>[^}\n]*)\}|(?P<simple>[abfnrtv\\'\"]))"
)
_BRACE = re.compile(r"[{}]")
_SIMPLE = dict(zip("abfnrtv\\'\"", "\a\b\f\n\r\t\v\\'\"", strict=True))
KEYWORDS = frozenset(kwlist)
# These begin a statement and never stand inside brackets: where one begins a line, brackets left open are a fault.
_STATEMENTS = KEYWORDS & {"def", "class", "import", "return", "while", "try", "with", "raise", "assert", "del", "pass"}
_BLOCKS = KEYWORDS & {"if", "elif", "else", "for", "while", "with", "try", "except", "finally", "def", "class", "async"}
_COMPARES = frozenset(("==", "!=", "<", ">", "<=", ">=", "in", "is"))
_BEGINS_OPERAND = (
    _COMPARES | set("=,:([{;") | {":=", "and", "or", "not", "if", "elif", "else", "while", "return", "assert", "lambda"}
)
_ENDS_OPERAND = _COMPARES | set(",:)]};") | {"and", "or", "if", "else", "for"}
_ENDS_TERM = frozenset("+,)]};=")
_OPENING = frozenset("([{")
_PAIRS = {")": "(", "]": "[", "}": "{"}
_FILLS = frozenset(("append", "add", "extend", "insert", "setdefault", "update"))
_FEWEST_NUMBERS = 8
_LONGEST_NAMES = 200  # of a string whose words may be names of functions
_LONGEST_VALUE = 2000
_BUDGET, _LEAST_BUDGET = 10, 1_000_000  # characters of strings put together, by character of the source and at least
# The names that everybody imports these modules under, which rules use.
SHORT = (
    ("triton.language", "tl"),
    ("cutlass.cute", "cute"),
    ("triton.experimental.gluon.language", "gl"),
    ("helion.language", "hl"),
    ("tilelang.language", "T"),
    ("numpy", "np"),
)
_WORD = re.compile(r"[^\W\d]\w*")
_KEEPING = re.compile(r"(?:functools\.)?(?:lru_cache|cache)")
_GRID = re.compile(r"(?:\w+_)?grid(?:_\w+)?|grid\w*")


def value_of(literal: Mapped, resolve: Callable[[Mapped], Mapped]) -> Mapped:
    """The value of a string literal. `resolve` gives what a field of an f-string stands for."""
    body = literal.text.lstrip("rRbBfFtTuU")
    prefix = literal.text[: len(literal.text) - len(body)].lower()
    quote = body[:3] if body[:3] in ('"""', "'''") else body[:1]
    start = len(prefix) + len(quote)
    ended = body.endswith(quote) and len(body) >= 2 * len(quote)
    inner = literal.cut(start, len(literal.text) - (len(quote) if ended else 0))
    if "f" in prefix or "t" in prefix:
        return filled(inner, resolve, raw="r" in prefix)
    return inner if "r" in prefix or "\\" not in inner.text else inner.unescaped(_escapes(inner.text))


def filled(template: Mapped, resolve: Callable[[Mapped], Mapped], raw: bool = True) -> Mapped:
    """A format's text with its fields resolved and its doubled braces halved, and read as raw text or with escapes."""
    pieces = []
    for kind, start, end in _fields(template.text):
        piece = template.cut(start, end)
        if kind == "field":
            piece = resolve(piece)
        elif not raw:
            piece = piece.unescaped(_escapes(piece.text))
        pieces.append(piece)
    return Mapped.join(pieces)


def _escapes(text: str) -> Iterator[tuple[int, int, str]]:
    for found in _ESCAPE.finditer(text):
        group, code = found.lastgroup, found[found.lastgroup or 0]
        if group == "simple":
            yield found.start(), found.end(), _SIMPLE[code]
        elif group == "newline":
            yield found.start(), found.end(), ""
        elif group == "N":
            yield found.start(), found.end(), "_"  # which character it is makes no difference to a rule
        else:
            number = int(code, 8 if group == "octal" else 16)
            yield found.start(), found.end(), chr(number) if number < 0x110000 else "_"


def _fields(text: str) -> Iterator[tuple[str, int, int]]:
    """("text" or "field", start, end) of the inside of an f-string, or of a text for str.format."""
    done = opened = depth = 0
    skipped = -1
    for found in _BRACE.finditer(text):
        at, brace = found.start(), found[0]
        if at == skipped:
            continue
        if depth:
            depth += 1 if brace == "{" else -1
            if not depth:
                yield "text", done, opened
                yield "field", opened + 1, at
                done = at + 1
        elif text[at + 1 : at + 2] == brace:
            yield "text", done, at + 1
            done, skipped = at + 2, at + 1
        elif brace == "{":
            opened, depth = at, 1
    yield "text", done, len(text)


def parse(source: Mapped, wanted: Callable[[str], bool] = lambda name: True) -> Parsed:
    """The items of Python source. Of names only those that are wanted become items."""
    return _Reader(source, wanted).read()


class _Statement(NamedTuple):
    """Tokens first to last, of which those before `targets` are bound to those from `value` on."""

    first: int
    last: int
    targets: int
    value: int
    indent: int | None  # None for one that does not begin its line


class _Scope(NamedTuple):
    indent: int
    function: str
    start: int  # offset in the text
    keeps: bool  # decorated to keep its results


class _Reader:
    def __init__(self, source: Mapped, wanted: Callable[[str], bool]):
        self.source = source
        self.wanted = wanted
        self.parsed = Parsed()
        # The tokens: comments are left out, and the ends of lines inside brackets.
        self.kinds: list[str] = []
        self.texts: list[str] = []
        self.starts: list[int] = []
        self.inside: list[int] = []  # index of the innermost bracket that is open at a token, or -1
        self.close: dict[int, int] = {}  # index of an opening bracket -> of the closing one
        self.opening: dict[int, int] = {}
        self.statement = _Statement(0, 0, 0, 0, 0)
        self.function = ""
        self.aliases: dict[str, str] = {}
        self.imported: set[str] = set()  # names that imports bind
        self.alias = -1  # token of a name that the statement gives another name
        self.canonical: dict[str, str | None] = {}  # a name as written -> as rules write it, None if it isn't wanted
        self.values: dict[str, Mapped] = {}  # of names that are bound to text
        self.embedded: dict[str, int] = {}  # names bound to code -> index in parsed.embedded
        self.taken: set[int] = set()  # strings that were read as part of an expression
        self.globals: defaultdict[str, set[str]] = defaultdict(set)  # function -> names it declares global
        self.locals: defaultdict[str, dict[str, str]] = defaultdict(dict)  # function -> name -> what it is bound to
        self.at_top: dict[str, int] = {}  # name that the module binds -> token
        self.candidates: list[tuple[str, int, str, str]] = []  # name, token, function, what it is bound to
        self.budget = _BUDGET * len(source.text) + _LEAST_BUDGET  # characters that may still be put together
        self.parameters = 0  # names before this token are parameters of a lambda

    def read(self) -> Parsed:
        self._tokenize()
        texts = self.texts
        scopes: list[_Scope] = []
        decorated = keeps = False
        for statement in self._statements():
            self.statement = statement
            first, last, *_, indent = statement
            if indent is not None:
                while scopes and scopes[-1].indent >= indent:
                    self._leave(scopes.pop(), first)
                self.function = scopes[-1].function if scopes else ""
            word = texts[first]
            self._read_statement(statement, word)
            if word == "@":
                decorated = True
                keeps = keeps or bool(_KEEPING.match(texts[first + 1]))
            elif word in ("def", "async", "class"):
                name = first + 2 if word == "async" else first + 1
                if word != "class" and texts[name - 1] == "def" and name < last and self.kinds[name] == "name":
                    at = scopes[-1].indent + 1 if indent is None and scopes else indent or 0
                    scopes.append(_Scope(at, texts[name], self.starts[name], keeps))
                    self.function = texts[name]
                    if decorated:
                        self.parsed.entries.add(texts[name])
                decorated = keeps = False
        while scopes:
            self._leave(scopes.pop(), len(texts))
        self._find_kept()
        self._split_names()
        self.parsed.embedded = [entry for entry in self.parsed.embedded if entry is not None]
        return self.parsed

    def _leave(self, scope: _Scope, end: int) -> None:
        if scope.keeps:
            self.function = scope.function
            body = self.source.text[scope.start : self.starts[end - 1]][:_LONGEST_VALUE]
            self._add("kept", scope.function, scope.start, scope.start + len(scope.function), body)

    def _split_names(self) -> None:
        for function, names in self.parsed.names.items():
            dotted = {name for name in names if "." in name}
            self.parsed.names[function] = names.union(*(name.split(".") for name in dotted)) if dotted else names

    def _tokenize(self) -> None:
        kinds, texts, starts, inside, close = self.kinds, self.texts, self.starts, self.inside, self.close
        opened: list[int] = []
        current = -1
        begins = True
        for found in _TOKEN.finditer(self.source.text):
            kind = found.lastgroup
            if kind is None or kind == "end":
                break
            text = found[kind]
            if kind == "op":
                if text in _OPENING:
                    inside.append(current)
                    current = len(texts)
                    opened.append(current)
                    kinds.append(kind)
                    texts.append(text)
                    starts.append(found.start(kind))
                    begins = False
                    continue
                if text in _PAIRS:
                    while opened and texts[opened[-1]] != _PAIRS[text]:
                        opened.pop()
                    if opened:
                        close[opened[-1]] = len(texts)
                        self.opening[len(texts)] = opened.pop()
                    current = opened[-1] if opened else -1
            elif kind == "newline":
                begins = True
                if opened or not kinds or kinds[-1] == "newline":
                    continue
            elif kind == "comment":
                self._lines("comment", found.start(kind), found.end())
                continue
            elif kind == "name" and begins and opened and text in _STATEMENTS:
                opened.clear()
                current = -1
                kinds.append("newline")
                texts.append("")
                starts.append(found.start(kind))
                inside.append(-1)
            begins = kind == "newline"
            kinds.append(kind)
            texts.append(text)
            starts.append(found.start(kind))
            inside.append(current)
        kinds += ("newline", "newline")
        texts += ("", "")
        starts += (len(self.source.text),) * 2
        inside += (-1, -1)

    def _statements(self) -> Iterator[_Statement]:
        kinds, texts, close = self.kinds, self.texts, self.close
        at, last = 0, len(texts) - 1
        while at < last:
            first = at
            indent: int | None = self._indent(at)
            while at < last:  # the statements of one line
                word = texts[first]
                block = word in _BLOCKS
                targets = value = first
                lambdas = 0
                while True:
                    text = texts[at]
                    if kinds[at] == "newline" or (text == ";" and kinds[at] == "op"):
                        break
                    if text == "=" and not lambdas:
                        targets, value = (at if value != first or targets == first else targets), at + 1
                    elif text == "lambda":
                        lambdas += 1
                    elif text == ":" and lambdas:
                        lambdas -= 1
                    elif text == ":" and block:
                        break
                    elif (text == ":" and targets == first) or (
                        text == "in" and targets == first and word in ("for", "async")
                    ):
                        targets = at
                    at = close.get(at, at) + 1
                if at > first:
                    yield _Statement(first, at, targets, value if value > first else at, indent)
                ended = kinds[at] == "newline"
                at = first = at + 1
                if ended:
                    break
                indent = None

    def _indent(self, index: int) -> int:
        text, start = self.source.text, self.starts[index]
        begin = text.rfind("\n", 0, start) + 1
        begin = text.rfind("\r", begin, start) + 1 or begin
        return len(text[begin:start].expandtabs(8))

    def _end(self, index: int) -> int:
        return self.starts[index] + len(self.texts[index])

    def _text(self, first: int, last: int) -> str:
        """The source of the tokens from first to before last."""
        return self.source.text[self.starts[first] : self._end(last - 1)][:_LONGEST_VALUE] if first < last else ""

    def _add(self, kind: ItemKind, text: str, start: int, end: int, value: str = "") -> None:
        first, last = self.source.span(start, end)
        self.parsed.items.append(Item(kind, text, first, last, "python", self.function, value))

    def _lines(self, kind: ItemKind, start: int, end: int) -> None:
        """An item for each line of a comment or string."""
        text = self.source.text
        while start < end:
            stop = text.find("\n", start, end)
            stop = end if stop < 0 else stop
            if line := text[start:stop].strip():
                at = text.index(line, start)
                self._add(kind, line, at, at + len(line))
            start = stop + 1

    def _read_statement(self, statement: _Statement, word: str) -> None:
        kinds, texts = self.kinds, self.texts
        first, last, targets, value, _ = statement
        if word in ("import", "from"):
            self._read_import(first, last)
            return
        if word in ("global", "nonlocal"):
            self.globals[self.function].update(texts[first + 1 : last])
            return
        if kinds[first] == "string" and all(kind == "string" for kind in kinds[first:last]):
            for at in range(first, last):  # a docstring, or a remark
                self._lines("comment", self.starts[at], self._end(at))
            return
        if word in ("for", "while") or (word == "async" and texts[first + 1] == "for"):
            self._add("loop", self._text(first, last), self.starts[first], self._end(last - 1))
        self.alias = value if self._is_alias(statement) else -1
        if targets > first and word not in ("def", "class", "@"):
            self._bind(first, targets, value, last)
        elif word in self.values and texts[first + 1] == "+=":
            self._bind_text(word, first + 2, last)
        names = self.parsed.names[self.function]
        canonical = self.canonical
        for at in range(first, last):
            kind, text = kinds[at], texts[at]
            if kind == "name":
                if text in canonical:
                    name = canonical[text]
                elif text in KEYWORDS:
                    if text == "lambda" and at >= self.parameters:
                        self.parameters = self._lambda_end(at, last)
                    elif text == "in" and word not in ("for", "async"):
                        self._compare(at)
                    continue
                else:
                    name = self._name(text)
                if texts[at - 1] in ("def", "class"):
                    self.parsed.defined.add(text)
                else:
                    names.add(text)
                if name is not None:
                    self._read_name(at, name, text)
            elif kind == "string":
                if texts[at + 1] == ":" and texts[at - 1] in ("{", ",") and self._context(at) == "braces":
                    self._read_key(at)
                elif at not in self.taken:
                    self._read_text(at)
            elif kind == "op":
                if text == "==":
                    self._compare(at)
                elif text in _OPENING and kinds[at + 1] in ("number", "op"):
                    self._read_literal(at)
        if self.alias >= 0:
            root, dot, rest = texts[value].partition(".")
            self.aliases[word] = self.aliases.get(root, root) + dot + rest
            self.canonical.pop(word, None)

    def _is_alias(self, statement: _Statement) -> bool:
        """Whether the module gives something imported another name, which is bound nowhere else."""
        first, last, targets, value, _ = statement
        return (
            targets == first + 1
            and value == last - 1
            and not self.function
            and self.kinds[first] == self.kinds[value] == "name"
            and self.texts[value].partition(".")[0] in self.imported
            and self.texts[first] in self.bound_once
        )

    @cached_property
    def bound_once(self) -> frozenset[str]:
        """Names that one assignment binds, and no signature."""
        bound: Counter[str] = Counter()
        for at, (kind, opening) in enumerate(zip(self.kinds, self.inside, strict=True)):
            if kind != "name":
                continue
            if opening < 0:
                bound[self.texts[at]] += self.texts[at + 1] in ("=", ":=")
            elif self.texts[max(opening - 2, 0)] == "def" and self.texts[at - 1] in ("(", ",", "*", "**"):
                bound[self.texts[at]] += 2
        return frozenset(name for name, count in bound.items() if count == 1)

    def _lambda_end(self, at: int, last: int) -> int:
        while at < last and self.texts[at] != ":":
            at = self.close.get(at, at) + 1
        return at

    def _name(self, text: str) -> str | None:
        """A name as rules write it; None where none of them wants it."""
        root, dot, rest = text.partition(".")
        name = self.aliases[root] + dot + rest if root in self.aliases else text
        for long, short in SHORT:
            if name.startswith(long) and name[len(long) : len(long) + 1] in ("", "."):
                name = short + name[len(long) :]
                break
        special = text in self.values or _GRID.fullmatch(name) or text.rpartition(".")[2] in _FILLS
        self.canonical[text] = found = name if special or self.wanted(name) else None
        return found

    def _context(self, at: int) -> str:
        """What the innermost bracket around a token is: call, parameters, subscript, braces, group or nothing."""
        opening = self.inside[at]
        first = self.statement.first
        if opening < first:
            return ""
        text, before = self.texts[opening], opening - 1
        operand = opening > first and (
            (self.kinds[before] == "name" and self.texts[before] not in KEYWORDS)
            or self.texts[before] in (")", "]")
            or self.kinds[before] == "string"
        )
        if text == "(" and operand:
            return "parameters" if self._is_signature(opening) else "call"
        if text == "[" and operand:
            return "subscript"
        return "braces" if text == "{" else "group"

    def _is_signature(self, opening: int) -> bool:
        first = self.statement.first
        return opening - 2 in (first, first + 1) and self.texts[opening - 2] == "def"

    def _read_name(self, at: int, name: str, text: str) -> None:
        """Add the item of a name. A dot before it makes it a method of an expression."""
        texts, (first, last, targets, _, _) = self.texts, self.statement
        after, before = texts[at + 1], texts[at - 1] if at > first else ""
        start = self.starts[at]
        end = start + len(text)
        if before == "." and self.kinds[at - 1] == "op":
            name = "." + name
        context = self._context(at) if self.inside[at] >= 0 else ""
        closing = self.close.get(self.inside[at], last)
        if before in ("def", "class"):
            self._add("definition", text, start, end)
        elif at < self.parameters or (context == "parameters" and before in ("(", ",", "*", "**", "/")):
            self._add("binding", name, start, end, self._until_comma(at + 1, closing))
        elif context == "call" and after == "=" and before in ("(", ","):
            value = self._until_comma(at + 2, closing)
            self._add("keyword", text, start, end, value)
            if _GRID.fullmatch(text):
                self._add("grid", text, start, end, value)
        elif before == "@" and at == first + 1:
            self._add("decorator", name, start, end, self._text(at + 1, last))
        elif after == "(":
            arguments = self._text(at + 2, min(self.close.get(at + 1, last), last))
            self._add("call", name, start, end, arguments)
            owner, _, method = text.rpartition(".")
            if method in _FILLS and owner:
                self.candidates.append((owner, at, self.function, arguments))
        elif after == "[" and texts[self.close.get(at + 1, last) + 1] == "(" and self.close.get(at + 1, last) < last:
            grid = self._text(at + 2, self.close[at + 1])
            self._add("launch", name, start, end, grid)
            self._add("grid", name, start, end, grid)
        elif before == "as":
            self._add("binding", text, start, end)
        elif at == self.alias:
            self._add("alias", name, start, end)
        elif at >= targets or context not in ("", "group") or after == "[":
            if text in self.values and after in ("+", ".") and before != "+":
                self._read_text(at)
            self._add("name", name, start, end, self._text(first, last))

    def _until_comma(self, at: int, end: int) -> str:
        """The source from a token to the next comma outside brackets."""
        first = at
        while at < end and self.texts[at] != ",":
            at = self.close.get(at, at) + 1
        return self._text(first, min(at, end))

    def _read_key(self, at: int) -> None:
        """A string that is a key of a dict."""
        key = self.texts[at].lstrip("rRbBuU").strip("\"'")
        if self.wanted(key):
            value = self._until_comma(at + 2, self.close.get(self.inside[at], self.statement.last))
            self._add("keyword", key, self.starts[at], self._end(at), value)

    def _read_import(self, first: int, last: int) -> None:
        kinds, texts = self.kinds, self.texts
        at, module = first + 1, ""
        if texts[first] == "from":
            while at < last and texts[at] != "import":
                module += texts[at]
                at += 1
            if module:
                self._add("import", module, self.starts[first + 1], self._end(at - 1))
            at += 1
        while at < last:
            if kinds[at] == "name":
                name = texts[at]
                whole = f"{module}.{name}" if module else name
                self.imported.add(texts[at + 2] if texts[at + 1] == "as" else name.partition(".")[0])
                self._add("import", whole, self.starts[at], self._end(at))
                if at + 2 < last and texts[at + 1] == "as":
                    self.aliases[texts[at + 2]] = whole
                    at += 2
                elif module:
                    self.aliases[name] = whole
                self.parsed.names[self.function].add(name)
            at += 1

    def _compare(self, at: int) -> None:
        """The two sides of a comparison for equality, where a number stands on one of them."""
        texts, first, last = self.texts, self.statement.first, self.statement.last
        left = at
        while left > first and texts[left - 1] not in _BEGINS_OPERAND:
            left = max(self.opening.get(left - 1, left - 1), first)
        right = at + 1
        while right < last and texts[right] not in _ENDS_OPERAND:
            right = self.close.get(right, right) + 1
        right = max(min(right, last), at + 1)
        sides = self._text(left, at), self._text(at + 1, right)
        if any(character.isdigit() for character in "".join(sides)):
            self._add("equality", sides[0], self.starts[left], self._end(right - 1), sides[1])

    def _read_literal(self, at: int) -> None:
        """A list of numbers, or a dict by tuples of whole numbers."""
        kinds, texts, last = self.kinds, self.texts, self.statement.last
        close = min(self.close.get(at, last), last)
        if texts[at] == "{" and texts[at + 1] == "(":
            key = range(at + 2, min(self.close.get(at + 1, close), close))
            if len(key) >= 3 and all(kinds[i] == "number" or texts[i] in (",", "-") for i in key):
                first = self.statement.first
                name = texts[first] if kinds[first] == "name" else ""
                self._add("table", name, self.starts[at], self._end(at), self._text(key.start - 1, key.stop + 1))
            return
        count, i = 0, at + 1
        while i < close and (kinds[i] == "number" or texts[i] in ("-", "+", ",")):
            count += kinds[i] == "number"
            i += 1
        if i == close and count >= _FEWEST_NUMBERS:
            self._add("numbers", "".join(texts[at + 1 : close])[:_LONGEST_VALUE], self.starts[at], self._end(close - 1))

    def _bind(self, first: int, targets: int, value: int, last: int) -> None:
        """Items for the names that a statement binds, and what is known of their values."""
        texts, bound = self.texts, self._text(value, last)
        at = first
        while at < targets:
            name = texts[at]
            if self.kinds[at] != "name" or name in KEYWORDS:
                at += 1
                continue
            if texts[at + 1] in ("[", "("):
                self.candidates.append((name.partition(".")[0], at, self.function, bound))
                at = self.close.get(at + 1, at + 1) + 1
                continue
            if self.wanted(name):
                self._add("binding", name, self.starts[at], self._end(at), bound)
            if _GRID.fullmatch(name):
                self._add("grid", name, self.starts[at], self._end(at), bound)
            if not self.function:
                self.at_top.setdefault(name, at)
            if "." in name or not self.function or name in self.globals[self.function]:
                self.candidates.append((name.partition(".")[0], at, self.function, bound))
            else:
                self.locals[self.function][name] = bound
            at += 1
        if value < last and self.kinds[first] == "name" and texts[first + 1] in ("=", ":"):
            self._bind_text(texts[first], value, last)

    def _find_kept(self) -> None:
        """Items for what is bound in a function to a name that outlives its call, and for what the module makes."""
        at_top = self.at_top.keys() | self.parsed.defined
        read = set().union(*(names for function, names in self.parsed.names.items() if function))
        for name, at, function, bound in self.candidates:
            self.function = function
            if not function:
                if name in read and "(" in bound:
                    self._add("made", name, self.starts[at], self._end(at), bound)
                continue
            known = self.locals[function]
            if name in self.globals[function] or (name in at_top and name not in known):
                made_of = dict.fromkeys(word for word in _WORD.findall(bound) if word in known)
                bound = " ; ".join((bound, *(known[word] for word in made_of)))[:_LONGEST_VALUE]
                self._add("kept", name, self.starts[at], self._end(at), bound)
                if name in self.at_top:
                    self.function, at = "", self.at_top.pop(name)
                    self._add("container", name, self.starts[at], self._end(at), bound)

    def _read_text(self, at: int) -> None:
        """What a string expression that begins at a token holds: code, or a string."""
        name = self.texts[at - 2] if at >= 2 and self.texts[at - 1] == "=" else ""
        literals: list[int] = []
        end = self.close.get(self.inside[at], self.statement.last)
        value, _ = self._joined(at, end, literals)
        self._keep_text(name, value, literals)

    def _bind_text(self, name: str, at: int, end: int) -> None:
        """Remember the text that a name is bound to, if it is one."""
        if not (self.kinds[at] == "string" or self.texts[at] in self.values or self.texts[at] == "("):
            return
        literals: list[int] = []
        value, stop = self._joined(at, end, literals)
        if stop < end or not (literals or self.texts[at] in self.values):
            self.taken.difference_update(literals)
            return
        if self.texts[at - 1] == "+=":
            value = self._afforded(Mapped.join((self._used(name), value)))
        self._keep_text(name, value, literals)
        self.values[name] = value
        self.canonical.pop(name, None)

    def _keep_text(self, name: str, value: Mapped, literals: list[int]) -> None:
        if languages.of_code(value.text, name):
            self.embedded[name] = len(self.parsed.embedded)
            self.parsed.embedded.append((value, self.function))
            return
        for at in literals:
            inner = self.texts[at].lstrip("rRbBfFtTuU").strip("\"'")
            start = self.starts[at] + self.texts[at].find(inner)
            self._lines("string", start, start + len(inner))
            if len(inner) < _LONGEST_NAMES:
                self.parsed.names[self.function].update(_WORD.findall(inner))

    def _used(self, name: str) -> Mapped:
        """The text of a name that becomes a part of another: code is read once, in the longest text it is part of."""
        if name in self.embedded:
            self.parsed.embedded[self.embedded.pop(name)] = None
        return self.values[name]

    def _afforded(self, value: Mapped) -> Mapped:
        """A text that was put together, or a name in its place once too much was: a text can double itself for ever."""
        self.budget -= len(value.text) + value.pieces
        return value if self.budget > 0 else value.replaced("_")

    def _joined(self, at: int, end: int, literals: list[int]) -> tuple[Mapped, int]:
        """The text of terms joined by +, and the index of the token after it; `literals` gains the string tokens."""
        pieces = []
        while at < end:
            piece, at = self._term(at, end, literals)
            pieces.append(piece)
            if at >= end or self.texts[at] != "+":
                break
            at += 1
        return self._afforded(Mapped.join(pieces)), at

    def _term(self, at: int, end: int, literals: list[int]) -> tuple[Mapped, int]:
        kinds, texts, first = self.kinds, self.texts, at
        owner, _, method = texts[at].rpartition(".")
        if kinds[at] == "string":
            pieces = []
            while at < end and kinds[at] == "string":
                literals.append(at)
                self.taken.add(at)
                pieces.append(value_of(self.source.cut(self.starts[at], self._end(at)), self._resolved))
                at += 1
            value = pieces[0] if len(pieces) == 1 else Mapped.join(pieces)
        elif owner in self.values and method == "format" and texts[at + 1] == "(":
            return filled(self._used(owner), self._resolved), min(self.close.get(at + 1, end) + 1, end)
        elif texts[at] in self.values:
            value, at = self._used(texts[at]), at + 1
        elif texts[at] == "(" and self.close.get(at, end) < end:
            value, _ = self._joined(at + 1, self.close[at], literals)
            at = self.close[at] + 1
        else:
            while at < end and texts[at] not in _ENDS_TERM:
                at = self.close.get(at, at) + 1
            return self.source.cut(self.starts[first], self._end(first)).replaced("_"), max(at, first + 1)
        while at + 2 < end and texts[at] == "." and texts[at + 2] == "(":
            if texts[at + 1] == "format":
                value = filled(value, self._resolved)
            elif texts[at + 1] == "join":
                value = self._listed(at + 2, value, literals)
            at = self.close.get(at + 2, end) + 1
        return value, min(at, end)

    def _listed(self, at: int, separator: Mapped, literals: list[int]) -> Mapped:
        """The text that separator.join makes of the list or tuple that a bracket holds."""
        close = self.close.get(at + 1, at + 1)
        pieces: list[Mapped] = []
        at += 2
        while at < close:
            value, at = self._joined(at, close, literals)
            pieces += [separator, value] if pieces else [value]
            at += 1
        return Mapped.join(pieces)

    def _resolved(self, field: Mapped) -> Mapped:
        """What a field of a format stands for: text where it names one, else a name in its place."""
        name = field.text.strip()
        return self._used(name) if name in self.values else field.replaced("_")
