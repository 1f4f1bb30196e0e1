"""What FP4 tensors a checkpoint holds, whoever wrote it, and what looks wrong with them.

Exporters agree on e2m1 codes, two a byte, with one 8-bit scale a block, and on little else. `NAMINGS` has a row for
each way to name and type the parts. A tensor's layout is decided by its stored dtype, its shape and its siblings' names
first, and by config.json only where those leave a choice. Files are read in pieces, so memory stays small.
"""

import dataclasses
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nibblas.formats import E4M3, E8M0, FORMATS, ScaleCode, as_format
from nibblas.layouts import LINEAR, BLOCKED_128x4, Layout, as_layout
from nibblas.storage import Entry, Header, StorageError, read_header, read_json, weight_map
from nibblas.words import counted, json_text

CHUNK_BYTES = 8 << 20
# A global_scale outside is one that was stored as its inverse, or that wastes the range of e4m3.
GLOBAL_SCALE_RANGE = (2.0**-30, 2.0**10)
CODES_A_UNIT = {"U8": 2, "I8": 2, "U32": 8, "F4": 1}  # codes that one step of the last dimension holds
FLOATS = ("F32", "BF16", "F16", "F64")
# Code and block_size that a scale's dtype allows. A U8 scale may be either; its shape decides.
SCALE_CODES = {
    "F8_E4M3": ((E4M3, 16), (E4M3, 32)),
    "F8_E8M0": ((E8M0, 32), (E8M0, 16)),
    "U8": ((E8M0, 32), (E4M3, 16)),
}


@dataclass(frozen=True)
class Naming:
    """How one exporter names the parts of a weight: endings that follow the same stem."""

    layout: str
    data: str
    data_dtypes: tuple[str, ...]
    scale: str
    scale_dtypes: tuple[str, ...]
    global_scale: str | None = None
    convention: str | None = None  # multiplier or divisor
    needs_global_scale: bool = False  # with e4m3 scales
    activation_scale: str | None = None
    scale_layout: Layout = LINEAR  # where shapes leave a choice
    nibbles: str = "low first"


MODELOPT = Naming(
    "modelopt", ".weight", ("U8", "F4"), ".weight_scale", ("F8_E4M3", "U8", "F8_E8M0"),
    ".weight_scale_2", "multiplier", True, ".input_scale",
)  # fmt: skip
QUARK = dataclasses.replace(MODELOPT, layout="quark", activation_scale=".input_scale_2")
COMFY = dataclasses.replace(MODELOPT, layout="comfy", scale_layout=BLOCKED_128x4, nibbles="high first")
NAMINGS = (
    Naming(
        "torchao", "._weight_qdata", ("U8", "F4"), "._weight_scale", ("F8_E4M3", "F8_E8M0"),
        "._weight_per_tensor_scale", "multiplier", False, "._weight_act_per_tensor_scale", BLOCKED_128x4,
    ),
    Naming(
        "compressed-tensors", ".weight_packed", ("U8", "F4"), ".weight_scale", ("F8_E4M3", "U8", "F8_E8M0"),
        ".weight_global_scale", "divisor", True, ".input_global_scale",
    ),
    Naming("gpt-oss", "_blocks", ("U8",), "_scales", ("U8", "F8_E8M0")),
    Naming("gpt-oss", ".blocks", ("U8",), ".scales", ("U8", "F8_E8M0")),
    Naming("deepseek", ".weight", ("I8",), ".scale", ("F8_E8M0",)),
    Naming("mlx", ".weight", ("U32",), ".scales", ("U8",), ".global_scale", "multiplier"),
    MODELOPT,
    # Experts in one tensor have names of their own ("experts.gate_up_proj") and endings that continue them.
    Naming(
        "modelopt", "_proj", ("U8", "F4"), "_proj_weight_scale", ("F8_E4M3", "U8", "F8_E8M0"),
        "_proj_weight_scale_2", "multiplier", True, "_proj_input_scale",
    ),
)  # fmt: skip
NIBBLAS = Naming("nibblas", "", ("U8",), ".scale", ("U8",), ".global_scale", "multiplier")

# Layouts that go with a quant_method of config.json.
METHODS = {
    "nibblas": ("nibblas",),
    "modelopt": ("modelopt",),
    "compressed-tensors": ("compressed-tensors",),
    "mxfp4": ("gpt-oss",),
    "quark": ("quark",),
    "torchao": ("torchao",),
    "fp8": ("deepseek",),
}
# Layers that runtimes fuse into one product, which has room for one global_scale.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


