"""The shapes of KernelIndex's public API, version 1, for those reads that this index has too.

Names are its own (SamMausberg/KernelIndex, Apache-2.0). What this index says beside stands under "nibblas", where its
clients don't look: the whole document, or in lists what they lack.
"""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

Evidence = Literal["verified", "replicated", "reproducible", "reported"]
Status = Literal[
    "passed",
    "incorrect_shape",
    "incorrect_dtype",
    "incorrect_numerical",
    "compile_error",
    "runtime_error",
    "timeout",
    "resource_exceeded",
    "invalid_reference",
    "policy_violation",
    "suspected_reward_hack",
    "incomplete_evidence",
    "revoked",
]
Profile = Literal["source_native", "strict_exact", "controlled_equivalent", "compatible_workload", "reported"]


class Named(TypedDict):
    """Something with a page."""

    name: str
    slug: str


class Uncertainty(TypedDict):
    """An interval."""

    low: float
    high: float


class Primary(TypedDict):
    """The figure of a run that ranks; seconds have the unit "s"."""

    metric: str
    unit: str
    statistic: str
    value: float
    sampleCount: int | None
    uncertainty: Uncertainty | None


class Install(TypedDict):
    """How to install."""

    kind: str
    command: str


class Hardware(TypedDict):
    """A device."""

    model: str
    architecture: str | None


class LicencePair(TypedDict):
    """Declared and concluded."""

    declared: str | None
    concluded: str | None


class Mismatch(TypedDict):
    """A facet that was asked for and isn't so."""

    field: str
    requested: str
    observed: str


class ResultRow(TypedDict):
    """An implementation with one of its runs."""

    runId: str | None
    implementation: Named
    install: Install | None
    project: Named
    revision: str | None
    operation: Named
    workloadSummary: str
    hardware: Hardware
    framework: str | None
    language: str | None
    primary: Primary | None
    solScore: float | None
    baseline: bool
    evidence: Evidence | None
    match: Literal["exact", "compatible", "supported_unobserved", "related"]
    mismatches: list[Mismatch]
    rank: int | None
    tiedWithPrevious: bool
    cohortSize: int | None
    sourceAvailable: bool
    installable: bool
    license: LicencePair
    lastTestedAt: str | None
    indexedAt: str | None
    stale: bool
    disputed: bool
    caveats: list[str]
    attestations: int


class KeyValue(TypedDict):
    """One fact."""

    key: str
    value: str


class Cohort(TypedDict):
    """What the ranked runs have in common."""

    comparisonKey: str
    profile: Profile
    description: str
    facts: list[KeyValue]


class Head(TypedDict):
    """The fastest of a cohort."""

    runId: str
    implementation: Named
    primary: Primary


class CohortOption(TypedDict):
    """A cohort that can be chosen."""

    key: str
    label: str
    runs: int
    head: Head | None


class Groups(TypedDict):
    """What was found, by how well it fits."""

    exact: list[ResultRow]
    compatible: list[ResultRow]
    supportedUnmeasured: list[ResultRow]
    reported: list[ResultRow]


class Overflow(TypedDict):
    """How many of each group were left out."""

    exact: int
    compatible: int
    supportedUnmeasured: int
    reported: int


class OperationMatch(TypedDict):
    """An operation among several that a search fits."""

    name: str
    slug: str
    family: str
    aliases: list[str]
    runs: int
    lastObservedAt: str | None


class SourceRef(TypedDict):
    """Where something came from."""

    name: str
    kind: str
    url: str | None
    license: str | None
    externalId: str | None
    observedAt: str | None


class Search(TypedDict):
    """The answer to a search."""

    query: str
    interpretation: str
    mode: Literal["exact", "chooser", "browse", "none"]
    operation: Named | None
    policyVersion: str
    cohort: Cohort | None
    cohortOptions: list[CohortOption]
    bestVerified: ResultRow | None
    bestDeployable: ResultRow | None
    groups: Groups
    overflow: Overflow
    matches: list[OperationMatch] | None
    nearest: None
    sources: list[SourceRef]
    generatedAt: str
    nibblas: Any


class Argument(TypedDict):
    """A tensor of an operation."""

    name: str
    dtype: str
    shape: str
    layout: str | None


class Axis(TypedDict):
    """A size of an operation."""

    name: str
    role: Literal["variable", "constant", "derived"]
    value: float | None
    constraint: str | None


class Semantics(TypedDict):
    """What an operation computes."""

    inputs: list[Argument]
    outputs: list[Argument]
    axes: list[Axis]
    expression: str | None
    determinism: str
    constraints: list[str]


