"""What a source needs, read from it line by line, and whether an implementation runs on a device.

Five kinds of fact stay apart and none becomes another: what its source declares, what the source requires, what it was
compiled for, where it was measured, and where it was refused. Only a measurement on a device makes a yes; only what
can't be there, or a refusal, makes a no; all else is unknown, with the nearest fact as the reason.
"""

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from nibblas.index.items import Item
from nibblas.index.model import CompatFact
from nibblas.index.parse import Source, read
from nibblas.index.rule import matching, tables
from nibblas.targets import parsed, runs

RequirementKind = Literal["build", "instruction", "vendor", "package", "toolkit", "native"]
DATA = Path(__file__).with_name("hardware.toml")
# What a build names: nvcc's and hipcc's flags, and the lists of torch's builds.
_FLAG = re.compile(
    r"(?:code|arch|gpu-architecture|gpu-code)[= ]\[?(?P<nvcc>(?:(?:sm|compute|lto)_\d+[af]?,?)+)"
    r"|(?P<sm>^(?:sm|compute)_\d+[af]?$)"
    r"|offload-arch=(?P<hip>gfx[0-9a-f]+)|(?P<gfx>^gfx[0-9a-f]{3,4}$)"
)
_ARCH_LIST = re.compile(r"\d+\.\d[af]?(?:\+PTX)?(?:[; ]\d+\.\d[af]?(?:\+PTX)?)*|gfx[0-9a-f]+(?:;gfx[0-9a-f]+)*")
_LIST_NAMES = re.compile(r"TORCH_CUDA_ARCH_LIST|PYTORCH_ROCM_ARCH")
_PIN = re.compile(
    r"\b(?P<package>[A-Za-z][\w.-]*)\s*(?P<pin>(?:==|>=|~=|<=|<|>)\s*\d[\w.*]*(?:\s*,\s*[<>=!~]=?\s*\d[\w.*]*)*)"
)
_DIRECTIVE = re.compile(r"^#!POPCORN\s+gpus?\s+(?P<gpus>.+)", re.IGNORECASE)
_CONDITION = re.compile(r"^[ \t]*#[ \t]*(?P<what>ifdef|ifndef|if|elif|else|endif)\b(?P<of>[^\r\n]*)", re.MULTILINE)
_ALTERNATIVE = re.compile(r"^[ \t]*#[ \t]*el", re.MULTILINE)
# What stands in a line before a string that is compared with something, or told to somebody.
_SAID_OR_ASKED = re.compile(
    r"^\s*(?:(?:if|elif|while|assert|case|raise|throw)\b[^:]*"
    r"|(?:[\w.]+\.)?(?:f?printf?|warn|warning|info|debug|error|exception|skip|TORCH_CHECK)\(.*)$|[=!]=\s*$"
)
_IMPORTS = re.compile(r"(?:import|from)\b")
_BY_ARCH = re.compile(r"__CUDA_ARCH|__gfx|_ARCH_|SM\d+_ENABLED|__HIP_|__AMDGCN|USE_ROCM")
_VENDORS = {"nvidia": "NVIDIA devices", "amd": "AMD devices"}
_LONGEST_SNIPPET = 200
# The first toolkit that can build for an architecture: CUDA Toolkit Release Notes.
_TOOLKITS = {
    "89": "11.8",
    "90": "11.8",
    "90a": "12.0",
    "100": "12.8",
    "120": "12.8",
    "103": "12.9",
    "121": "12.9",
    "110": "13.0",
}


@dataclass(frozen=True)
class Requirement:
    """Something that a source needs, with the line that says so; line and column count from 1.

    kind : build (what its flags compile for), instruction, vendor, package, toolkit; native is what it would run on as
        it promises, while it runs elsewhere too.
    arch : architectures, any of which will do, as in requirements.toml; None where it isn't about one.
    needs : a package or toolkit with its versions, "triton", "cuda>=12.8".
    certain : False where the line is one of several ways: an import that may fail, code for some architectures only,
        one side of an #else.
    """

    rule: str
    version: int
    kind: RequirementKind
    line: int
    column: int
    snippet: str
    reason: str
    arch: str | None = None
    needs: str | None = None
    certain: bool = True

    def fact(self, path: str | None = None) -> CompatFact:
        """The same as one of the five kinds of fact."""
        reason = self.reason if self.certain else f"{self.reason}; it is one of several ways"
        return CompatFact("required", arch=self.arch, needs=self.needs, reason=reason, path=path, line=self.line)