@dataclass(frozen=True)
class ScaleStatistics:
    """Block scales of a tensor without padding; min, median (the lower one) and max of those that are not NaN."""

    code: str  # e4m3 or e8m0
    count: int
    min: float | None
    median: float | None
    max: float | None
    zeros: int
    nans: int
    negatives: int
    saturated: int  # at the largest value of the code


@dataclass(frozen=True)
class TensorReport:
    """One FP4 tensor. What can't be told (a scale is missing, or fits no shape) is None and has a warning."""

    name: str  # of the tensor with the codes
    file: str
    layout: str  # of the checkpoint: nibblas, modelopt, compressed-tensors, gpt-oss, quark, torchao, ...
    format: str | None  # nvfp4, mxfp4, or the scale code and block_size where it is neither
    shape: tuple[int, ...]  # logical (..., N, K)
    block_size: int | None
    scale_layout: str | None
    data_layout: str
    transposed: bool  # stored (..., K/2, N) with scales (..., K/block_size, N)
    nibbles: str  # which nibble holds even k
    codes: tuple[int, ...]  # how often each of the 16 codes occurs
    scale: ScaleStatistics | None
    global_scale: tuple[float, ...] | None  # as a multiplier: (1,) or one a matrix
    convention: str | None  # how the file has it: multiplier or divisor
    activation_scale: tuple[float, ...] | None  # as the file has it
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Count:
    """Tensors and their bytes."""

    tensors: int
    nbytes: int


@dataclass(frozen=True)
class Report:
    """What `inspect_file` found. `warnings` are those that concern more than one tensor."""

    path: str
    files: tuple[str, ...]
    quant_method: str | None  # as config.json has it
    tensors: tuple[TensorReport, ...]
    others: dict[str, Count]  # all tensors that are no part of an FP4 one, by dtype
    warnings: tuple[str, ...]

    @property
    def all_warnings(self) -> list[str]:
        """Every warning, those of one tensor after its name."""
        return [*self.warnings, *(f"{tensor.name}: {text}" for tensor in self.tensors for text in tensor.warnings)]

    def to_json(self) -> str:
        """The report as JSON."""
        return json_text(dataclasses.asdict(self))


@dataclass(frozen=True)
class _Weight:
    """The names of one FP4 tensor's parts; those that aren't stored are None."""

    naming: Naming
    data: str
    scale: str | None
    global_scale: str | None
    activation_scale: str | None
    facts: dict[str, Any] | None = None  # nibblas's own


class _Checkpoint:
    """All tensors of a file or folder by name, and its config."""

    def __init__(self, headers: list[Header], config: dict[str, Any]):
        self.headers = headers
        self.stored = {name: header for header in headers for name in header.entries}
        self.quant_method = config.get("quant_method")
        self.packed_qkv = any(fnmatchcase(name, "*double_blocks.*.qkv.weight") for name in self.stored)
        # "a.weight" of "a.weight.absmax": parts of its own say that a U8 weight is another scheme's.
        self.stems = {name.rpartition(".")[0] for name in self.stored}

    def entry(self, name: str) -> Entry:
        return self.stored[name].entries[name]

    def weights(self) -> dict[str, _Weight]:
        """FP4 tensors by the name of their codes."""
        found = {}
        for header in self.headers:
            for name, facts in (header.scaled or {}).items():
                if name in self.stored:
                    found[name] = self._weight(NIBBLAS, name, facts)
        for name in self.stored:
            if name not in found and (weight := self._match(name)):
                found[name] = weight
        return found

    def orphans(self) -> list[str]:
        """Names of fp8 block scales that have no weight beside them."""
        endings: dict[str, set[str]] = defaultdict(set)
        for naming in NAMINGS:
            endings[naming.scale].add(naming.data)
        return [
            name
            for name in self.stored
            if self.entry(name).dtype in ("F8_E4M3", "F8_E8M0")
            for scale, data in endings.items()
            if name.endswith(scale) and not any(name.removesuffix(scale) + ending in self.stored for ending in data)
        ]

    def _match(self, name: str) -> _Weight | None:
        entry = self.entry(name)
        for naming in NAMINGS:
            dimensions = 3 if naming.layout == "gpt-oss" else 2
            if not name.endswith(naming.data) or entry.dtype not in naming.data_dtypes or len(entry.shape) < dimensions:
                continue
            weight = self._weight(naming, name)
            if weight.scale and self.entry(weight.scale).dtype in naming.scale_dtypes:
                return self._weight(self._modelopt_kind(name), name) if naming == MODELOPT else weight
            if weight.scale is None and self._needs_a_scale(naming, name):
                return weight
        return None

    def _needs_a_scale(self, naming: Naming, name: str) -> bool:
        """Whether the codes alone are enough to say that a scale is missing, not that this is something else."""
        if naming.layout == "gpt-oss":
            return self.entry(name).shape[-1:] == (16,) and len(self.entry(name).shape) == 4
        packed = naming.data in (".weight_packed", "._weight_qdata") or naming == MODELOPT
        return packed and name not in self.stems

    def _weight(self, naming: Naming, name: str, facts: dict[str, Any] | None = None) -> _Weight:
        stem = name.removesuffix(naming.data)
        scale, global_scale, activation_scale = (
            stem + ending if ending is not None and stem + ending in self.stored else None
            for ending in (naming.scale, naming.global_scale, naming.activation_scale)
        )
        global_scale, activation_scale = (
            part if part and self.entry(part).dtype in FLOATS else None for part in (global_scale, activation_scale)
        )
        return _Weight(naming, name, scale, global_scale, activation_scale, facts)

    def _modelopt_kind(self, name: str) -> Naming:
        """Which of the exporters that use ModelOpt's names wrote a weight."""
        stem = name.removesuffix(".weight")
        metadata = self.stored[name].metadata
        if f"{stem}.comfy_quant" in self.stored or "_quantization_metadata" in metadata or self.packed_qkv:
            return COMFY
        if f"{stem}.input_scale_2" in self.stored or self.quant_method == "quark":
            return QUARK
        return MODELOPT