class OperationFacts(TypedDict):
    """An operation."""

    id: str
    slug: str
    name: str
    family: str
    aliases: list[str]
    equivalents: list[Named]
    models: list[str]
    semanticDigest: str
    summary: str
    supersededById: str | None


class WorkloadFacts(TypedDict):
    """A workload of an operation."""

    id: str
    digest: str
    label: str
    axes: dict[str, float | str]
    dtypes: list[str]
    toleranceSummary: str


class ImplementationSummary(TypedDict):
    """An implementation in a list."""

    slug: str
    name: str
    project: Named
    language: str | None
    framework: str | None
    evidence: Evidence | None
    bestPrimary: Primary | None
    sourceAvailable: bool
    installable: bool
    license: LicencePair


class EvidenceCounts(TypedDict):
    """Runs by level of evidence."""

    verified: int
    reproducible: int
    reported: int
    lastObservedAt: str | None


class OperationDossier(TypedDict):
    """An operation with the ranks of one workload."""

    illustrative: bool
    operation: OperationFacts
    semantics: Semantics
    workloads: list[WorkloadFacts]
    selectedWorkloadId: str | None
    cohortOptions: list[CohortOption]
    cohort: Cohort | None
    records: list[ResultRow]
    sweep: None
    implementations: list[ImplementationSummary]
    coverage: EvidenceCounts
    sources: list[SourceRef]
    nibblas: Any


class ImplementationFacts(TypedDict):
    """An implementation."""

    id: str
    slug: str
    name: str
    digest: str
    revision: str | None
    supersededById: str | None


class Project(TypedDict):
    """Whose it is."""

    name: str
    slug: str
    repositoryUrl: str | None


class Requirement(TypedDict):
    """Something that is needed."""

    name: str
    constraint: str


class Usage(TypedDict):
    """How to use it."""

    install: Install | None
    invocationExample: str | None
    requirements: list[Requirement]


class Interface(TypedDict):
    """What to call."""

    language: str
    framework: str | None
    symbol: str | None
    sourcePath: str | None


class Support(TypedDict):
    """What it is said to be for."""

    hardware: list[str]
    architectures: list[str]
    dtypes: list[str]
    layouts: list[str]
    axes: list[str]


class SourceFacts(TypedDict):
    """Its source."""

    available: bool
    url: str | None
    commit: str | None
    treeDigest: str | None


class Licensing(TypedDict):
    """Declared and concluded, and the file that says so."""

    declared: str | None
    concluded: str | None
    evidencePath: str | None


class Trust(TypedDict):
    """The best level of evidence."""

    evidence: Evidence | None
    summary: str


class Standing(TypedDict):
    """In how many cohorts it is first."""

    records: int


class Provenance(TypedDict):
    """Where it came from."""

    source: SourceRef | None
    authors: list[str]
    importedAt: str | None


class Attribution(TypedDict):
    """The sentence that the source asks for."""

    text: str
    url: str | None


class SourceCode(TypedDict):
    """A source file; its text only where it was asked for and may be shown."""

    fileName: str | None
    language: Literal["python", "cpp", "text"]
    content: NotRequired[str]
    license: str | None
    attribution: Attribution | None


class ImplementationDossier(TypedDict):
    """All of an implementation."""

    illustrative: bool
    implementation: ImplementationFacts
    project: Project
    usage: Usage
    interface: Interface
    support: Support
    source: SourceFacts
    license: Licensing
    trust: Trust
    standing: Standing
    bestResults: list[ResultRow]
    limitations: list[str]
    provenance: Provenance
    sourceCode: SourceCode | None
    nibblas: Any


class RunFacts(TypedDict):
    """A run."""

    id: str
    digest: str
    status: Status
    observedAt: str
    publishedAt: str | None


class Retraction(TypedDict):
    """When and why."""

    at: str
    reason: str


class Dispute(TypedDict):
    """Why."""

    reason: str


class Lifecycle(TypedDict):
    """What happened to a run since."""

    supersedesId: str | None
    supersededById: str | None
    retracted: Retraction | None
    disputed: Dispute | None
    stale: bool


class RunCohort(TypedDict):
    """Where a run stands."""

    comparisonKey: str
    profile: Profile
    rank: int | None
    eligible: bool
    ineligibleReasons: list[str]
    headRunId: str | None


class ImplementationOfRun(TypedDict):
    """Which revision was run."""

    name: str
    slug: str
    revision: str | None


class WorkloadOfRun(TypedDict):
    """What was run."""

    id: str
    digest: str
    label: str
    axes: dict[str, float | str]
    tensors: list[KeyValue]
    tolerance: list[KeyValue]


class Correctness(TypedDict):
    """How far the result was from the oracle's."""

    comparator: str
    maxAbsoluteError: float | None
    maxRelativeError: float | None
    matchedRatio: float | None
    passed: bool