@dataclass(frozen=True)
class Hardware:
    """A device; `source` is where its architecture is public."""

    name: str
    vendor: str
    arch: str
    source: str


@dataclass(frozen=True)
class Architecture:
    """What devices of an architecture have, of that which sources ask for."""

    arch: str
    name: str
    features: tuple[str, ...]
    source: str


class Answer(NamedTuple):
    """Whether an implementation runs on a device, why, and the line of source that says so."""

    answer: Literal["yes", "no", "unknown"]
    reason: str
    path: str | None = None
    line: int | None = None


@cache
def hardware() -> dict[str, Hardware]:
    """Every known device by its name."""
    return {table["name"]: Hardware(**table) for table in _data()["device"]}


@cache
def architectures() -> dict[str, Architecture]:
    """Every known architecture."""
    found = [Architecture(**{**table, "features": tuple(table["features"])}) for table in _data()["architecture"]]
    return {architecture.arch: architecture for architecture in found}


@cache
def _data() -> dict:
    return tomllib.loads(DATA.read_text(encoding="utf-8"))


@lru_cache(1024)
def device(name: str) -> Hardware | None:
    """The known device that a product's name means: "NVIDIA H200", "h200", "AMD Instinct MI355X OAM"."""
    words = _words(name)
    known = sorted(hardware().values(), key=lambda one: -len(one.name))
    return next((one for one in known if _words(one.name) <= words), None)


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z]+\d\w*|\d+\w*|[a-z]+", name.lower()))


@lru_cache(4096)
def covers(arch: str, device_arch: str) -> bool:
    """Whether one of the alternatives of `arch` has a device of an architecture like "sm_90" or "gfx950" in it."""
    vendors = {"nvidia": "sm_", "amd": "gfx"}
    return any(
        device_arch.startswith(vendors[one]) if one in vendors else runs(one, device_arch) for one in arch.split()
    )


def required(path: str, text: str) -> list[Requirement]:
    """Everything that a file needs, by line; the path's suffix tells its language. Only code that is used counts."""
    source = read(path, text)
    guarded = _guarded(text)
    found: dict[tuple, Requirement] = {}
    for item in source.items:
        for requirement in _of(item, source, guarded):
            same = (requirement.rule, requirement.arch, requirement.needs, requirement.certain)
            found.setdefault(same, requirement)
    return sorted(found.values(), key=lambda one: (one.line, one.column))


def declared(path: str, text: str) -> list[CompatFact]:
    """The devices that a submission says it is for, in its own directives."""
    facts = []
    for number, line in enumerate(text.split("\n")[:50], 1):
        if found := _DIRECTIVE.match(line):
            for gpu in re.split(r"[\s,;]+", found["gpus"].strip()):
                facts.append(CompatFact("declared", gpu=gpu, reason=line.strip(), path=path, line=number))
    return facts


def _of(item: Item, source: Source, guarded: list[tuple[int, int]]) -> Iterator[Requirement]:
    if item.kind == "string":
        yield from _flags(item, source)
    elif item.kind == "comment":
        yield from _pins(item, source)
    elif item.kind == "import" and item.language == "python":
        yield from _package(item, source)
    if item.function in source.dead:
        return
    for rule in matching("requirement", item):
        data = rule.data
        certain = not any(start <= item.start < end for start, end in guarded)
        arch, needs = data.get("arch"), data.get("needs")
        if data.get("native"):
            kind: RequirementKind = "native"
        elif needs:
            kind = "toolkit"
        else:
            kind = "vendor" if arch in ("nvidia", "amd") else "instruction"
        what = rule.described(item)
        reason = (
            f"{what} needs {_said(arch) if arch else needs}"
            if kind != "native"
            else f"{what} is native on {_said(arch)}"
        )
        yield _requirement(item, source, rule.id, rule.version, kind, reason, arch, needs, certain)


def _requirement(
    item: Item,
    source: Source,
    rule: str,
    version: int,
    kind: RequirementKind,
    reason: str,
    arch: str | None = None,
    needs: str | None = None,
    certain: bool = True,
) -> Requirement:
    line, column = source.lines.position(item.start)
    snippet = source.lines.line(line).strip()[:_LONGEST_SNIPPET]
    return Requirement(rule, version, kind, line, column, snippet, reason, arch, needs, certain)


