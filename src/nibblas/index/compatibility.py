"""Whether implementations run on devices: of one with the lines that say so, of all by what they have in common."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nibblas.index import compat
from nibblas.index.compat import Answer, Hardware, Requirement
from nibblas.index.model import CompatFact, FactKind
from nibblas.index.names import device_slug

if TYPE_CHECKING:
    from nibblas.index.catalog import Catalog

# What a run says of the device that it took place on, by its status.
RUN_FACTS: dict[str, FactKind] = {"passed": "measured", "compiled": "compiled", "incompatible": "refused"}
CLAIMED = "its source says so"
# All that decides on the answers, and the implementations that have it in common.
ALIKE = """
WITH needs AS MATERIALIZED (
    SELECT f.implementation AS key,
        json_group_array(DISTINCT json_array(finding.body ->> 'kind', finding.body ->> 'arch')) AS found
    FROM finding JOIN implementation_file f ON f.scan = finding.scan
    WHERE finding.topic = 'requirement' AND finding.body ->> 'arch' IS NOT NULL
        AND coalesce(finding.body ->> 'certain', 1)
    GROUP BY f.implementation
), facts AS MATERIALIZED (
    SELECT implementation AS key, json_group_array(DISTINCT json_array(kind, gpu, arch)) AS found
    FROM compat WHERE gpu IS NOT NULL OR arch IS NOT NULL GROUP BY implementation
), ran AS MATERIALIZED (
    SELECT r.implementation AS key, json_group_array(DISTINCT json_array(r.status, r.device, e.arch)) AS found
    FROM run r JOIN environment e ON e.id = r.environment
    WHERE r.status IN ('passed', 'compiled', 'incompatible') GROUP BY r.implementation
)
SELECT coalesce(needs.found, '[]') AS needs, coalesce(facts.found, '[]') AS facts, coalesce(ran.found, '[]') AS ran,
    json_group_array(i.id) AS ids
FROM implementation i
LEFT JOIN needs ON needs.key = i.id LEFT JOIN facts ON facts.key = i.id LEFT JOIN ran ON ran.key = i.id
WHERE i.current GROUP BY 1, 2, 3
"""


@dataclass(frozen=True)
class Device:
    """A device of the hardware table, or one that only runs name.

    Parameters
    ----------
    hardware : its entry, or one made of what runs say.
    listed : whether it is in the table.
    names : what runs call it.
    """

    slug: str
    name: str
    hardware: Hardware
    listed: bool
    names: tuple[str, ...]

    def answer(self, needs: Iterable[tuple[str, Requirement]], facts: Sequence[CompatFact]) -> Answer:
        """Whether an implementation runs on it, from the requirements of its files and all other facts, weighed."""
        if self.listed:
            return compat.runs_on(needs, facts, self.hardware, self.name)
        # The table doesn't know it, so that only the name tells where something ran.
        ran = next((fact for fact in facts if fact.kind == "measured" and fact.gpu in self.names), None)
        if ran:
            return Answer("yes", f"It ran on {self.name}{f': {ran.reason}' if ran.reason else ''}.", ran.path, ran.line)
        elsewhere = [fact for fact in facts if fact.kind != "measured"]
        return compat.runs_on(needs, elsewhere, self.hardware, self.name)


def weighed(facts: Iterable[CompatFact]) -> list[CompatFact]:
    """The facts as answers look at them: what was seen here goes before somebody's word, which is called that."""
    found = [replace(fact, reason=fact.reason or CLAIMED) if fact.claimed else fact for fact in facts]
    return sorted(found, key=lambda fact: fact.claimed)


def devices(catalog: "Catalog") -> dict[str, Device]:
    """Every device of the table and every other that a run names, by slug."""
    found = {}
    for entry in compat.hardware().values():
        name = f"{entry.vendor} {entry.name}"
        found[device_slug(name)] = Device(device_slug(name), name, entry, True, ())
    by_entry = {device.hardware: slug for slug, device in found.items()}
    rows = catalog.all("SELECT device, max(arch) AS arch FROM environment WHERE device IS NOT NULL GROUP BY device")
    for name, arch in rows:
        known = compat.device(name)
        slug = by_entry[known] if known else device_slug(name)
        if slug in found:
            found[slug] = replace(found[slug], names=(*found[slug].names, name))
        elif slug:
            found[slug] = Device(slug, name, Hardware(name, "", arch or "", "the runs that name it"), False, (name,))
    return found


def device_of(known: dict[str, Device], name: str) -> Device | None:
    """A device by its slug or by any name that means it."""
    found = known.get(device_slug(name))
    if found:
        return found
    entry = compat.device(name)
    return next((device for device in known.values() if device.listed and device.hardware == entry), None)


def fact_of_run(status: str, device: str | None, arch: str | None, claimed: bool = False) -> CompatFact | None:
    """What a run says of where it took place; None for a status that says nothing of that."""
    kind = RUN_FACTS.get(status)
    if kind is None:
        return None
    return CompatFact(kind, None if kind == "compiled" else device, arch, claimed=claimed)


def answers(catalog: "Catalog", known: Iterable[Device]) -> dict[str, dict[str, list[int]]]:
    """Row ids of the current implementations by the answer for each device, by the device's slug."""
    known = list(known)
    found: dict[str, dict[str, list[int]]] = {device.slug: defaultdict(list) for device in known}
    for row in catalog.all(ALIKE):
        needs = [("", _requirement(*need)) for need in json.loads(row["needs"])]
        facts = [CompatFact(*fact) for fact in json.loads(row["facts"])]
        facts += [fact for run in json.loads(row["ran"]) if (fact := fact_of_run(*run))]
        ids = json.loads(row["ids"])
        for device in known:
            found[device.slug][device.answer(needs, facts).answer] += ids
    return found


def _requirement(kind: Any, arch: str) -> Requirement:
    return Requirement("", 0, kind, 0, 0, "", "it needs that", arch)
