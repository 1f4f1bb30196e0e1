"""How a run of the arena is done, as its user asks for it."""

from dataclasses import dataclass

from nibblas.arena.record import Dialect, Mode, StandInChoice

BUDGET = 30.0  # seconds for one benchmark case


@dataclass(frozen=True)
class Options:
    """How a run is done. `seed` replaces the public seeds of the cases, to look into one; `budget` is per case."""

    mode: Mode = "test"
    device: str = "cpu"
    threads: int | None = None
    seed: int | None = None
    budget: float = BUDGET
    hardened: bool = False
    dialect: Dialect = "nibblas"
    stand_ins: StandInChoice = "auto"
    command: str = ""