class Measured(TypedDict):
    """One figure."""

    metric: str
    statistic: str
    value: float
    unit: str
    sampleCount: int | None


class Artifact(TypedDict):
    """A file kept with a run."""

    role: str
    digest: str
    mediaType: str
    sizeBytes: int | None
    uri: str | None
    availability: Literal["public", "upstream", "unavailable"]


class RunProvenance(TypedDict):
    """Where a run came from."""

    source: SourceRef
    externalId: str | None
    parserVersion: str | None
    snapshotDigest: str | None


class Attestation(TypedDict):
    """What somebody says of a run."""

    id: str
    type: Literal["reproduced", "could_not_reproduce", "environment_note", "regression_observed"]
    body: str
    evidenceUrl: str | None
    observedNs: float | None
    environmentSummary: str | None
    author: str
    at: str


class RunDossier(TypedDict):
    """All of a run."""

    illustrative: bool
    run: RunFacts
    evidence: Evidence
    lifecycle: Lifecycle
    primary: Primary
    sourceNativeMetrics: dict[str, float] | None
    cohort: RunCohort
    implementation: ImplementationOfRun
    project: Named
    operation: Named
    workload: WorkloadOfRun
    correctness: Correctness | None
    measurements: list[Measured]
    protocol: list[KeyValue]
    environment: list[KeyValue]
    artifacts: list[Artifact]
    provenance: RunProvenance
    attestations: list[Attestation]
    nibblas: Any


class OwnFacts(TypedDict):
    """What this index knows of a run beside."""

    workload: str | None
    claimed: bool
    numerics: str
    timing: str
    cohort: str | None
    rank: int | None
    error: float | None
    floor: float | None


class RunItem(TypedDict):
    """A run in a list."""

    id: str
    digest: str
    operation: str
    implementation: str
    hardware: str
    status: Status
    primary: Primary | None
    evidence: Evidence
    sourceAvailable: bool
    source: str
    observedAt: str
    nibblas: OwnFacts


class Runs(TypedDict):
    """A page of runs."""

    runs: list[RunItem]
    nextCursor: str | None
    generatedAt: str


class ComparedRun(TypedDict):
    """A run beside others."""

    runId: str
    digest: str
    implementation: Named
    project: Named
    operation: Named
    workloadLabel: str
    hardware: str
    primary: Primary | None
    evidence: Evidence
    status: Status
    comparisonKey: str
    rank: int | None
    tiedWithPrevious: bool
    eligible: bool
    ineligibleReasons: list[str]
    license: LicencePair
    install: Install | None
    sourceAvailable: bool
    observedAt: str


class ComparedField(TypedDict):
    """One fact of all runs; a material one keeps times from being compared."""

    field: str
    material: bool
    values: list[str | None]
    differs: bool


class RunComparison(TypedDict):
    """Two to eight runs side by side."""

    illustrative: bool
    runs: list[ComparedRun]
    comparable: bool
    profile: Profile | None
    comparisonKey: str | None
    fields: list[ComparedField]
    firstMaterialMismatch: str | None
    explanation: str
    missingIds: list[str]
    policyVersion: str
    nibblas: Any


class OperationItem(TypedDict):
    """An operation in a list."""

    slug: str
    name: str
    family: str
    tags: list[str]
    workloads: int
    runs: int


class Operations(TypedDict):
    """All operations."""

    operations: list[OperationItem]
    generatedAt: str
    nibblas: Any


class HardwareItem(TypedDict):
    """A device in a list."""

    slug: str
    model: str
    vendor: str | None
    architecture: str | None
    kernelRuns: int
    servingRuns: int
    operations: int
    families: int
    lastObservedAt: str | None


class HardwareList(TypedDict):
    """All devices."""

    hardware: list[HardwareItem]
    generatedAt: str
    nibblas: Any


class SourceItem(TypedDict):
    """A source in a list."""

    slug: str
    kind: Literal["kernel", "serving"]
    runs: int
    indexed: int
    breadth: int
    hardware: int
    lastFetched: str | None


class Sources(TypedDict):
    """All sources."""

    sources: list[SourceItem]
    generatedAt: str
    nibblas: Any


class HeroRow(TypedDict):
    """Runs of a family on each device."""

    family: str
    runs: list[int]
    total: int


class Hero(TypedDict):
    """Runs by family and device."""

    gpus: list[str]
    rows: list[HeroRow]


class CoverageFacts(TypedDict):
    """How much there is."""

    illustrative: bool
    sources: list[SourceItem]
    hero: Hero
    nibblas: Any


class Problem(TypedDict):
    """An error, RFC 9457."""

    type: str
    title: str
    status: int
    code: str
    detail: str
    requestId: str
