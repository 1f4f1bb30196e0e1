"""CUDA, HIP and plain C++ as items, read by tree-sitter, which goes on after what it doesn't understand."""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from typing import Any

from nibblas.index import languages, parse_assembly
from nibblas.index.items import Item, ItemKind, Language, Parsed
from nibblas.index.positions import Mapped
from nibblas.index.rule import last_part

_LONGEST_VALUE = 2000
_LONGEST_PIECE = 1_000_000  # characters that are parsed at once: where all is broken, more takes tree-sitter minutes
_FEWEST_NUMBERS = 8
_NOT_ASCII = re.compile(r"[^\x01-\x7f]")
_IF_0 = re.compile(r"^[ \t]*#[ \t]*if[ \t]+(?:0|false)\b.*$", re.MULTILINE)
_CONDITIONAL = re.compile(r"^[ \t]*#[ \t]*(if|elif|else|endif)", re.MULTILINE)
_ESCAPE = re.compile(
    r"\\(?:(?P<newline>\r?\n)|(?P<octal>[0-7]{1,3})|x(?P<x>[\da-fA-F]{1,8})|u(?P<u>[\da-fA-F]{4})"
    r"|U(?P<U>[\da-fA-F]{8})|(?P<simple>[abfnrtv\\'\"?]))"
)
_SIMPLE = dict(zip("abfnrtv\\'\"?", "\a\b\f\n\r\t\v\\'\"?", strict=True))
_ARGUMENTS = re.compile(r"<[^()]*>")
_HIGHEST = 40  # nodes above a name that are looked at
_NOT_BLANK = re.compile(r"[^\r\n]")
_LONGEST_NAMES = 200  # of a string whose words may be names of functions
_WORD = re.compile(r"[A-Za-z_]\w*")
_QUALIFIED = re.compile(r"[A-Za-z_]\w*+(?:::[A-Za-z_]\w*+)*+")
_TAKES_TURNS = re.compile(r"%|\^\s*1\b|&\s*1\b")
# What in a declaration is worth a closer look: pointers, arrays, grids, tensors that stay, indices that take turns.
_TELLING = re.compile(r"[*\[%^&]|\bdim3\b|Tensor\b|map\b|device_vector")
_TENSOR = re.compile(r"\bTensor\b|\b(?:unordered_)?map\b|\bdevice_vector\b")
_MACRO = re.compile(r"[A-Z][A-Z0-9_]{3,}")
_FOR_DEVICES = re.compile(r"__device__|\b\w*DEVICE\w*\b")  # or a macro for it
_SPECIFIER = re.compile(r"__\w+__")
# Through these a name goes on being what their own parent makes of it, if it stands in the given field.
_PASSED = {
    "template_function": "name",
    "template_type": "name",
    "template_method": "name",
    "qualified_identifier": "name",
    "field_expression": "field",
    "dependent_type": None,
    "dependent_name": None,
    "array_declarator": "declarator",
    "init_declarator": "declarator",
    "pointer_declarator": "declarator",
    "reference_declarator": None,
    "parenthesized_declarator": None,
    "attributed_declarator": None,
    "function_declarator": "declarator",
}
_DEFINES = frozenset(("function_definition", "struct_specifier", "class_specifier", "preproc_function_def"))
_DECLARES = _DEFINES | {
    "declaration",
    "parameter_declaration",
    "optional_parameter_declaration",
    "field_declaration",
    "enumerator",
    "enum_specifier",
    "union_specifier",
    "preproc_def",
    "for_range_loop",
    "friend_declaration",
}
_TYPE_PARAMETERS = ("type_parameter_declaration", "optional_type_parameter_declaration")
_ALIASES = ("alias_declaration", "type_definition")
_MACROS = ("preproc_def", "preproc_function_def")

Aliases = dict[str, tuple[str, int]]  # name of a type -> the type that it stands for, and from which offset on
Ancestry = list[tuple[str, str | None, Any]]  # kind, field and node, from the root


def parse(source: Mapped, language: Language, wanted: Callable[[str], bool] = lambda name: True) -> Parsed:
    """The items of C++ source in any of its dialects. Of names only those that are wanted become items."""
    parsed = Parsed()
    aliases: Aliases = {}
    for start, end in _pieces(source.text):
        piece = source if end - start == len(source.text) else source.cut(start, end)
        _Reader(piece, language, wanted, parsed, aliases).read()
    return parsed