def _flags(item: Item, source: Source) -> Iterator[Requirement]:
    """The architectures that a compiler's flag names. PTX runs on later devices too, and so does -arch=sm_90."""
    if "sm_" not in item.text and "compute_" not in item.text and "gfx" not in item.text and "." not in item.text:
        return
    archs: list[str] = []
    for found in _FLAG.finditer(item.text):
        if nvidia := found["nvcc"] or found["sm"]:
            names = [name for name in nvidia.split(",") if name]
            if found[0].startswith("arch") and "code" in item.text[found.end() : found.end() + 8]:
                continue  # arch= beside code= names what is compiled first, not what comes of it
            later = found[0].startswith(("arch", "gpu-architecture")) and "code=" not in item.text
            archs += [_later(name) if later or name.startswith("compute") else name for name in names]
        else:
            archs.append(found["hip"] or found["gfx"])
    if not archs and _ARCH_LIST.fullmatch(item.text) and _LIST_NAMES.search(source.lines.line(_line(item, source))):
        for name in re.split(r"[; ]", item.text):
            number = name.removesuffix("+PTX").replace(".", "")
            archs.append(
                name if name.startswith("gfx") else _later(f"sm_{number}") if "+PTX" in name else f"sm_{number}"
            )
    if archs and not _is_said_or_asked(item, source):
        arch = " ".join(dict.fromkeys(archs))
        yield _requirement(item, source, "build-flag", 2, "build", f"built for {_said(arch)}", arch)
        for toolkit in {toolkit for name in archs if (toolkit := _toolkit(name))}:
            reason = f"building for {_said(arch)} needs CUDA {toolkit}"
            yield _requirement(item, source, "build-toolkit", 2, "toolkit", reason, needs=f"cuda>={toolkit}")


def _is_said_or_asked(item: Item, source: Source) -> bool:
    number, column = source.lines.position(item.start)
    before = source.lines.line(number)[: column - 1].rstrip("\"'rRbBuUfF")
    if not before.strip() and number > 1:  # a string that begins its line goes on with the statement above
        before = source.lines.line(number - 1).rstrip()
    return _SAID_OR_ASKED.search(before) is not None


def _line(item: Item, source: Source) -> int:
    return source.lines.position(item.start)[0]


def _later(name: str) -> str:
    return name if name[-1] in "af" else f"sm_{name.partition('_')[2]}+"


def _toolkit(name: str) -> str | None:
    target = parsed(name)
    if target is None:
        return None
    return _TOOLKITS.get(f"{target.number}{target.suffix}") or _TOOLKITS.get(f"{target.number}")


def _pins(item: Item, source: Source) -> Iterator[Requirement]:
    """Versions that a comment asks for, of packages that are known or that the file imports."""
    for found in _PIN.finditer(item.text):
        known = {package["package"].lower(): package["package"] for package in tables("package")}
        package = known.get(found["package"].lower().replace("_", "-")) or known.get(found["package"].lower())
        if package:
            needs = package + re.sub(r"\s+", "", found["pin"])
            yield _requirement(item, source, "pin", 1, "package", f"a comment asks for {needs}", needs=needs)


def _package(item: Item, source: Source) -> Iterator[Requirement]:
    module = item.text.partition(".")[0]
    if not module or module in sys.stdlib_module_names:
        return
    for package in tables("package"):
        if package["module"] == module:
            # An import that doesn't begin at the margin stands under a condition, or in a function.
            certain = _IMPORTS.match(source.lines.line(_line(item, source))) is not None
            arch, needs = package.get("arch"), package["package"]
            kind: RequirementKind = "vendor" if arch else "package"
            reason = f"imports {module}" + (f", which is for {_said(arch)}" if arch else "")
            yield _requirement(item, source, "import", 2, kind, reason, arch, needs, certain)


def _guarded(text: str) -> list[tuple[int, int]]:
    """Where the preprocessor takes code for some architectures only, or one of several ways."""
    if "#" not in text or not (_BY_ARCH.search(text) or _ALTERNATIVE.search(text)):
        return []
    found: list[tuple[int, int]] = []
    opened: list[tuple[int, bool]] = []
    for line in _CONDITION.finditer(text):
        what, by_arch = line["what"], bool(_BY_ARCH.search(line["of"]))
        if what.startswith("if"):
            opened.append((line.end(), by_arch))
        elif opened:
            start, was = opened.pop()
            if was or what != "endif":
                found.append((start, line.start()))
            if what != "endif":
                opened.append((line.end(), True))
    return found


