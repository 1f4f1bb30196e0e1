"""Compiles the Triton kernels for a target without a GPU and prints facts of the machine code, a JSON object a line.

`python triton_compile.py sm_90 sm_100 ...`; test_triton.py runs it in a process of its own for each version of triton
and asserts on the facts. Left out, as nibblas.bench.compiled has them: batch-invariant tiles of triton_linear, its
products of FP4 by FP4 (which spill on sm_120, where native ones are for that), and all but the first of the quantizers'
rules.
"""

import json
import sys
from dataclasses import asdict

import torch

from nibblas.bench.compiled import Case, Code, cases, compile, weights
from nibblas.formats import FORMATS
from nibblas.kernels.triton_launch import Target
from nibblas.kernels.triton_quantize import dequantize_launch


def print_facts(name: str, format: str, arch: str, code: Code) -> None:
    limit = Target(arch, 1).shared_memory
    print(json.dumps({"name": name, "format": format, "arch": arch, "shared_limit": limit, **asdict(code)}), flush=True)


def is_checked(case: Case) -> bool:
    p = case.problem
    decodes_both = case.kernel.name == "triton_linear" and p.a == p.b
    first_rule = FORMATS[p.b].scale_rules[0]
    return case.kernel.name != "triton_linear_invariant" and not decodes_both and p.rule in ("", first_rule)


if __name__ == "__main__":
    for arch in sys.argv[1:]:
        for case in filter(is_checked, cases(arch)):
            for launch in case.launches:
                code = compile(launch, arch)
                print_facts(f"{case.kernel} {case.problem} {code.launch}", case.problem.b, arch, code)
        for format in FORMATS.values():
            launch = dequantize_launch(weights(format, 256, 2048), torch.empty(256, 2048, dtype=torch.bfloat16))
            print_facts(f"dequantize {format}", format.name, arch, compile(launch, arch))