def value_of(literal: Mapped) -> Mapped:
    """The value of a string literal."""
    text = literal.text
    quote = text.find('"')
    if quote > 0 and text[quote - 1] == "R":
        start, end = text.find("(", quote) + 1, text.rfind(")")
        return literal.cut(start, max(end, start))
    inner = literal.cut(quote + 1, len(text) - text.endswith('"', quote + 1))
    return inner.unescaped(_escapes(inner.text)) if "\\" in inner.text else inner


def _escapes(text: str) -> Iterator[tuple[int, int, str]]:
    for found in _ESCAPE.finditer(text):
        group, code = found.lastgroup, found[found.lastgroup or 0]
        if group == "simple":
            yield found.start(), found.end(), _SIMPLE[code]
        elif group == "newline":
            yield found.start(), found.end(), ""
        else:
            number = int(code, 8 if group == "octal" else 16)
            yield found.start(), found.end(), chr(number) if number < 0x110000 else "_"


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """Parts of a text that end with a line and are not too long to parse at once."""
    start = 0
    while start < len(text):
        end = len(text)
        if end - start > _LONGEST_PIECE:
            end = start + _LONGEST_PIECE
            end = text.rfind("\n", start, end) + 1 or end
        yield start, end
        start = end


@cache
def _language():
    import tree_sitter
    import tree_sitter_cuda

    return tree_sitter.Language(tree_sitter_cuda.language())


