"""Which language a file or a string of code is written in."""

import re
from pathlib import PurePath

from nibblas.index.items import Language

SUFFIXES: dict[str, Language] = {
    ".py": "python",
    ".pyi": "python",
    ".cu": "cuda",
    ".cuh": "cuda",
    ".hip": "hip",
    ".cpp": "c++",
    ".cc": "c++",
    ".cxx": "c++",
    ".hpp": "c++",
    ".inl": "c++",
    ".c": "c",
    ".h": "c",
    ".ptx": "ptx",
    ".s": "gcn",
}
_HIP = re.compile(r"hip/hip_|\bhipLaunchKernel|__builtin_amdgcn_|\bhipStream_t\b|\b__hip_\w+|rocwmma|\bck_tile::")
_DEVICE = re.compile(r"\b__(?:global|device|shared|constant|launch_bounds)__\b|<<<|\bcuda_\w+\.h\b|\bcudaStream_t\b")
_CPP = re.compile(
    r"""^[ \t]*\#[ \t]*include[ \t]*[<"]
    |\b__(?:global|device)__\b
    |\bextern\s+"C"
    |\basm\s+(?:volatile|__volatile__)\b
    |\b(?:torch|at)::Tensor\b
    |\b(?:PYBIND11_MODULE|TORCH_LIBRARY(?:_IMPL|_FRAGMENT)?)\s*\(""",
    re.VERBOSE | re.MULTILINE,
)
_SOURCE_NAME = re.compile(r"\w*(?:cuda|cpp|hip|kernel)\w*(?:src|source|code)\w*", re.IGNORECASE)
_PYTHON = re.compile(
    r"^[ \t]*(?:import[ \t]+(?:triton|torch|cutlass|helion)\b|from[ \t]+(?:triton|torch|cutlass|helion)\b.*import\b"
    r"|@(?:triton|cute|helion|gluon)\.)",
    re.MULTILINE,
)
_OPCODES = (
    "abs|add|and|atom|bar|barrier|bfe|bfi|brev|cp|createpolicy|cvt|cvta|discard|div|dp2a|dp4a|elect|ex2|fence|fma"
    "|griddepcontrol|isspacep|ld|ldmatrix|ldu|lg2|lop3|mad|mapa|max|mbarrier|membar|min|mma|mov|movmatrix|mul|multimem"
    "|neg|not|or|pack|prefetch|prefetchu|prmt|rcp|red|redux|rsqrt|selp|set|setmaxnreg|setp|shf|shfl|shl|shr|slct|sqrt"
    "|st|stmatrix|sub|suld|sust|tanh|tcgen05|tensormap|vote|wgmma|wmma|xor"
)
# At most 400 characters of operands, or a long text without a semicolon takes for ever.
_PTX = re.compile(
    rf"(?:^|[;{{}}\n])[ \t]*+(?:@!?%?\w+[ \t]+)?"
    rf"(?:(?:{_OPCODES})\.[\w.:]+(?:\s[^;]{{0,400}})?;|\.(?:reg|version|target)\s)"
)
_GCN = re.compile(
    r"(?:^|[;\n])[ \t]*+(?:[vs]_[a-z]\w+|ds_[a-z]\w+|(?:buffer|global|flat|scratch)_(?:load|store|atomic)\w*)\b(?!:)"
)


def of_path(path: str) -> Language | None:
    """The language that a file's suffix names; None for what is no source."""
    return SUFFIXES.get(PurePath(path).suffix.lower())


def of_file(path: str, text: str) -> Language | None:
    """As of_path, but assembler is a source only where its text is GCN: all processors share the suffix."""
    language = of_path(path)
    return None if language == "gcn" and of_assembler(text) != "gcn" else language


def of_code(text: str, name: str = "") -> Language | None:
    """The language of a string that is source code; None for a string that is anything else.

    `name` is what the string is bound to: "cpp_sources" holds source even where only a declaration stands in it.
    """
    if len(text) < 8:
        return None
    if (";" in text or "{" in text) and _CPP.search(text):
        return dialect(text)
    if ";" in text and "(" in text and _SOURCE_NAME.fullmatch(name):
        return dialect(text)
    if "\n" in text and _PYTHON.search(text):
        return "python"
    if ";" in text and _PTX.search(text):
        return "ptx"
    return None


def dialect(text: str) -> Language:
    """Whether text in C or C++ is HIP, CUDA, or without anything of a device."""
    if _HIP.search(text):
        return "hip"
    return "cuda" if _DEVICE.search(text) else "c++"


def of_assembler(text: str) -> Language:
    """The assembler that the text of an inline statement is written in."""
    return "gcn" if _GCN.search(text) else "ptx"
