"""What a parser finds in a source, in one form for all languages, for rules to look at."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from nibblas.index.positions import Mapped

Language = Literal["python", "cuda", "hip", "c++", "c", "ptx", "gcn", "text"]
# Each with what its `text` and `value` are.
ItemKind = Literal[
    "call",  # the function's name; its arguments
    "launch",  # the kernel's name; what stands between <<< and >>>, or in the brackets
    "keyword",  # the name of a keyword argument, or a string that is a key; its value
    "decorator",  # its name; its arguments
    "import",  # the module, or the included file
    "definition",  # the name of a function, class or macro that is defined or declared here
    "binding",  # the name of a parameter, variable, field or alias; its type and what it is bound to
    "alias",  # a type that is given another name; that name
    "type",  # a type that a parameter, variable or field is declared with; the name declared
    "name",  # any other name
    "specifier",  # __shared__, __launch_bounds__, #pragma unroll ...; the declaration
    "pointer",  # the type that a pointer is cast to or dereferenced as
    "equality",  # the left side; the right side
    "loop",  # the head of a loop
    "grid",  # the name; the grid's dimensions
    "table",  # the name of a dict by tuples of whole numbers; its first key
    "numbers",  # a list of at least 8 numbers
    "kept",  # a name that outlives the call that binds it; what it holds, and what that was made from
    "container",  # where such a name is made, empty; what it comes to hold
    "made",  # a name that the module itself binds and functions read; what it holds
    "alternating",  # the name of an array in shared memory; the index that takes turns
    "asm",  # the assembler of an inline statement: ptx or gcn
    "instruction",  # an instruction and its operands
    "qualifier",  # one qualifier of an instruction
    "register",  # a register's type
    "comment",
    "string",
]


class Item(NamedTuple):
    """One piece of a source, from start to before end in the file; `group` is the same for one asm statement."""

    kind: ItemKind
    text: str
    start: int
    end: int
    language: Language
    function: str = ""  # the innermost function it stands in
    value: str = ""
    group: int = -1


@dataclass
class Parsed:
    """What a parser hands back.

    `names` holds the names that stand in the body of each function, and under "" those at the top. `entries` are
    functions that something outside of the source can call. `embedded` are texts in which more source may lie, each
    with the function it stands in; `declarations` are names that are declared without a body.
    """

    items: list[Item] = field(default_factory=list)
    names: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    defined: set[str] = field(default_factory=set)
    entries: set[str] = field(default_factory=set)
    embedded: list[tuple[Mapped, str] | None] = field(default_factory=list)