class _Reader:
    def __init__(
        self, source: Mapped, language: Language, wanted: Callable[[str], bool], parsed: Parsed, aliases: Aliases
    ):
        self.source = source
        self.language = language
        self.wanted = wanted
        self.parsed = parsed
        self.aliases = aliases
        self.text = source.text
        self.starts: list[int] = [0]  # where the function changes
        self.functions: list[str] = [""]  # what it is from there on
        self.pointers: dict[str, str] = {}  # variable -> type that it points to, where that is wanted
        # By function and name: initial values of variables; places, first dimension of arrays and whether they are
        # shared; an index of such an array that takes turns.
        self.bound: dict[tuple[str, str], str] = {}
        self.arrays: dict[tuple[str, str], tuple[int, int, str, bool]] = {}
        self.indices: dict[tuple[str, str], str] = {}

    def read(self, function: str = "") -> None:
        """Add the items of the source; `function` is the one whose body it is."""
        import tree_sitter

        code = self._without_dead_code()
        tree = tree_sitter.Parser(_language()).parse(code.encode("ascii"))
        found = _nodes(tree)
        self._find_functions(found["function_definition"], function)
        for kind in _ALIASES:
            for node in found[kind]:
                self._alias(node)
        for kind in _MACROS:
            for node in found[kind]:
                self._macro(node)
        self._words(tree, _blanked(code, [node for kind in _NOT_CODE for node in found[kind]]))
        for kind, handler in _HANDLERS.items():
            for node in found[kind]:
                handler(self, node)
        self._find_alternating()

    def _find_functions(self, nodes: list, around: str) -> None:
        """Where each function begins and ends; `around` is what all of the source is part of."""
        starts, names = [0], [around]
        open_until: list[tuple[int, str]] = []

        def close(until: int) -> None:
            while open_until and open_until[-1][0] <= until:
                starts.append(open_until.pop()[0])
                names.append(open_until[-1][1] if open_until else around)

        for node in nodes:
            close(node.start_byte)
            if name := self._function(node):
                starts.append(node.start_byte)
                names.append(name)
                open_until.append((node.end_byte, name))
        close(len(self.text))
        self.starts, self.functions = starts, names

    def _meant(self, name: str, at: int | None = None) -> str:
        """The type that a name stands for at a place, or anywhere."""
        target, since = self.aliases.get(name, (name, 0))
        return target if at is None or since <= self.source.offset(at) else name

    def _function_at(self, offset: int) -> str:
        return self.functions[bisect_right(self.starts, offset) - 1]

    def _without_dead_code(self) -> str:
        """The text as tree-sitter gets it: one ASCII character for each, and blank where an #if 0 leaves code out."""
        text = self.text if self.text.isascii() and "\0" not in self.text else _NOT_ASCII.sub("_", self.text)
        pieces: list[str] = []
        done = 0
        for begin in _IF_0.finditer(text):
            if begin.start() < done:
                continue
            depth, end = 1, len(text)
            for line in _CONDITIONAL.finditer(text, begin.end()):
                depth += {"if": 1, "endif": -1}.get(line[1], 0)
                if depth == 0 or (depth == 1 and line[1] in ("else", "elif")):
                    end = line.start()
                    break
            self._lines("comment", begin.end(), end)
            pieces += (text[done : begin.end()], _NOT_BLANK.sub(" ", text[begin.end() : end]))
            done = end
        return "".join((*pieces, text[done:]))

    def _add(self, kind: ItemKind, text: str, start: int, end: int, value: str = "") -> None:
        first, last = self.source.span(start, end)
        function = self._function_at(start)
        self.parsed.items.append(Item(kind, text, first, last, self.language, function, value[:_LONGEST_VALUE]))

    def _lines(self, kind: ItemKind, start: int, end: int) -> None:
        """An item for each line of a comment or string."""
        while start < end:
            stop = self.text.find("\n", start, end)
            stop = end if stop < 0 else stop
            if line := self.text[start:stop].strip():
                at = self.text.index(line, start)
                self._add(kind, line, at, at + len(line))
            start = stop + 1

    def _comment(self, node) -> None:
        self._lines("comment", node.start_byte, node.end_byte)

    def _include(self, node) -> None:
        path = node.child_by_field_name("path")
        if path is not None:
            name = self.text[path.start_byte : path.end_byte].strip('<>" ')
            self._add("import", name, path.start_byte, path.end_byte)

    def _pragma(self, node) -> None:
        self._add("specifier", " ".join(self._of(node).split()), node.start_byte, node.end_byte)

    def _macro(self, node) -> None:
        """A macro: what it stands for is read as the body of a function of its name."""
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name is None:
            return
        text = self._of(name)
        self.parsed.defined.add(text)
        body = self.text[value.start_byte : value.end_byte].strip() if value is not None else ""
        words = set(_WORD.findall(body))
        self.parsed.names[text] |= words
        kind: ItemKind = "definition" if node.type == "preproc_function_def" else "binding"
        if self.wanted(text) or self.wanted(self._meant(body)):
            self._add(kind, text, name.start_byte, name.end_byte, body)
        if _WORD.fullmatch(body):
            self.aliases[text] = self._meant(body), self.source.offset(name.start_byte)
        elif value is not None and ('"' in body or any(map(self.wanted, words))):
            inner = self.source.cut(value.start_byte, value.end_byte)
            _Reader(inner, self.language, self.wanted, self.parsed, self.aliases).read(text)

    def _function(self, node) -> str:
        """The name of a function that is defined, in short: without namespace and template arguments."""
        declarator = node.child_by_field_name("declarator")
        while declarator is not None and declarator.type not in ("function_declarator", "operator_cast"):
            declarator = declarator.child_by_field_name("declarator") or _first(declarator, "function_declarator")
        name = declarator.child_by_field_name("declarator") if declarator is not None else None
        if name is None:
            return ""
        text = _ARGUMENTS.sub("", self._of(name)).rpartition("::")[2].strip()
        self.parsed.defined.add(text)
        before = self.text[max(node.start_byte - 200, 0) : name.start_byte]
        before = before[max(before.rfind(";"), before.rfind("}")) + 1 :]
        if "__global__" in before or not (_FOR_DEVICES.search(before) or "static" in before.split()):
            self.parsed.entries.add(text)
        if _MACRO.fullmatch(text) and node.child_by_field_name("type") is None:
            self.parsed.names[""].add(text)  # PYBIND11_MODULE and the like, which run when the module is loaded
        return text

    def _words(self, tree, code: str) -> None:
        """Every name that stands in code: for the functions that it may call, and as an item where it is wanted."""
        for start, end, function in zip(self.starts, [*self.starts[1:], len(code)], self.functions, strict=True):
            if function:
                self.parsed.names[function].update(_WORD.findall(code, start, end))
        words = {part for word in set(_QUALIFIED.findall(code)) for part in _parts(word)}
        wanted = {word for word in words if self.wanted(self._meant(word))}
        outside = (words & self.parsed.defined) if "" in self.functions else set()
        if not (wanted or outside):
            return
        path = _Path(tree)
        for found in _QUALIFIED.finditer(code):
            for word in _parts(found[0]):
                at = found.start() + len(word) - len(last_part(word))
                if word in wanted:
                    role = self._word(path.to(at), word, at)
                elif word in outside and not self._function_at(at):
                    role, _ = self._role(path.to(at))
                else:
                    continue
                if role not in ("binding", "definition") and not self._function_at(at):
                    self.parsed.names[""].add(last_part(word))

    def _word(self, path: Ancestry, word: str, start: int) -> ItemKind:
        """Add the item of a name, whose last part is at start."""
        if _SPECIFIER.fullmatch(word):
            self._specifier(word, start)
            return "specifier"
        role, declaration = self._role(path)
        end = start + len(last_part(word))
        resolved = self._meant(word, start) if role in ("type", "pointer", "alias", "name") else word
        value = ""
        if role == "name":
            value = self.text[self.text.rfind("\n", 0, start) + 1 : start + _LONGEST_VALUE].partition("\n")[0].strip()
        elif declaration is not None and role == "call":
            value = self.text[end : min(declaration.end_byte, end + _LONGEST_VALUE)]
        elif declaration is not None:
            begin = declaration.start_byte
            value = self.text[begin : begin + _LONGEST_VALUE].partition(";")[0]
            for declarator in declaration.children_by_field_name("declarator") if role == "type" else ():
                name, points, _ = self._declared(declarator)
                if points:
                    self.pointers[name] = resolved
        self._add(role, resolved, start, end, value)
        return role

    def _role(self, path: Ancestry) -> tuple[ItemKind, Any]:
        """What a name stands for, by where in the tree it stands, and the declaration or call that makes it that."""
        if not path or path[-1][0] == "namespace_identifier":
            return "name", None
        field = path[-1][1]
        defines = points = False
        for at in range(len(path) - 2, max(len(path) - _HIGHEST, -1), -1):
            kind, above, node = path[at]
            if kind in _PASSED:
                if _PASSED[kind] not in (None, field):
                    return "name", None
                defines = defines or kind == "function_declarator"
            elif kind == "call_expression":
                return ("call", node) if field == "function" else ("name", None)
            elif kind == "type_descriptor":
                points = _first(node, "abstract_pointer_declarator") is not None
                if field != "type":
                    return "name", None
            elif kind == "cast_expression":
                return ("pointer" if points and field == "type" else "name"), None
            elif kind == "template_argument_list":
                around = self.text[max(node.start_byte - 20, 0) : node.start_byte]
                return ("pointer" if points and around.endswith("_cast") else "name"), None
            elif kind in _TYPE_PARAMETERS:
                return "binding", node
            elif kind in _ALIASES:
                return ("alias" if field == "type" else "binding"), node
            elif kind == "using_declaration":
                return "import", None
            elif kind in _DECLARES:
                if field == "type":
                    return "type", node
                if field not in ("declarator", "name"):
                    return "name", None
                return ("definition" if defines or kind in _DEFINES else "binding"), node
            else:
                return "name", None
            field = above
        return "name", None

    def _specifier(self, name: str, at: int) -> None:
        """__shared__ and its like, with the declaration that it stands in."""
        start = max(self.text.rfind(end, 0, at) for end in ";{}") + 1
        declaration = self.text[start : start + _LONGEST_VALUE].partition(";")[0].strip()
        self._add("specifier", name, at, at + len(name), declaration)

    def _declaration(self, node) -> None:
        """What is known of the variables that a declaration makes."""
        whole = self.text[node.start_byte : min(node.end_byte, node.start_byte + _LONGEST_VALUE)]
        if not _TELLING.search(whole):
            return
        kind = node.child_by_field_name("type")
        type_text = self._of(kind) if kind is not None else ""
        target = self._meant(type_text, node.start_byte)
        function = self._function_at(node.start_byte)
        for declarator in node.children_by_field_name("declarator"):
            value = declarator.child_by_field_name("value") if declarator.type == "init_declarator" else None
            name, _, size = self._declared(declarator)
            if not name:
                continue
            if value is not None:
                self.bound[function, name] = self._of(value)
            if size:
                shared = "__shared__" in whole[: declarator.start_byte - node.start_byte]
                self.arrays[function, name] = (declarator.start_byte, declarator.end_byte, size, shared)
            if target == "dim3":
                self._add("grid", name, declarator.start_byte, declarator.end_byte, self._of(declarator))
            stays = (not function or "static" in whole.split()[:2]) and declarator.type != "function_declarator"
            if stays and _TENSOR.search(type_text):
                self._add("kept", name, node.start_byte, node.end_byte, whole)

    def _alias(self, node) -> None:
        kind = node.child_by_field_name("type")
        name = node.child_by_field_name("name") or node.child_by_field_name("declarator")
        if kind is not None and name is not None:
            target = self._of(kind).strip()
            self.aliases[self._of(name)] = self._meant(target), self.source.offset(name.start_byte)

    def _declared(self, declarator) -> tuple[str, bool, str]:
        """The name that a declarator declares, whether as a pointer, and its array's first dimension."""
        points, size = False, ""
        while declarator is not None and declarator.child_count:
            points = points or declarator.type == "pointer_declarator"
            if declarator.type == "array_declarator":
                inner = declarator.child_by_field_name("size")
                size = self._of(inner) if inner is not None else ""
            inner = declarator.child_by_field_name("declarator")
            declarator = inner or next(reversed(declarator.named_children), None)
        return (self._of(declarator) if declarator is not None else ""), points, size

    def _launch(self, node) -> None:
        call = node.parent
        name = call.child_by_field_name("function") if call is not None else None
        if name is not None:
            inside = self._of(node)[3:-3].strip()
            self._add("launch", _ARGUMENTS.sub("", self._of(name)), name.start_byte, name.end_byte, inside)
            if "dim3" in inside:
                self._add("grid", "", node.start_byte, node.end_byte, inside)

    def _subscript(self, node) -> None:
        argument, indices = node.child_by_field_name("argument"), node.child_by_field_name("indices")
        if argument is None or indices is None or argument.type != "identifier":
            return
        name, index = self._of(argument), self._of(indices)[1:-1].strip()
        self._dereferenced(name, node)
        function = self._function_at(node.start_byte)
        turns = index if _TAKES_TURNS.search(index) else self.bound.get((function, index), "")
        if (function, name) in self.arrays and _TAKES_TURNS.search(turns):
            self.indices.setdefault((function, name), index if turns == index else f"{index} = {turns}")

    def _dereference(self, node) -> None:
        argument = node.child_by_field_name("argument")
        if argument is not None and argument.type == "identifier" and self.text[node.start_byte] == "*":
            self._dereferenced(self._of(argument), node)

    def _dereferenced(self, name: str, node) -> None:
        if name in self.pointers:
            self._add("pointer", self.pointers[name], node.start_byte, node.end_byte)

    def _find_alternating(self) -> None:
        for (function, name), index in self.indices.items():
            start, end, size, shared = self.arrays[function, name]
            if shared or size == "2":
                self._add("alternating", name, start, end, index)

    def _comparison(self, node) -> None:
        operator = node.child_by_field_name("operator")
        if operator is None or operator.type != "==":
            return
        left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
        if left is not None and right is not None and "number_literal" in (left.type, right.type):
            self._add("equality", self._of(left), node.start_byte, node.end_byte, self._of(right))

    def _switch(self, node) -> None:
        condition, body = node.child_by_field_name("condition"), node.child_by_field_name("body")
        if condition is None or body is None:
            return
        for case in body.children:
            value = case.child_by_field_name("value") if case.type == "case_statement" else None
            if value is not None and value.type == "number_literal":
                self._add(
                    "equality", self._of(condition)[1:-1].strip(), case.start_byte, value.end_byte, self._of(value)
                )

    def _loop(self, node) -> None:
        body = node.child_by_field_name("body")
        end = body.start_byte if body is not None else node.end_byte
        head = " ".join(self.text[node.start_byte : min(end, node.start_byte + _LONGEST_VALUE)].split())
        self._add("loop", head, node.start_byte, end)

    def _list(self, node) -> None:
        if node.named_child_count < _FEWEST_NUMBERS:
            return
        numbers = [
            self._of(child) for child in node.named_children if child.type in ("number_literal", "unary_expression")
        ]
        if len(numbers) == node.named_child_count:
            self._add("numbers", ",".join(numbers), node.start_byte, node.end_byte)

    def _string(self, node) -> None:
        value = value_of(self.source.cut(node.start_byte, node.end_byte))
        function = self._function_at(node.start_byte)
        if languages.of_code(value.text):
            self.parsed.embedded.append((value, function))
            return
        self._lines("string", node.start_byte + 1, node.end_byte - 1)
        if len(value.text) < _LONGEST_NAMES:
            self.parsed.names[function].update(_WORD.findall(value.text))

    def _asm(self, node) -> None:
        code = node.child_by_field_name("assembly_code")
        if code is None:
            return
        parts = [code] if code.type in ("string_literal", "raw_string_literal") else code.children
        texts = [
            value_of(self.source.cut(part.start_byte, part.end_byte))
            for part in parts
            if part.type in ("string_literal", "raw_string_literal")
        ]
        value = Mapped.join(texts)
        self._add("asm", languages.of_assembler(value.text), node.start_byte, node.end_byte, value.text.strip())
        function, group = self._function_at(node.start_byte), self.source.offset(node.start_byte)
        self.parsed.items += parse_assembly.parse(value, function, group)

    def _of(self, node) -> str:
        """The text of a node, or its begin: a node that holds most of a file may stand inside of many like it."""
        return self.text[node.start_byte : min(node.end_byte, node.start_byte + _LONGEST_VALUE)]


