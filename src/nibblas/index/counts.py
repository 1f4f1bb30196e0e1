"""How much there is: by operation, workload, device and source. Each is a pass over the index, so Prepared keeps it."""

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from nibblas.index.documents import Coverage, HardwareLine, OperationLine, SourceLine
from nibblas.index.evidence_levels import NUMERICS, POLICY, TIMING
from nibblas.index.model import Source, kebab
from nibblas.index.store import made

if TYPE_CHECKING:
    from nibblas.index.catalog import Catalog


def operation_lines(catalog: "Catalog") -> dict[str, OperationLine]:
    """Operations by slug, those with most runs that passed first."""
    rows = catalog.all(
        """
        SELECT o.slug, o.name, o.family, i.n AS implementations, w.n AS workloads, r.n AS runs, r.observed_at
        FROM operation o
        LEFT JOIN (SELECT operation, count(*) AS n FROM implementation WHERE current GROUP BY operation) i
            ON i.operation = o.id
        LEFT JOIN (SELECT operation, count(*) AS n FROM workload GROUP BY operation) w ON w.operation = o.id
        LEFT JOIN (
            SELECT operation, count(*) AS n, max(observed_at) AS observed_at FROM run
            WHERE status = 'passed' GROUP BY operation
        ) r ON r.operation = o.id
        ORDER BY r.n IS NULL, r.n DESC, i.n DESC, o.slug
        """
    )
    return {
        row["slug"]: OperationLine(
            row["slug"],
            row["name"],
            row["family"],
            row["implementations"] or 0,
            row["workloads"] or 0,
            row["runs"] or 0,
            row["observed_at"],
        )
        for row in rows
    }


def workload_counts(catalog: "Catalog") -> dict[int, tuple[int, int]]:
    """Runs that passed and implementations of them, by the row id of a workload."""
    rows = catalog.all(
        "SELECT workload, count(*), count(DISTINCT implementation) FROM run"
        " WHERE workload IS NOT NULL AND status = 'passed' GROUP BY workload"
    )
    return {workload: (runs, implementations) for workload, runs, implementations in rows}


def source_lines(catalog: "Catalog") -> tuple[SourceLine, ...]:
    """Sources, those with most implementations first."""
    rows = catalog.all(
        """
        SELECT s.*, count(*) AS implementations, sum(i.may_show) AS shown, count(DISTINCT i.operation) AS operations,
            max(i.imported_at) AS imported_at, max(r.n) AS runs, max(r.devices) AS devices
        FROM source s
        JOIN implementation i ON i.source = s.id AND i.current
        LEFT JOIN (
            SELECT i.source, count(*) AS n, count(DISTINCT r.device) AS devices FROM run r
            JOIN implementation i ON i.id = r.implementation WHERE r.status = 'passed' GROUP BY i.source
        ) r ON r.source = s.id
        GROUP BY s.id ORDER BY implementations DESC, s.id
        """
    )
    return tuple(
        SourceLine(
            kebab(row["kind"], row["digest"][:12]),
            made(Source, row),
            row["implementations"],
            row["runs"] or 0,
            row["operations"],
            row["devices"] or 0,
            row["shown"],
            row["imported_at"],
        )
        for row in rows
    )


def coverage(catalog: "Catalog") -> Coverage:
    """Totals, and runs that passed by family and device."""
    (revisions,), (runs,), (operations,), (workloads,) = (
        catalog.all(f"SELECT count(*) FROM {table}")[0] for table in ("implementation", "run", "operation", "workload")
    )
    known = catalog.prepared.levels.values()
    by_numerics = Counter(levels.numerics for levels in known)
    by_timing = Counter(levels.timing for levels in known)
    grid: defaultdict[str, Counter[str]] = defaultdict(Counter)
    rows = catalog.all(
        "SELECT o.family, r.device, count(*) FROM run r JOIN operation o ON o.id = r.operation"
        " WHERE r.status = 'passed' AND r.device IS NOT NULL GROUP BY r.operation, r.device"
    )
    devices: Counter[str] = Counter()
    for family, device, n in rows:
        grid[family or "unknown"][device] += n
        devices[device] += n
    columns = tuple(device for device, _ in devices.most_common())
    families = sorted(grid, key=lambda family: (-grid[family].total(), family))
    return Coverage(
        len(known),
        revisions,
        runs,
        operations,
        workloads,
        {level: by_numerics[level] for level in NUMERICS},
        {level: by_timing[level] for level in TIMING},
        columns,
        tuple((family, tuple(grid[family][device] for device in columns)) for family in families),
        catalog.prepared.source_lines,
        POLICY,
    )


def hardware_lines(catalog: "Catalog") -> dict[str, HardwareLine]:
    """Devices by slug, those with most runs that passed first."""
    prepared = catalog.prepared
    rows = catalog.all(
        "SELECT r.device, count(*) AS runs, count(DISTINCT r.operation) AS operations,"
        " count(DISTINCT o.family) AS families, count(DISTINCT r.implementation) AS measured,"
        " max(r.observed_at) AS observed_at FROM run r JOIN operation o ON o.id = r.operation"
        " WHERE r.status = 'passed' AND r.device IS NOT NULL GROUP BY r.device"
    )
    by_name = {row["device"]: row for row in rows}
    found = []
    for device in prepared.devices.values():
        named = [by_name[name] for name in device.names if name in by_name]
        sets = prepared.answers[device.slug]
        found.append(
            HardwareLine(
                device.slug,
                device.name,
                device.hardware.vendor or None,
                device.hardware.arch or None,
                sum(row["runs"] for row in named),
                # A device that runs call by several names is rare: the largest is then the least that is true.
                max((row["operations"] for row in named), default=0),
                max((row["families"] for row in named), default=0),
                max((row["measured"] for row in named), default=0),
                sets.size("yes"),
                sets.size("no"),
                sets.size("unknown"),
                max((row["observed_at"] or "" for row in named), default="") or None,
            )
        )
    found.sort(key=lambda line: (-line.runs, -line.yes, line.name))
    return {line.slug: line for line in found}