def _said(arch: str | None) -> str:
    """Alternatives in words."""
    parts = [f"{one[:-1]} or later" if one.endswith("+") else _VENDORS.get(one, one) for one in (arch or "").split()]
    return ", ".join(parts[:-1]) + (" or " if len(parts) > 1 else "") + parts[-1] if parts else "nothing known"


def runs_on(
    requirements: Iterable[tuple[str, Requirement]], facts: Iterable[CompatFact], on: Hardware, name: str | None = None
) -> Answer:
    """Whether an implementation runs on a device.

    Parameters
    ----------
    requirements : of its files, each with the file's path.
    facts : all others: declared, compiled, measured, refused.
    on : the device.
    name : what a sentence calls it, where that isn't its own name.
    """
    name, facts = name or on.name, list(facts)
    needs = [(path, one) for path, one in requirements if one.arch and one.certain]
    measured = [fact for fact in facts if fact.kind == "measured"]
    refused = [fact for fact in facts if fact.kind == "refused" and (_is(fact, on) or _is_arch(fact, on))]
    ran = next((fact for fact in measured if _is(fact, on)), None)
    if ran and refused:
        return Answer(
            "unknown", f"It ran on {name}, and was refused there: {refused[0].reason or 'no reason is kept'}."
        )
    if ran:
        return Answer("yes", f"It ran on {name}{_because(ran)}.", ran.path, ran.line)
    if refused:
        return Answer("no", f"It was refused on {name}{_because(refused[0])}.", refused[0].path, refused[0].line)
    if no := _forbids(needs, on, name):
        return no
    hint = _nearest(needs, facts, on, name)
    return hint or Answer("unknown", f"Nothing that was read forbids it, and it was never run on {name}.")


def _forbids(needs: list[tuple[str, Requirement]], on: Hardware, name: str) -> Answer | None:
    builds = [(path, one) for path, one in needs if one.kind == "build"]
    if builds and not any(covers(one.arch or "", on.arch) for _, one in builds):
        path, one = builds[0]
        every = _said(" ".join(dict.fromkeys(arch for _, build in builds for arch in (build.arch or "").split())))
        return Answer("no", f"Line {one.line}: built for {every}; {name} is {on.arch}.", path, one.line)
    hard = [(path, one) for path, one in needs if one.kind in ("instruction", "vendor")]
    against = [(path, one) for path, one in hard if not covers(one.arch or "", on.arch)]
    if not against:
        return None
    path, one = against[0]
    if any(all(covers(other.arch or "", arch) for _, other in hard) for arch in architectures()):
        return Answer("no", f"Line {one.line}: {one.reason}; {name} is {on.arch}.", path, one.line)
    why = f"It holds code for several architectures. Line {one.line}: {one.reason}; {name} is {on.arch}."
    return Answer("unknown", why, path, one.line)


def _nearest(needs: list[tuple[str, Requirement]], facts: list[CompatFact], on: Hardware, name: str) -> Answer | None:
    """The fact that says most, where none decides."""
    for fact in facts:
        if fact.kind == "measured" and fact.gpu and (known := device(fact.gpu)) and known.arch == on.arch:
            return Answer(
                "unknown", f"It ran on {fact.gpu}, of the same architecture; never on {name}.", fact.path, fact.line
            )
    for fact in facts:
        if fact.kind == "compiled" and fact.arch and covers(fact.arch, on.arch):
            why = f"It was compiled for {_said(fact.arch)}{_because(fact)}, and never run on {name}."
            return Answer("unknown", why, fact.path, fact.line)
    for path, one in needs:
        if one.kind == "native" and not covers(one.arch or "", on.arch):
            why = f"Line {one.line}: {one.reason}; {name} is {on.arch} and does it otherwise. It was never run there."
            return Answer("unknown", why, path, one.line)
    for fact in facts:
        if fact.kind == "declared" and _is(fact, on):
            return Answer(
                "unknown", f"Its source declares {fact.gpu}, and it was never run there.", fact.path, fact.line
            )
    return None


def _is(fact: CompatFact, on: Hardware) -> bool:
    return fact.gpu is not None and device(fact.gpu) == on


def _is_arch(fact: CompatFact, on: Hardware) -> bool:
    return fact.gpu is None and fact.arch is not None and covers(fact.arch, on.arch)


def _because(fact: CompatFact) -> str:
    return f": {fact.reason}" if fact.reason else ""
