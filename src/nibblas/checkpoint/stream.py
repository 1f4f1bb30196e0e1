"""Quantize a checkpoint that need not fit in memory, and go on where a killed run stopped.

All sizes are known beforehand, so an output file's header is written first and its tensors follow in the header's
order, some rows at a time, into `<name>.partial`, which takes its name when it is whole. A file's header holds a digest
of the source and of the options: where it is equal, what a killed run wrote is kept up to its last whole tensor, and a
finished file is kept unread. With `overwrite` nothing is kept. (Use it after a power failure rather than a killed
process: the last bytes of a .partial may not have reached the disk.)
"""

import filecmp
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from nibblas.formats import Format
from nibblas.nn import DEFAULT_EXCLUDE
from nibblas.nn.conversion import as_patterns, matches
from nibblas.nn.packed import check_options
from nibblas.ops import dequantize, format_for, quantize
from nibblas.paths import atomic_file, rename, sync, why_not_replaced
from nibblas.quantize import amax, global_scale_from_amax
from nibblas.storage import (
    MAX_HEADER_BYTES,
    METADATA_KEY,
    Entry,
    Header,
    StorageError,
    as_bytes,
    encode_header,
    facts,
    parse_header,
    part,
    parts,
    read_header,
    read_json,
    weight_map,
)
from nibblas.tensor import ScaledTensor
from nibblas.words import counted

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None  # type: ignore[assignment]

DEFAULT_INCLUDE = ("*.weight",)
SOURCE_KEY = "nibblas_source"  # in the metadata of a file: the digest of its source and of the options
QUANT_METHOD = {"quant_method": "nibblas"}  # in the quantization_config of config.json and the metadata of an index
SOURCE_DTYPES = ("F32", "BF16", "F16")
CHUNK_BYTES = 8 << 20  # of the source at a time: the fp32 copies that measure the error are a few times larger
# Weights that models store as (..., K, N), by model_type; a file with them tells nothing of it.
CONV1D = ("*.c_attn.weight", "*.q_attn.weight", "*.c_fc.weight", "*.c_proj.weight")
FUSED_EXPERTS = ("*.experts.gate_up_proj", "*.experts.down_proj")
TRANSPOSED = {
    **dict.fromkeys(("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder"), CONV1D),
    **dict.fromkeys(("gpt_oss", "openai_privacy_filter", "llama4", "llama4_text"), FUSED_EXPERTS),
    **dict.fromkeys(("aria", "aria_text"), (*FUSED_EXPERTS, "*.experts.fc1.weight", "*.experts.fc2.weight")),
}
WEIGHT_ENDINGS = (".safetensors", ".safetensors.partial", ".safetensors.index.json")  # of what an output is read from
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".partial"}