class _Path:
    """Goes through a tree from one place to a later one, and never twice to the same node."""

    def __init__(self, tree):
        self.cursor = tree.walk()
        self.path: Ancestry = [(self.cursor.node.type, None, self.cursor.node)]
        self.done = False  # with the children of the last node

    def to(self, offset: int) -> Ancestry:
        """The innermost node at an offset that is not before the last one asked for, after its ancestors."""
        cursor, path = self.cursor, self.path
        while True:
            node = path[-1][2]
            if node.end_byte > offset:
                if self.done or node.start_byte > offset or not cursor.goto_first_child():
                    return path
            else:
                path.pop()
                if not cursor.goto_next_sibling():
                    if not cursor.goto_parent():
                        path.append((node.type, None, node))
                        return path
                    self.done = True
                    continue
                self.done = False
            node = cursor.node
            path.append((node.type, cursor.field_name, node))


def _parts(name: str) -> list[str]:
    """a::b::c -> a, a::b, a::b::c."""
    return [name[: mark.start()] for mark in re.finditer("::|$", name)] if "::" in name else [name]


def _blanked(text: str, nodes: list) -> str:
    """A text with blanks in the places of the nodes."""
    pieces: list[str] = []
    done = 0
    for node in sorted(nodes, key=attrgetter("start_byte")):
        if node.start_byte >= done:
            pieces += (text[done : node.start_byte], " " * (node.end_byte - node.start_byte))
            done = node.end_byte
    return "".join((*pieces, text[done:]))


