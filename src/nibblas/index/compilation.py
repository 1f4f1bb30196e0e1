"""Stored implementations compiled for an architecture: a fact of its own, and what machine code says of their findings.

That a source doesn't compile here is told and not stored, because it says as much of this machine as of the source.
"""

from dataclasses import dataclass

from nibblas.index import languages, machine_code
from nibblas.index.store import Store
from nibblas.index.techniques import find


@dataclass(frozen=True)
class Outcome:
    """What became of one file. confirmed and refuted count uses of techniques; both are None without a disassembler."""

    path: str
    arch: str
    compiler: str
    problem: str | None = None
    confirmed: int | None = None
    refuted: int | None = None


def compile_stored(store: Store, name: str, arch: str) -> list[Outcome]:
    """Compile each file with device code of the current revision of a slug, or of the revision with a digest.

    KeyError where there is none of this name, ValueError where none of its files holds CUDA, RuntimeError without a
    compiler.
    """
    implementation = store.implementation(name)
    outcomes = []
    for file in implementation.files:
        if languages.of_path(file.path) not in ("python", "cuda", "c++"):
            continue
        text = store.content(file.sha256).decode(errors="replace")
        try:
            made = machine_code.compiled(file.path, text, arch)
        except ValueError:  # it holds no CUDA
            continue
        outcomes.append(_kept(store, implementation.digest, file.path, text, made))
    if not outcomes:
        raise ValueError(
            f"{name}: none of its files holds CUDA, so there is nothing that can be compiled without running it"
        )
    return outcomes


def _kept(store: Store, digest: str, path: str, text: str, made: machine_code.Compiled) -> Outcome:
    fact = made.fact(path)
    if fact is None or made.cubin is None:
        return Outcome(path, made.arch, made.compiler, made.problem)
    answers: list[machine_code.Confirmation] | None = None
    if machine_code.disassembler():
        findings = [finding for finding in find(path, text) if made.holds(finding)]
        answers = machine_code.confirm(findings, machine_code.disassembled(made.cubin))
    with store.transaction():
        store.attach(digest, [], [fact])
        for answer in answers or ():
            store.confirm(digest, path, answer, f"{made.compiler} for {made.arch}")
    states = None if answers is None else [answer.state for answer in answers]
    return Outcome(
        path,
        made.arch,
        made.compiler,
        confirmed=None if states is None else states.count("confirmed"),
        refuted=None if states is None else states.count("refuted"),
    )
