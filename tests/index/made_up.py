"""Made-up things to store in an index."""

from nibblas.index.model import (
    Claim,
    CompatFact,
    Environment,
    Figure,
    Implementation,
    Item,
    Operation,
    Protocol,
    Run,
    Source,
    SourceFile,
    Tensor,
    Workload,
    kernelbot_slug,
)

OPERATION = Operation("toy-gemv", "toy_gemv", "gemv", ("m", "k"), (Tensor("a", "input", "nvfp4", ("m", "k")),))
WORKLOAD = Workload(OPERATION, "m: 128; k: 64; seed: 7", {"m": 128, "k": 64}, {"seed": 7})
RUN = Run(
    OPERATION,
    WORKLOAD,
    Protocol("a protocol", "a harness", details={"timer": "event"}),
    Environment("NVIDIA B200", "sm_100", 0, {"torch": "2.9"}, {"host": "x"}),
    "passed",
    False,
    observed_at="2026-01-02T03:04:05+00:00",
    figures=(Figure("latency", "median", 1.5e-5, 1.4e-5, 1.6e-5, 3), Figure("error ulp", "max", 2.0)),
    samples=(1.5e-5, 1 / 3, 1.6e-5),
    floor=1e-6,
    error=3e-7,
    hardened=True,
    beside={"torch": 1e-3},
    config={"tile": [64, 64]},
    integrity=({"class": "threads", "severity": "info", "what": "two threads"},),
    command="a command",
    record="a record",
)
CODE = b"import triton\n\n\ndef custom_kernel(data):\n    return data[0]\n"


def make_item(number: int = 1, code: bytes = CODE, runs: tuple[Run, ...] = (RUN,), **fields) -> Item:
    """An implementation of one file with all that an item can hold."""
    known = {
        "authors": ("ann", "bob"),
        "operation": OPERATION,
        "language": "python",
        "framework": "triton",
        "entry_point": "custom_kernel",
        "tensors": OPERATION.tensors,
        "licence": "MIT",
        "limitations": ("It is made up.",),
        "record": f"submission {number}",
    }
    implementation = Implementation(
        fields.pop("slug", kernelbot_slug("toy_gemv", number)),
        f"submission {number}",
        fields.pop("source", Source("kernelbot-dataset", "toy.parquet", "r1", "MIT", "thanks", "2026-01-01")),
        files=(SourceFile.of("submission.py", code),),
        **{**known, **fields},
    )
    facts = (
        CompatFact("declared", "NVIDIA B200", "sm_100", reason="says so", path="submission.py", line=2),
        CompatFact("measured", "NVIDIA B200", claimed=True),
    )
    claims = (Claim("user id", "7"), Claim("lines", "5", 3))
    return Item(implementation, {"submission.py": code}, runs, facts, claims)