Progress = Callable[[int, int, str], None]  # source bytes done, source bytes in all, tensor
Report = Callable[[int, str], None]  # source bytes done since the last call, tensor


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor that was quantized; relative_mse = sum((x - x')^2) / sum(x^2).

    It is None where an earlier run wrote the tensor and where a block is bad: it holds NaN or Inf, so all of it is NaN.
    """

    name: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    relative_mse: float | None
    bad_blocks: int


@dataclass(frozen=True)
class SkippedTensor:
    """A tensor that was copied byte for byte, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Summary:
    """What `quantize_checkpoint` did. Bytes count all tensors of the checkpoint, those that were copied too."""

    format: str
    scale_rule: str
    rotation: int
    quantized: tuple[QuantizedTensor, ...]
    skipped: tuple[SkippedTensor, ...]
    bytes_before: int
    bytes_after: int
    reused: tuple[str, ...]  # files that an earlier run had finished
    left_out: tuple[str, ...]  # files of the source folder that were not copied


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern is of a tensor or, as nn.DEFAULT_EXCLUDE's, of the layer whose weight it is."""
    return matches(name.removesuffix(".weight"), pattern) or fnmatchcase(name, pattern)


@dataclass(frozen=True)
class Options:
    """What decides the output, apart from the source."""

    format: Format
    scale_rule: str
    rotation: int
    include: tuple[str, ...]
    exclude: tuple[str, ...]

    def why_not(self, entry: Entry) -> str | None:
        """Why a tensor of the source is not quantized; None if it is."""
        if not any(_matches(entry.name, pattern) for pattern in self.include):
            return f"its name matches none of {', '.join(self.include)}"
        for pattern in self.exclude:
            if _matches(entry.name, pattern):
                return f"excluded by {pattern}"
        if entry.dtype not in SOURCE_DTYPES:
            return f"dtype {entry.dtype}, need {', '.join(SOURCE_DTYPES)}"
        experts = "expert" in entry.name or self.include != DEFAULT_INCLUDE
        if len(entry.shape) != 2 and not (len(entry.shape) == 3 and experts):
            return f"{counted(len(entry.shape), 'dimension')}, need 2 (3 for experts)"
        unit = max(self.format.block_size, self.rotation)
        if entry.shape[-1] % unit:
            return f"K = {entry.shape[-1]} is not a multiple of {unit}"
        return None

    def planned(self, entry: Entry) -> ScaledTensor:
        """The ScaledTensor that an entry becomes, without its bytes."""
        *rest, K = entry.shape
        return ScaledTensor(
            torch.empty(*rest, K // 2, dtype=torch.uint8, device="meta"),
            torch.empty(*rest, K // self.format.block_size, dtype=torch.uint8, device="meta"),
            self.format,
            torch.empty((), dtype=torch.float32, device="meta") if self.format.has_global_scale else None,
            scale_rule=self.scale_rule,
            rotation=self.rotation,
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "format": self.format.name,
            "block_size": self.format.block_size,
            "scale_rule": self.scale_rule,
            "rotation": self.rotation,
            "include": self.include,
            "exclude": self.exclude,
        }


@dataclass(frozen=True)
class _Unit:
    """Entries of an output file that are written, or not, as one."""

    name: str  # of the source tensor
    end: int  # bytes of the file's tensors up to here
    work: int  # source bytes that are read for it
    write: Callable[[BinaryIO, Report], None]


@dataclass(frozen=True, eq=False)
class _Shard:
    """One file of the source and the file it becomes."""

    source: Header
    target: Path
    options: Options
    strict: bool
    measured: dict[str, float]  # relative MSE by name, filled while writing

    @property
    def partial(self) -> Path:
        return self.target.with_name(f"{self.target.name}.partial")

    @cached_property
    def skipped(self) -> dict[str, str]:
        reasons = {name: self.options.why_not(entry) for name, entry in self.source.entries.items()}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    @cached_property
    def planned(self) -> dict[str, ScaledTensor]:
        entries = self.source.entries.values()
        return {entry.name: self.options.planned(entry) for entry in entries if entry.name not in self.skipped}

    @cached_property
    def raw(self) -> bytes:
        """The first bytes of the output file."""
        groups = {
            name: [part(*item) for item in parts(name, self.planned[name]).items()]
            if name in self.planned
            else [(name, entry.dtype, entry.shape)]
            for name, entry in self.source.entries.items()
        }
        scaled = {name: facts(tensor) for name, tensor in self.planned.items()}
        return encode_header(groups, scaled, {**self.source.metadata, SOURCE_KEY: _digest(self.source, self.options)})

    @cached_property
    def header(self) -> Header:
        """The output file's header; it reads from the .partial."""
        return parse_header(self.raw, self.partial)

    @cached_property
    def bytes_after(self) -> int:
        return max((entry.end for entry in self.header.entries.values()), default=0)

    @cached_property
    def units(self) -> list[_Unit]:
        """In the file's order. A tensor's scales follow its codes and are made with them."""
        of = {f"{name}.global_scale": (name, self._write_global_scale) for name in self.planned}
        of |= {name: (name, self._write_quantized) for name in self.planned}
        of |= {name: (name, self._write_copy) for name in self.skipped}
        units = []
        for entry in self.header.entries.values():
            if entry.name in of:
                name, write = of[entry.name]
                end = self.header.entries[f"{name}.scale"].end if entry.name in self.planned else entry.end
                units.append(_Unit(name, end, self.source.entries[name].nbytes, partial(write, name)))
        return units

    def is_finished(self) -> bool:
        """Whether the target is the whole file already."""
        return (
            self.target.is_file()
            and self.target.stat().st_size == len(self.raw) + self.bytes_after
            and _starts_with(self.target, self.raw)
        )

    def conflict(self) -> Path | None:
        """A file in the way that this run would neither keep nor go on with."""
        if self.target.exists() and not self.is_finished():
            return self.target
        if self.partial.exists():
            length = min(self.partial.stat().st_size, len(self.raw))
            if not _starts_with(self.partial, self.raw[:length]):
                return self.partial
        return None

    def write(self, progress: Report, anew: bool) -> None:
        """Make the target, from where the .partial ends or `anew`."""
        with open(self.partial, "r+b" if self.partial.exists() else "w+b") as file:
            _lock(file, self.partial)
            position = 0
            if not anew and file.read(len(self.raw)) == self.raw:
                size = file.seek(0, os.SEEK_END) - len(self.raw)
                position = max((unit.end for unit in self.units if unit.end <= size), default=0)
            else:
                file.seek(0)
                file.write(self.raw)
            file.seek(len(self.raw) + position)
            file.truncate()
            for unit in self.units:
                if unit.end > position:
                    unit.write(file, progress)
                else:
                    progress(unit.work, unit.name)
            sync(file)
        rename(self.partial, self.target)

    def _chunks(self, name: str) -> Iterator[tuple[int, int]]:
        """Row ranges of CHUNK_BYTES of a source tensor."""
        entry = self.source.entries[name]
        step = max(CHUNK_BYTES // max(entry.row_bytes, 1), 1)
        for start in range(0, entry.rows, step):
            yield start, min(start + step, entry.rows)

    def _write_global_scale(self, name: str, file: BinaryIO, progress: Report) -> None:
        largest = torch.zeros((), dtype=torch.float32)
        for rows in self._chunks(name):
            x = self.source.read(name, *rows)
            largest = torch.maximum(largest, amax(x, self.options.rotation))
            progress(x.nbytes, name)
        file.write(as_bytes(global_scale_from_amax(largest, self.options.scale_rule)).numpy().data)

    def _write_quantized(self, name: str, file: BinaryIO, progress: Report) -> None:
        options, global_scale = self.options, None
        if options.format.has_global_scale:
            file.flush()
            global_scale = self.header.read(f"{name}.global_scale")
        error = norm = 0.0
        with tempfile.SpooledTemporaryFile(CHUNK_BYTES, dir=str(self.target.parent)) as scales:
            for rows in self._chunks(name):
                x = self.source.read(name, *rows)
                q = quantize(
                    x,
                    options.format,
                    scale_rule=options.scale_rule,
                    global_scale=global_scale,
                    rotation=options.rotation,
                )
                if self.strict and options.format.scale_code.is_nan(q.scale).any():
                    raise StorageError(f"quantize: {self.source.path}: {name} holds NaN or Inf (strict)")
                file.write(as_bytes(q.data).numpy().data)
                scales.write(as_bytes(q.scale).numpy().data)
                error += dequantize(q).sub_(x).square_().sum(dtype=torch.float64).item()
                norm += x.float().square_().sum(dtype=torch.float64).item()
                progress(x.nbytes, name)
            scales.seek(0)
            shutil.copyfileobj(scales, file)
        if math.isfinite(error):
            self.measured[name] = error / norm if norm else error

    def bad_blocks(self, name: str) -> int:
        """Blocks of the finished target that are NaN."""
        stored = replace(self.header, path=self.target)
        scale, code = self.header.entries[f"{name}.scale"], self.options.format.scale_code
        pieces = (
            stored.read_bytes(scale.name, start, min(start + CHUNK_BYTES, scale.nbytes))
            for start in range(0, scale.nbytes, CHUNK_BYTES)
        )
        return sum(int(code.is_nan(piece).sum()) for piece in pieces)

    def _write_copy(self, name: str, file: BinaryIO, progress: Report) -> None:
        nbytes = self.source.entries[name].nbytes
        for start in range(0, nbytes, CHUNK_BYTES):
            data = self.source.read_bytes(name, start, min(start + CHUNK_BYTES, nbytes))
            file.write(data.numpy().data)
            progress(len(data), name)


def quantize_checkpoint(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    format: Format | str,
    *,
    scale_rule: str | None = None,
    include: Iterable[str] | str | None = None,
    exclude: Iterable[str] | str | None = None,
    rotation: int = 0,
    overwrite: bool = False,
    strict: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Quantize the weights of a safetensors checkpoint, in memory that does not grow with it.

    Each tensor becomes what `quantize` of the whole tensor gives, byte for byte, in files that `nibblas.storage.load`
    reads; all others are copied byte for byte. A run that was killed goes on where it stopped when called again.

    Parameters
    ----------
    src : a safetensors file, or a folder with model.safetensors or with shards and their *.safetensors.index.json.
    dst : the file, or the folder, to make. Of a folder, config.json gains `quantization_config`, the index is written
        anew, and all else that is not weights is copied.
    format, scale_rule, rotation : as for `quantize`.
    include : patterns (fnmatch) of names, with or without a ".weight" at the end; those that start with a dot are of
        the last piece of a layer's name, as of `nn.convert`. None is "*.weight", for 2-D tensors, and for 3-D ones
        named "*expert*".
    exclude : patterns of names that are left as they are even if included; None is nn.DEFAULT_EXCLUDE, as of
        `nn.convert`.
    overwrite : write all of dst anew, in place of what is there, and remove other weights that an earlier run made or
        began (its files and its index tell). Without it nothing is replaced or removed: a file that holds what would be
        written is kept, an unfinished one is gone on with, and any other in the way is an error, be it of another
        source (its size and time of change count), of other options or of something else.
    strict : raise at the first tensor to quantize that holds NaN or Inf; without it those blocks become NaN, and the
        Summary counts them.
    progress : called with source bytes done, those in all, and the tensor's name. NVFP4 reads a tensor twice.

    The blocks lie along the last dimension, which must be the one that the product sums over: (..., N, K). Some models
    store (K, N) (GPT-2 and its kin) or (experts, K, N) (gpt-oss and Llama 4, unquantized). Those whose model_type in
    config.json is in TRANSPOSED are refused unless these weights are excluded; of others a file can't tell.

    Raises
    ------
    StorageError for a source that is damaged, incomplete or quantized already, for one without a tensor to quantize,
    for weights known to be (K, N), for a dst that lies inside src, for files in the way (even with `overwrite` what is
    no regular file, and other weights that no run made), and with `strict` for NaN and Inf. ValueError for an unknown
    format, rule or rotation, and for a pattern that matches no tensor and is none of DEFAULT_EXCLUDE. On any error, and
    when killed, an unfinished file has the name *.partial and none other.
    """
    src, dst = Path(src), Path(dst)
    format = format_for("quantize", format)
    check_options("quantize", format, scale_rule, rotation)
    rule = scale_rule or format.scale_rules[0]
    options = Options(
        format,
        rule,
        rotation,
        as_patterns("quantize", "include", include, DEFAULT_INCLUDE),
        as_patterns("quantize", "exclude", exclude, DEFAULT_EXCLUDE),
    )
    if src.resolve() in (dst.resolve(), *dst.resolve().parents):
        raise StorageError(f"quantize: the output {dst} is the source {src} or lies inside it; name another place")
    index = _index(src) if src.is_dir() else None
    shards = [_Shard(read_header(path), target, options, strict, {}) for path, target in _files(src, dst, index)]
    _check_source(src, shards, index, options)
    beside, left_out = _beside(src, dst, shards, index) if src.is_dir() else ({}, [])
    _check_target(dst, shards, beside, overwrite)

    (dst if src.is_dir() else dst.parent).mkdir(parents=True, exist_ok=True)
    reused = [] if overwrite else [shard for shard in shards if shard.is_finished()]
    total = sum(unit.work for shard in shards for unit in shard.units)
    done = sum(unit.work for shard in reused for unit in shard.units)

    def report(count: int, name: str) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, total, name)

    for shard in shards:
        if shard not in reused:
            shard.write(report, overwrite)
    quantized = tuple(_summarised(shard, name) for shard in shards for name in shard.planned)
    if strict and (bad := [tensor.name for tensor in quantized if tensor.bad_blocks]):
        raise StorageError(f"quantize: {src}: {', '.join(bad)} held NaN or Inf when an earlier run wrote them (strict)")
    for path, content in beside.items():
        _write(path, content)
    return Summary(
        format.name,
        rule,
        rotation,
        quantized,
        tuple(SkippedTensor(*item) for shard in shards for item in shard.skipped.items()),
        sum(entry.nbytes for shard in shards for entry in shard.source.entries.values()),
        sum(shard.bytes_after for shard in shards),
        tuple(shard.target.name for shard in reused),
        tuple(left_out),
    )


def _summarised(shard: _Shard, name: str) -> QuantizedTensor:
    entry, after = shard.source.entries[name], shard.header.entries
    bytes_after = sum(after[stored].nbytes for stored in parts(name, shard.planned[name]))
    mse, bad = shard.measured.get(name), shard.bad_blocks(name)
    return QuantizedTensor(name, entry.shape, entry.nbytes, bytes_after, mse, bad)


def _index(folder: Path) -> Path | None:
    """The folder's index of shards, if it has one."""
    found = sorted(folder.glob("*.safetensors.index.json"))
    if len(found) > 1:
        raise StorageError(f"{folder}: more than one index: {', '.join(path.name for path in found)}")
    return found[0] if found else None


def _files(src: Path, dst: Path, index: Path | None) -> list[tuple[Path, Path]]:
    """The weight files of the source and their targets."""
    if not src.is_dir():
        if dst.is_dir():
            raise StorageError(f"quantize: the source {src} is a file, so the output is one; {dst} is a folder")
        return [(src, dst)]
    if dst.exists() and not dst.is_dir():
        raise StorageError(f"quantize: the source {src} is a folder, so the output is one; {dst} is a file")
    if index:
        names = sorted(set(weight_map(index).values()))
    else:
        names = sorted(path.name for path in src.glob("*.safetensors"))
        if len(names) != 1:
            found = ", ".join(names) or "none"
            raise StorageError(f"{src}: need an index of shards or one safetensors file, found {found}")
    missing = [name for name in names if not (src / name).is_file()]
    if missing:
        raise StorageError(f"{src}: shards that the index names are missing: {', '.join(missing)}")
    return [(src / name, dst / name) for name in names]


def _check_source(src: Path, shards: list[_Shard], index: Path | None, options: Options) -> None:
    """Raise unless the source is whole, not quantized yet, and has something to quantize."""
    stored = {shard.source.path.name: shard.source.entries for shard in shards}
    lost = [name for name, file in (weight_map(index) if index else {}).items() if name not in stored[file]]
    if lost:
        raise StorageError(f"{index}: tensors that are not in their shards: {', '.join(lost)}")
    config = src / "config.json"
    if config.is_file() and (quantization := read_json(config).get("quantization_config")):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise StorageError(f"{src}: quantized already, by {method!r}; need plain weights")
    for shard in shards:
        if METADATA_KEY in shard.source.metadata:
            raise StorageError(f"{shard.source.path}: quantized already, by nibblas; need plain weights")
    _check_patterns(src, shards, "include", set(options.include) - set(DEFAULT_INCLUDE))
    _check_patterns(src, shards, "exclude", set(options.exclude) - set(DEFAULT_EXCLUDE))
    _check_orientation(src, shards)
    if not any(shard.planned for shard in shards):
        skipped = [item for shard in shards for item in shard.skipped.items()]
        skipped.sort(key=lambda item: item[1].startswith("its name"))  # what was included first
        excluded = any(reason.startswith("excluded by") for _, reason in skipped)
        why = "nothing to quantize" + (" (exclude wins over include). " if excluded else ". ")
        reasons = [f"{name}: {reason}" for name, reason in skipped[:8]] + ["..."] * (len(skipped) > 8)
        raise StorageError(f"{src}: {why}" + "; ".join(reasons))


def _check_patterns(src: Path, shards: list[_Shard], argument: str, patterns: set[str]) -> None:
    """Raise for a pattern that matches nothing: a slip would go unseen until the output is used."""
    names = [name for shard in shards for name in shard.source.entries]
    one_shard = not src.is_dir() and re.search(r"-\d+-of-\d+\.safetensors$", src.name)
    hint = f", which is one shard: the folder {src.parent} would name all tensors" if one_shard else ""
    for pattern in sorted(patterns):
        if not any(_matches(name, pattern) for name in names):
            count = counted(len(names), "tensor")
            raise ValueError(f"quantize: {argument} pattern {pattern!r} matches none of the {count} of {src}{hint}")


def _check_orientation(src: Path, shards: list[_Shard]) -> None:
    """Raise if weights that the model stores as (..., K, N) were to be quantized, along N."""
    path = (src if src.is_dir() else src.parent) / "config.json"
    try:
        config = read_json(path) if path.is_file() else {}
    except StorageError:
        if src.is_dir():
            raise
        config = {}  # beside a single file, perhaps of something else
    for model_type in _model_types(config):
        patterns = TRANSPOSED.get(model_type, ())
        names = [name for shard in shards for name in shard.planned]
        if found := {pattern: name for pattern in patterns for name in names if fnmatchcase(f".{name}", pattern)}:
            raise StorageError(
                f"quantize: {src}: {next(iter(found.values()))} is (..., K, N) in models of model_type {model_type!r}, "
                f"need (..., N, K) as of nn.Linear: transpose such weights, or exclude {', '.join(found)}"
            )


def _model_types(config: Any) -> Iterator[str]:
    """Every model_type of a config.json, those of the models that a model is made of too."""
    if isinstance(config, dict):
        if isinstance(config.get("model_type"), str):
            yield config["model_type"]
        for value in config.values():
            yield from _model_types(value)


def _check_target(dst: Path, shards: list[_Shard], beside: dict[Path, Path | bytes], overwrite: bool) -> None:
    """Raise if other files are in the way, or with `overwrite` remove an earlier run's that no new file will replace.

    What lies beside the weights does not tell who made it, so that it is in the way unless its bytes are the new ones.
    """
    ours = {path for shard in shards for path in (shard.target, shard.partial)}
    there = {path for path in dst.iterdir() if path.name.endswith(WEIGHT_ENDINGS)} if dst.is_dir() else set()
    stale = sorted(there - ours - beside.keys())
    if foreign := [path for path in stale if not _is_made(path)]:
        raise StorageError(
            f"quantize: {_listed(foreign)}: weights that `nibblas quantize` did not make would lie among the new ones; "
            "choose another folder, or remove them"
        )
    todo = [shard for shard in shards if overwrite or not shard.is_finished()]
    changed = [path for path, content in beside.items() if not _holds(path, content)]
    for path in [path for shard in todo for path in (shard.target, shard.partial)] + changed:
        if reason := why_not_replaced(path):
            raise StorageError(f"quantize: {path} {reason}")
    conflicts = stale + [other for shard in shards if (other := shard.conflict())]
    conflicts += [path for path in changed if path.exists()]
    if conflicts and not overwrite:
        known = {None, *(shard.header.metadata[SOURCE_KEY] for shard in shards)}
        others = [path for path in conflicts if _made_from(path) not in known]
        rest = [path for path in conflicts if path not in others]
        found = [f"{_listed(others)} was made from another source or with other options"] if others else []
        found += [f"{_listed(rest)} would be replaced or removed"] if rest else []
        raise StorageError(f"quantize: {'; '.join(found)}; choose another output, move these away, or overwrite")
    for path in stale:
        path.unlink()


def _listed(paths: list[Path]) -> str:
    return ", ".join(map(str, paths))


def _made_from(path: Path) -> str | None:
    """The digest in the header of a file that an earlier run made or began; None for any other."""
    if not path.is_file():
        return None
    try:
        return read_header(path, unfinished=True).metadata.get(SOURCE_KEY)
    except StorageError:
        return None


def _is_made(path: Path) -> bool:
    """Whether an earlier run made this file of weights or this index, or began it: a .partial may end in its header."""
    if not path.name.endswith(".index.json"):
        return _made_from(path) is not None or (path.suffix == ".partial" and _ends_in_header(path))
    try:
        metadata = read_json(path).get("metadata")
    except (StorageError, OSError):
        return False
    return isinstance(metadata, dict) and metadata.items() >= QUANT_METHOD.items()


def _ends_in_header(path: Path) -> bool:
    """Whether a file is the start of a safetensors file, or empty, and holds nothing of a tensor yet."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        raw, size = file.read(9), path.stat().st_size
    return size < 9 or (raw[8:] == b"{" and size - 8 < int.from_bytes(raw[:8], "little") <= MAX_HEADER_BYTES)


def _digest(source: Header, options: Options) -> str:
    """A name for the output: a hash of the options, the source's size, time of change, header, and samples all over it.

    The samples are for files whose times tell nothing, as where an archive or a build gave all the same.
    """
    status = source.path.stat()
    size = status.st_size
    digest = hashlib.sha256(json.dumps([options.as_dict(), size, status.st_mtime_ns]).encode())
    with open(source.path, "rb") as file:
        digest.update(file.read(source.data_start))
        for i in range(64):
            file.seek(source.data_start + (size - source.data_start) * i // 64)
            digest.update(file.read(4096))
    return digest.hexdigest()


def _starts_with(path: Path, raw: bytes) -> bool:
    with open(path, "rb") as file:
        return file.read(len(raw)) == raw


def _lock(file: BinaryIO, path: Path) -> None:
    """Raise if another process writes the file; the lock goes when the file is closed."""
    if fcntl:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(f"quantize: another process is writing {path}") from None


def _beside(
    src: Path, dst: Path, shards: list[_Shard], index: Path | None
) -> tuple[dict[Path, Path | bytes], list[str]]:
    """What dst will hold beside its weights (a file to copy, or content), and the files of src that are left out."""
    beside: dict[Path, Path | bytes] = {}
    left_out = []
    used = {shard.source.path.name for shard in shards} | {"config.json"} | ({index.name} if index else set())
    for path in sorted(src.rglob("*")):
        name = path.relative_to(src)
        if not path.is_file() or str(name) in used:
            continue
        hidden = any(piece.startswith(".") for piece in name.parts)
        if hidden or path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json"):
            left_out.append(str(name))
        else:
            beside[dst / name] = path
    if index:
        content = read_json(index)
        files = {name: shard.target.name for shard in shards for name in shard.header.entries}
        known = content.get("metadata")
        metadata = dict(known) if isinstance(known, dict) else {}
        metadata |= {"total_size": sum(shard.bytes_after for shard in shards), **QUANT_METHOD}
        content = {**content, "metadata": metadata, "weight_map": dict(sorted(files.items()))}
        beside[dst / index.name] = _json(content)
    config = src / "config.json"
    if config.is_file():
        quantization_config = {**QUANT_METHOD, **shards[0].options.as_dict()}
        beside[dst / config.name] = _json({**read_json(config), "quantization_config": quantization_config})
    return beside, left_out


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"


def _holds(path: Path, content: Path | bytes) -> bool:
    """Whether a file has this content already."""
    if not path.is_file():
        return False
    if isinstance(content, Path):
        return filecmp.cmp(content, path, shallow=False)
    return path.read_bytes() == content


def _write(path: Path, content: Path | bytes) -> None:
    """Make a file, and its folder, unless it is there."""
    if _holds(path, content):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as target:
        if isinstance(content, Path):
            with open(content, "rb") as source:
                shutil.copyfileobj(source, target)
        else:
            target.write(content)