def _first(node, kind: str):
    return next((child for child in node.children if child.type == kind), None)


# What is done with each kind of node, in this order: declarations before what is done with what they declare.
_HANDLERS: dict[str, Callable[[_Reader, Any], None]] = {
    "comment": _Reader._comment,
    "string_literal": _Reader._string,
    "raw_string_literal": _Reader._string,
    "gnu_asm_expression": _Reader._asm,
    "preproc_include": _Reader._include,
    "preproc_call": _Reader._pragma,
    "declaration": _Reader._declaration,
    "field_declaration": _Reader._declaration,
    "kernel_call_syntax": _Reader._launch,
    "subscript_expression": _Reader._subscript,
    "pointer_expression": _Reader._dereference,
    "binary_expression": _Reader._comparison,
    "switch_statement": _Reader._switch,
    "for_statement": _Reader._loop,
    "while_statement": _Reader._loop,
    "initializer_list": _Reader._list,
}
_NOT_CODE = ("comment", "string_literal", "raw_string_literal", "asm_string", "preproc_include", "preproc_arg")


@cache
def _kinds() -> dict[int, str]:
    """The kinds of node that something is done with, by their numbers."""
    names = {*_HANDLERS, *_ALIASES, *_MACROS, *_NOT_CODE, "function_definition"}
    kinds = ((number, _language().node_kind_for_id(number)) for number in range(_language().node_kind_count))
    return {number: name for number, name in kinds if name in names}


def _nodes(tree) -> defaultdict[str, list]:
    """The nodes of each kind, in order. Strings inside of asm are of the kind asm_string, those of #include of none.

    A query of tree-sitter's would do the same, in a time that grows with the square of the depth.
    """
    found, kinds = defaultdict(list), _kinds()
    cursor, asm_end = tree.walk(), 0
    while True:
        node = cursor.node
        kind = kinds.get(node.kind_id)
        if kind is not None:
            if kind == "gnu_asm_expression":
                asm_end = node.end_byte
            elif node.start_byte < asm_end and kind in ("string_literal", "raw_string_literal"):
                kind = "asm_string"
            found[kind].append(node)
        if kind != "preproc_include" and cursor.goto_first_child():
            continue
        while not cursor.goto_next_sibling():
            if not cursor.goto_parent():
                return found