@dataclass(frozen=True)
class _Geometry:
    """How codes and scales of a tensor lie: logical shape, scale code, block_size."""

    shape: tuple[int, ...]
    code: ScaleCode
    block_size: int
    layout: Layout
    data_layout: Layout = LINEAR
    transposed: bool = False


def _logical_shape(naming: Naming, data: Entry) -> tuple[int, ...]:
    shape = data.shape
    if not shape:
        return ()
    if naming.layout == "gpt-oss":
        # (..., N, K / 32, 16)
        shape = (*shape[:-2], shape[-2] * shape[-1])
    return (*shape[:-1], shape[-1] * CODES_A_UNIT.get(data.dtype, 1))


def _geometry(weight: _Weight, data: Entry, scale: Entry) -> _Geometry | None:
    """How the parts fit together; None if their shapes don't."""
    if weight.facts is not None:
        return _nibblas_geometry(weight.facts, data, scale)
    shape = _logical_shape(weight.naming, data)
    choices: list[tuple[ScaleCode, int]] = list(SCALE_CODES[scale.dtype])
    if weight.global_scale:
        choices.sort(key=lambda choice: choice[0] != E4M3)
    K = shape[-1]
    choices.sort(key=lambda choice: K % choice[1] != 0)
    for code, block_size in choices:
        *batch, N, K = shape
        cols = -(-K // block_size)
        padded_rows, padded_cols = BLOCKED_128x4.shape(N, cols)
        fits: dict[Layout, bool] = {
            LINEAR: scale.shape == (*batch, N, cols),
            BLOCKED_128x4: scale.shape
            in (
                (*batch, padded_rows, padded_cols),
                (*batch, padded_rows // 4, padded_cols * 4),  # torchao's: a row for each of a tile's 32
                (math.prod(batch) * padded_rows * padded_cols,),
            ),
        }
        for layout in (weight.naming.scale_layout, LINEAR, BLOCKED_128x4):
            if fits[layout]:
                return _Geometry(shape, code, block_size, layout)
    for code, block_size in choices:
        if len(data.shape) == 3:
            E, half_K, N = data.shape
            K = half_K * CODES_A_UNIT[data.dtype]
            if scale.shape == (E, -(-K // block_size), N):
                return _Geometry((E, N, K), code, block_size, LINEAR, transposed=True)
    return None


def _nibblas_geometry(facts: dict[str, Any], data: Entry, scale: Entry) -> _Geometry | None:
    if not data.shape:
        return None
    try:
        format, matrix = as_format(facts["format"]), facts["matrix"]
        layout, data_layout = as_layout(facts["layout"]), as_layout(facts["data_layout"])
        shape = (*data.shape[:-2], *matrix) if matrix else (*data.shape[:-1], data.shape[-1] * 2)
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"the nibblas metadata of {data.name} is not understood: {error}") from error
    cols = -(-shape[-1] // format.block_size)
    if len(shape) > 1:
        fits = data.shape == (*shape[:-2], *data_layout.shape(shape[-2], shape[-1] // 2))
        fits = fits and scale.shape == (*shape[:-2], *layout.shape(shape[-2], cols))
    else:
        fits = scale.shape == (cols,) and (layout, data_layout) == (LINEAR, LINEAR)
    fits = fits and data.dtype == scale.dtype == "U8"
    return _Geometry(shape, format.scale_code, format.block_size, layout, data_layout) if fits else None


def _byte_counts(header: Header, name: str, layout: Layout, rows: int, cols: int) -> Tensor:
    """How often each byte occurs in a tensor of (rows, cols) matrices stored in a layout, padding left out: (256,)."""
    counts = torch.zeros(256, dtype=torch.int64)
    padded_rows, padded_cols = layout.shape(rows, cols)
    tile = layout.shape(1, cols)[0]
    step = max(CHUNK_BYTES // max(padded_cols, 1) // tile, 1) * tile
    for start in range(0, header.entries[name].nbytes, max(padded_rows * padded_cols, 1)):
        for row in range(0, rows, step):
            count = min(step, rows - row)
            stored = -(-count // tile) * tile
            first = start + row * padded_cols
            data = header.read_bytes(name, first, first + stored * padded_cols).view(stored, padded_cols)
            counts += torch.bincount(layout.from_(data, count, cols).flatten(), minlength=256)
    return counts


def _code_counts(counts: Tensor) -> tuple[int, ...]:
    """How often each code occurs in bytes of two: (256,) -> 16."""
    # [high, low]
    pairs = counts.view(16, 16)
    return tuple((pairs.sum(0) + pairs.sum(1)).tolist())


def _scale_statistics(code: ScaleCode, counts: Tensor) -> ScaleStatistics:
    codes = torch.arange(256, dtype=torch.uint8)
    values, nan = code.decode(codes), code.is_nan(codes)
    values, order = values.masked_fill(nan, torch.inf).sort()
    sums = torch.where(nan, 0, counts)[order].cumsum(0)
    total = int(sums[-1])

    def ranked(rank: int) -> float | None:
        """The scale at a place in ascending order."""
        return values[int(torch.searchsorted(sums, rank + 1))].item() if total else None

    return ScaleStatistics(
        code.name,
        int(counts.sum()),
        ranked(0),
        ranked((total - 1) // 2),
        ranked(total - 1),
        int(counts[code.decode(codes) == 0].sum()),
        int(counts[nan].sum()),
        int(counts[code.decode(codes) < 0].sum()),
        int(counts[code.largest]),
    )


def _floats(checkpoint: _Checkpoint, name: str | None) -> tuple[float, ...] | None:
    return None if name is None else tuple(checkpoint.stored[name].read(name).double().flatten().tolist())


def _tensor_report(checkpoint: _Checkpoint, weight: _Weight) -> TensorReport:
    naming, header, data = weight.naming, checkpoint.stored[weight.data], checkpoint.entry(weight.data)
    warnings, geometry, statistics = [], None, None
    shape = _logical_shape(naming, data)
    if weight.scale is None:
        stem = weight.data.removesuffix(naming.data)
        warnings.append(f"its scale {stem}{naming.scale} is missing")
    else:
        scale = checkpoint.entry(weight.scale)
        geometry = _geometry(weight, data, scale)
        if geometry is None:
            warnings.append(f"scale of shape {scale.shape} ({scale.dtype}) does not fit logical shape {shape}")
    if geometry is None:
        counts = _byte_counts(header, weight.data, LINEAR, data.rows, data.row_bytes)
    else:
        shape = geometry.shape
        counts = _part_counts(header, weight.data, geometry.data_layout, shape, shape[-1] // 2)
        cols = -(-shape[-1] // geometry.block_size)
        of_scale = _part_counts(checkpoint.stored[scale.name], scale.name, geometry.layout, shape, cols)
        statistics = _scale_statistics(geometry.code, of_scale)
        warnings += _scale_warnings(statistics)
        if len(scale.shape) == 1 and len(shape) > 1:
            warnings.append(
                f"{scale.name} is one-dimensional: its layout, {geometry.layout}, is inferred from its size"
            )
        if shape[-1] % geometry.block_size:
            warnings.append(f"K = {shape[-1]} is not a multiple of block_size {geometry.block_size}")
        if naming is COMFY and not checkpoint.stored[weight.data].metadata.get("_quantization_metadata"):
            marker = f"{weight.data.removesuffix('.weight')}.comfy_quant"
            if marker not in checkpoint.stored:
                warnings.append(f"no marker {marker}: nibbles are taken as high first because qkv is packed")
    codes = _code_counts(counts)
    if sum(codes) and codes[0] + codes[8] == sum(codes):
        warnings.append("all codes are zero")
    stored_global = _floats(checkpoint, weight.global_scale)
    needed = weight.facts.get("global_scale") if weight.facts else naming.needs_global_scale
    if stored_global is None and needed and (statistics is None or statistics.code == "e4m3") and weight.scale:
        expected = weight.data.removesuffix(naming.data) + f"{naming.global_scale}"
        warnings.append(f"its global scale {expected} is missing or no float")
    warnings += _global_scale_warnings(stored_global, naming.convention, math.prod(shape[:-2]))
    activation_scale = _floats(checkpoint, weight.activation_scale)
    if activation_scale and not all(math.isfinite(value) and value > 0 for value in activation_scale):
        warnings.append(f"activation scale is {_list(activation_scale)}, need positive and finite")
    inverse = naming.convention == "divisor"
    return TensorReport(
        weight.data,
        header.path.name,
        naming.layout,
        _format_name(geometry),
        shape,
        geometry.block_size if geometry else None,
        geometry.layout.name if geometry else None,
        geometry.data_layout.name if geometry else LINEAR.name,
        geometry.transposed if geometry else False,
        naming.nibbles,
        codes,
        statistics,
        tuple(_inverse(value) for value in stored_global) if stored_global and inverse else stored_global,
        naming.convention if stored_global else None,
        activation_scale,
        tuple(warnings),
    )


def _part_counts(header: Header, name: str, layout: Layout, shape: tuple[int, ...], cols: int) -> Tensor:
    if layout == LINEAR:
        # A matrix of all rows, whatever the dimensions: gpt-oss has more of them.
        return _byte_counts(header, name, LINEAR, header.entries[name].rows, header.entries[name].row_bytes)
    return _byte_counts(header, name, layout, shape[-2], cols)


def _format_name(geometry: _Geometry | None) -> str | None:
    if geometry is None:
        return None
    for format in FORMATS.values():
        if (format.scale_code, format.block_size) == (geometry.code, geometry.block_size):
            return format.name
    return f"{geometry.code} scales, block_size {geometry.block_size}"


def _inverse(value: float) -> float:
    return 1 / value if value else math.inf


def _list(values: Iterable[float]) -> str:
    shown = [f"{value:g}" for value in values]
    return ", ".join(shown[:4] + ["..."] * (len(shown) > 4))


def _scale_warnings(statistics: ScaleStatistics) -> list[str]:
    warnings = []
    if statistics.nans:
        warnings.append(f"{statistics.nans} of {statistics.count} scales are NaN")
    if statistics.negatives:
        warnings.append(f"{statistics.negatives} of {statistics.count} scales are negative")
    if statistics.count and statistics.zeros == statistics.count:
        warnings.append("all scales are zero")
    return warnings


def _global_scale_warnings(stored: tuple[float, ...] | None, convention: str | None, matrices: int) -> list[str]:
    if stored is None:
        return []
    if len(stored) not in (1, matrices):
        return [f"{counted(len(stored), 'global scale')} for {counted(matrices, 'matrix', 'matrices')}"]
    if not all(math.isfinite(value) and value > 0 for value in stored):
        return [f"global scale is {_list(stored)}, need positive and finite"]
    if convention == "divisor" and min(stored) < 1:
        return [f"global scale {_list(stored)} is a divisor here, yet below 1: it may be a multiplier"]
    low, high = GLOBAL_SCALE_RANGE
    multipliers = [1 / value for value in stored] if convention == "divisor" else list(stored)
    if min(multipliers) < low or max(multipliers) > high:
        return [f"global scale {_list(multipliers)} (as a multiplier) lies outside {low:g}..{high:g}"]
    return []


def _fused_warnings(tensors: Iterable[TensorReport]) -> list[str]:
    """A line for each kind of fused layer whose parts have unequal global scales."""
    groups: dict[tuple[tuple[str, ...], str], dict[str, float]] = defaultdict(dict)
    for tensor in tensors:
        pieces = tensor.name.split(".")
        for parts in FUSED:
            for i, piece in enumerate(pieces):
                if piece in parts and tensor.global_scale and len(tensor.global_scale) == 1:
                    groups[parts, ".".join(pieces[:i])][piece] = tensor.global_scale[0]
    warnings = []
    for parts in FUSED:
        of_kind = {stem: list(found.values()) for (kind, stem), found in groups.items() if kind == parts}
        ratios = {stem: max(v) / min(v) if min(v) > 0 else math.inf for stem, v in of_kind.items() if len(set(v)) > 1}
        if ratios:
            worst = max(ratios, key=ratios.__getitem__)
            warnings.append(
                f"{'/'.join(parts)} have unequal global scales in {len(ratios)} of {len(of_kind)} groups, by up to "
                f"{ratios[worst]:.3g} ({worst}); fused products of other libraries need one, those of nibblas don't"
            )
    return warnings


def _activation_warnings(tensors: Iterable[TensorReport]) -> list[str]:
    """A line for each layout where only some weights have an activation scale."""
    by_layout: dict[str, list[TensorReport]] = defaultdict(list)
    for tensor in tensors:
        by_layout[tensor.layout].append(tensor)
    warnings = []
    for layout, members in by_layout.items():
        without = [tensor.name for tensor in members if tensor.activation_scale is None]
        if without and len(without) < len(members):
            names = ", ".join(without[:3] + ["..."] * (len(without) > 3))
            warnings.append(f"{len(without)} of {len(members)} {layout} weights lack an activation scale: {names}")
    return warnings


def _method_warnings(method: str | None, tensors: Iterable[TensorReport]) -> list[str]:
    expected = METHODS.get(method or "")
    other = sorted({tensor.layout for tensor in tensors} - set(expected)) if expected else []
    return [f"config.json says quant_method {method!r}, but tensors are stored as {layout}" for layout in other]


def inspect_file(path: str | os.PathLike) -> Report:
    """What FP4 tensors a safetensors file, or a folder of them, holds, with statistics and warnings.

    The config.json beside the files is read too. Memory stays small whatever the size.

    Raises StorageError for a file that is no safetensors file or is damaged, and for a folder without one.
    """
    path = Path(path)
    headers, warnings = _headers(path)
    checkpoint = _Checkpoint(headers, _quantization_config(path if path.is_dir() else path.parent))
    weights = checkpoint.weights()
    tensors = tuple(_tensor_report(checkpoint, weight) for weight in weights.values())
    used = {
        name
        for weight in weights.values()
        for name in (weight.data, weight.scale, weight.global_scale, weight.activation_scale)
    }
    for header in headers:
        lost = [name for name in header.scaled or {} if name not in checkpoint.stored]
        warnings += [f"{header.path.name}: {name} is in the metadata, but its codes are missing" for name in lost]
    warnings += [f"{name} has no weight beside it" for name in checkpoint.orphans()]
    warnings += _method_warnings(checkpoint.quant_method, tensors)
    warnings += _fused_warnings(tensors) + _activation_warnings(tensors)
    rest = [checkpoint.entry(name) for name in checkpoint.stored if name not in used]
    return Report(
        str(path),
        tuple(header.path.name for header in headers),
        checkpoint.quant_method,
        tensors,
        _counts(rest),
        tuple(warnings),
    )


def _counts(entries: Iterable[Entry]) -> dict[str, Count]:
    by_dtype: dict[str, list[int]] = defaultdict(list)
    for entry in entries:
        by_dtype[entry.dtype].append(entry.nbytes)
    return {dtype: Count(len(sizes), sum(sizes)) for dtype, sizes in sorted(by_dtype.items())}


def _headers(path: Path) -> tuple[list[Header], list[str]]:
    """The headers of a file, or of a folder's files, and warnings about shards that are missing."""
    if not path.is_dir():
        return [read_header(path)], []
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise StorageError(f"{path}: no safetensors file in it")
    wanted: set[str] = set()
    for index in path.glob("*.safetensors.index.json"):
        wanted |= set(weight_map(index).values())
    if wanted:
        files = [file for file in files if file.name in wanted]
    lost = sorted(wanted - {file.name for file in files})
    return [read_header(file) for file in files], [f"shards that the index names are missing: {', '.join(lost)}"] * (
        len(lost) > 0
    )


def _quantization_config(folder: Path) -> dict[str, Any]:
    """quantization_config of config.json; of older ModelOpt exports, what hf_quant_config.json says."""
    config = _json(folder / "config.json").get("quantization_config")
    if isinstance(config, Mapping):
        return dict(config)
    producer = _json(folder / "hf_quant_config.json").get("producer")
    return {"quant_method": producer.get("name")} if isinstance(producer, Mapping) else {}


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
