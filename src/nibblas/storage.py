"""Tensors and ScaledTensors in safetensors files, with nothing lost.

A ScaledTensor called `name` is stored as `name` (U8, packed codes), `name.scale` (U8) and, if it has one,
`name.global_scale` (F32). What the bytes mean is a JSON string under the key "nibblas" of the file's metadata:

    {"version": 1, "tensors": {name: {"format", "layout", "data_layout", "matrix", "scale_rule", "rotation",
                                      "global_scale": true or false}}}

The order in the file is by element size (largest first, so that all are aligned), then by name, a tensor's codes before
its scales: equal tensors give equal files. The safetensors library reads the files; it can't write them, for it puts
metadata in random order, nor check a file's offsets without mapping it, nor read a part without a copy of the rest.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nibblas.formats import as_format
from nibblas.layouts import as_layout
from nibblas.paths import atomic_file, why_not_replaced
from nibblas.tensor import ScaledTensor

VERSION = 1
METADATA_KEY = "nibblas"
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit


class StorageError(ValueError):
    """A file that can't be read or written as asked; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class StoredDtype:
    """A safetensors dtype: bits an element, and the torch dtype that holds it (None: torch has none)."""

    bits: int
    torch: torch.dtype | None


DTYPES = {
    "BOOL": StoredDtype(8, torch.bool),
    "F4": StoredDtype(4, torch.float4_e2m1fn_x2),
    "F6_E2M3": StoredDtype(6, None),
    "F6_E3M2": StoredDtype(6, None),
    "U8": StoredDtype(8, torch.uint8),
    "I8": StoredDtype(8, torch.int8),
    "F8_E4M3": StoredDtype(8, torch.float8_e4m3fn),
    "F8_E5M2": StoredDtype(8, torch.float8_e5m2),
    "F8_E8M0": StoredDtype(8, torch.float8_e8m0fnu),
    "F8_E4M3FNUZ": StoredDtype(8, torch.float8_e4m3fnuz),
    "F8_E5M2FNUZ": StoredDtype(8, torch.float8_e5m2fnuz),
    "I16": StoredDtype(16, torch.int16),
    "U16": StoredDtype(16, torch.uint16),
    "F16": StoredDtype(16, torch.float16),
    "BF16": StoredDtype(16, torch.bfloat16),
    "I32": StoredDtype(32, torch.int32),
    "U32": StoredDtype(32, torch.uint32),
    "F32": StoredDtype(32, torch.float32),
    "I64": StoredDtype(64, torch.int64),
    "U64": StoredDtype(64, torch.uint64),
    "F64": StoredDtype(64, torch.float64),
    "C64": StoredDtype(64, torch.complex64),
}
_NAMES = {stored.torch: name for name, stored in DTYPES.items() if stored.torch is not None}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: dtype as safetensors names it, logical shape, and its bytes [start, end) after the header.

    An F4 tensor has its logical shape, two elements a byte: (2, 8) is 8 bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def rows(self) -> int:
        """Rows of the tensor seen as a matrix (everything but the last dimension)."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of one such row."""
        return (self.shape[-1] if self.shape else 1) * DTYPES[self.dtype].bits // 8


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of itself, checked against the file's size. Entries are in the file's order."""

    path: Path
    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int  # where the first tensor begins, in bytes from the start of the file

    @property
    def scaled(self) -> dict[str, dict[str, Any]] | None:
        """nibblas's facts of each ScaledTensor by name; None if the file has no nibblas metadata.

        Raises StorageError if the metadata can't be understood.
        """
        if METADATA_KEY not in self.metadata:
            return None
        try:
            facts = json.loads(self.metadata[METADATA_KEY])
            version, tensors = facts["version"], facts["tensors"]
            if not all(isinstance(item, dict) for item in (tensors, *tensors.values())):
                raise ValueError("tensors is not a table of tables")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(f"{self.path}: the nibblas metadata is not understood ({error!r})") from error
        if version != VERSION:
            raise StorageError(f"{self.path}: nibblas metadata has version {version!r}, this nibblas reads {VERSION}")
        return tensors

    def read_bytes(self, name: str, start: int = 0, end: int | None = None) -> Tensor:
        """Bytes start..end of one tensor, no others: (end - start,) uint8 on the CPU."""
        entry = self.entries[name]
        end = entry.nbytes if end is None else end
        if not 0 <= start <= end <= entry.nbytes:
            raise IndexError(f"{self.path}: bytes {start}..{end} of {name}, which has {entry.nbytes}")
        out = torch.empty(end - start, dtype=torch.uint8)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.data_start + entry.start + start)
            view = out.numpy().data
            while view:
                count = file.readinto(view)
                if not count:
                    raise StorageError(f"{self.path}: the file ended inside {name}; it changed while being read")
                view = view[count:]
        return out

    def read(self, name: str, start: int = 0, end: int | None = None) -> Tensor:
        """Rows start..end of a tensor seen as a matrix (rows, shape[-1]), no other bytes, in the stored dtype.

        Without start and end, the whole tensor in its own shape. F4 comes as float4_e2m1fn_x2, two elements each.
        """
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype].torch
        if dtype is None:
            raise StorageError(f"{self.path}: {name} has dtype {entry.dtype}, which torch doesn't have")
        partial = (start, end) != (0, None)
        end = entry.rows if end is None else end
        data = self.read_bytes(name, start * entry.row_bytes, end * entry.row_bytes).view(dtype)
        last = (entry.shape[-1] // 2,) if entry.dtype == "F4" else entry.shape[-1:]
        return data.reshape(((end - start,) if partial else entry.shape[:-1]) + last)


def read_header(path: str | os.PathLike, *, unfinished: bool = False) -> Header:
    """The header of a safetensors file, without reading any tensor.

    Raises StorageError if the file is none, is truncated, or lists tensors that overlap, leave gaps, lie outside the
    file or have another size than dtype and shape say. With `unfinished` the file may end before its tensors do.
    """
    path = Path(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        raw = file.read(9)
        length = int.from_bytes(raw[:8], "little")
        if raw[8:] != b"{":
            raise StorageError(f"{path}: not a safetensors file (it starts with {raw!r})")
        if length > MAX_HEADER_BYTES:
            raise StorageError(
                f"{path}: not a safetensors file (a header of {length} bytes, {MAX_HEADER_BYTES} at most)"
            )
        if 8 + length > size:
            raise StorageError(f"{path}: truncated in its header, which is {length} bytes of a file of {size}")
        raw += file.read(length - 1)
    header = parse_header(raw, path)
    end = max((entry.end for entry in header.entries.values()), default=0)
    if size != header.data_start + end and not unfinished:
        what = "truncated" if size < header.data_start + end else "too long"
        raise StorageError(f"{path}: {what}: it is {size} bytes, its header tells of {header.data_start + end}")
    return header


def parse_header(raw: bytes, path: Path) -> Header:
    """The Header of a file's first bytes (8 of length, then JSON); `path` is for messages and later reads."""
    try:
        items = json.loads(raw[8:], object_pairs_hook=_no_duplicates)
        metadata = items.pop("__metadata__", {})
        if not all(isinstance(text, str) for text in [*metadata, *metadata.values()]):
            raise ValueError("__metadata__ is not a table of strings")
        entries = sorted(
            (_entry(name, item) for name, item in items.items()), key=lambda entry: (entry.start, entry.end)
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(f"{path}: not a valid safetensors header: {error}") from error
    position = 0
    for entry in entries:
        if entry.start != position:
            what = "overlaps the tensor before it" if entry.start < position else "leaves a gap before it"
            raise StorageError(f"{path}: {entry.name} at bytes {entry.start}..{entry.end} {what} (need {position})")
        position = entry.end
    return Header(path, {entry.name: entry for entry in entries}, metadata, len(raw))


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) != len(pairs):
        raise ValueError("a name occurs twice")
    return items


def _entry(name: str, item: dict[str, Any]) -> Entry:
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"{name} has the unknown dtype {dtype!r}")
    if not all(type(i) is int and i >= 0 for i in [*shape, *offsets]) or len(offsets) != 2:
        raise ValueError(f"{name} has shape {shape} and data_offsets {offsets}, need integers that are not negative")
    entry = Entry(name, dtype, tuple(shape), *offsets)
    bits = math.prod(shape) * DTYPES[dtype].bits
    if dtype == "F4" and (not shape or shape[-1] % 2):
        raise ValueError(f"{name} is F4 of shape {shape}, need an even last dimension (two elements a byte)")
    if bits % 8 or entry.nbytes != bits // 8:
        raise ValueError(f"{name} is {dtype} of shape {shape}, which is {bits / 8:g} bytes, and has {entry.nbytes}")
    return entry


Part = tuple[str, str, tuple[int, ...]]  # name in the file, safetensors dtype, logical shape


def parts(name: str, tensor: Tensor | ScaledTensor) -> dict[str, Tensor]:
    """The tensors that are stored for one, by their names in the file; codes come before scales."""
    if isinstance(tensor, Tensor):
        return {name: tensor}
    if not isinstance(tensor, ScaledTensor):
        raise TypeError(f"save: {name} is a {type(tensor).__name__}, need a Tensor or a ScaledTensor")
    stored = {name: tensor.data, f"{name}.scale": tensor.scale}
    if tensor.global_scale is not None:
        stored[f"{name}.global_scale"] = tensor.global_scale
    return stored


def part(name: str, tensor: Tensor) -> Part:
    """Name, dtype and shape of a tensor as the header lists them."""
    if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
        raise StorageError(f"save: {name} is {tensor.dtype} ({tensor.layout}), which safetensors can't hold")
    dtype, shape = _NAMES[tensor.dtype], tuple(tensor.shape)
    return name, dtype, (*shape[:-1], 2 * shape[-1]) if dtype == "F4" else shape


def facts(tensor: ScaledTensor) -> dict[str, Any]:
    """What the metadata tells of a ScaledTensor."""
    return {
        "format": tensor.format.name,
        "layout": tensor.layout.name,
        "data_layout": tensor.data_layout.name,
        "matrix": tensor.matrix,
        "scale_rule": tensor.scale_rule,
        "rotation": tensor.rotation,
        "global_scale": tensor.global_scale is not None,
    }


def encode_header(
    groups: Mapping[str, list[Part]], scaled: Mapping[str, dict[str, Any]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The first bytes of a file that holds the parts of each group; `scaled` has the facts of each ScaledTensor."""
    order = [(-DTYPES[item[1]].bits, group, i, item) for group, items in groups.items() for i, item in enumerate(items)]
    header: dict[str, Any] = {}
    nibblas = json.dumps({"version": VERSION, "tensors": scaled}, sort_keys=True)
    header["__metadata__"] = dict(sorted({**(metadata or {}), METADATA_KEY: nibblas}.items()))
    position = 0
    for bits, *_, (name, dtype, shape) in sorted(order):
        if name in header:
            raise StorageError(f"save: two tensors would be stored as {name}")
        end = position + math.prod(shape) * -bits // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def save(
    path: str | os.PathLike, tensors: Mapping[str, Tensor | ScaledTensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors to a safetensors file, replacing one of that name at once and only when all is written.

    Equal tensors and metadata give equal bytes. `metadata` is for strings of your own, as safetensors has them.

    Raises TypeError where path is no path, tensors no mapping, or one of them no tensor. Raises StorageError for a path
    that is no file's, a name that is no string, a dtype safetensors can't hold, a tensor on the meta device, two
    tensors of one stored name, metadata that is not strings or uses the key "nibblas", and a global_scale that is not
    finite.

    >>> import torch, tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "w.safetensors")
    >>> save(path, {"w": ScaledTensor.from_parts(torch.zeros(2, 8).byte(), torch.zeros(2, 1).byte(), "nvfp4")})
    >>> load(path)["w"].shape
    torch.Size([2, 16])
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"save: path is a {type(path).__name__}, need a path (the tensors come second)")
    path = Path(path)
    if not path.parent.is_dir():
        raise StorageError(f"save: {path}: there is no folder {path.parent}")
    if reason := why_not_replaced(path):
        raise StorageError(f"save: {path} {reason}")
    if not isinstance(tensors, Mapping):
        raise TypeError(f"save: tensors is a {type(tensors).__name__}, need a dict of tensors by name")
    metadata = dict(metadata or {})
    if METADATA_KEY in metadata or not all(isinstance(text, str) for text in [*metadata, *metadata.values()]):
        raise StorageError(f"save: metadata needs strings under keys other than {METADATA_KEY!r}, got {metadata}")
    if odd := [name for name in tensors if not isinstance(name, str)]:
        raise StorageError(f"save: names need to be strings, got {', '.join(map(repr, odd))}")
    stored = {name: parts(name, tensor) for name, tensor in tensors.items()}
    every = {name: tensor for items in stored.values() for name, tensor in items.items()}
    if empty := [name for name, tensor in every.items() if tensor.is_meta]:
        raise StorageError(f"save: {', '.join(empty)} on the meta device, which holds no data")
    scaled = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, ScaledTensor)}
    for name, tensor in scaled.items():
        _check_global_scale("save", name, tensor)
    groups = {group: [part(name, tensor) for name, tensor in items.items()] for group, items in stored.items()}
    raw = encode_header(groups, {name: facts(tensor) for name, tensor in scaled.items()}, metadata)
    with atomic_file(path) as file:
        file.write(raw)
        for name in parse_header(raw, path).entries:
            file.write(as_bytes(every[name]).numpy().data)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file beside the tensors; raises StorageError for anything else."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise StorageError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise StorageError(f"{path}: need a JSON object, found a {type(content).__name__}")
    return content


def weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, as an index of shards has it; raises StorageError where it is none."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict):
        raise StorageError(f"{index}: not an index of shards (no table weight_map)")
    if odd := [file for file in files.values() if not isinstance(file, str) or Path(file).name != file]:
        raise StorageError(f"{index}: not an index of shards ({odd[0]!r} is not a plain file name)")
    return files


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes, row after row, on the CPU: (nbytes,) uint8."""
    if tensor.itemsize == 1:
        # float4 and float8 have no copy of their own.
        tensor = tensor.view(torch.uint8)
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def load(path: str | os.PathLike, device: torch.device | str = "cpu") -> dict[str, Tensor | ScaledTensor]:
    """The tensors of a file that `save` or `nibblas quantize` wrote, by name.

    `save` of them gives the same file where that was saved without `metadata`.

    Raises StorageError for a file that is damaged, that another program wrote, or that lacks a part, and for a device
    that isn't there or that safetensors can't read to (meta).
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"load: path is a {type(path).__name__}, need a path")
    header = read_header(path)
    scaled = header.scaled
    if scaled is None:
        raise StorageError(
            f"{path}: no nibblas metadata, so nibblas didn't write it. Plain tensors: safetensors.torch.load_file. "
            "What FP4 tensors it holds: nibblas inspect"
        )
    try:
        place = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts that it has it
        raise StorageError(f"load: there is no device {str(device)!r} here: {error}") from error
    try:
        stored = load_file(path, device=str(place))
    except SafetensorError as error:
        raise StorageError(f"load: safetensors can't read {path} to device {str(place)!r}: {error}") from error
    tensors: dict[str, Tensor | ScaledTensor] = {}
    for name, fact in scaled.items():
        try:
            wanted = [name, f"{name}.scale"] + [f"{name}.global_scale"] * fact["global_scale"]
            missing = [part for part in wanted if part not in stored]
            if missing:
                raise StorageError(f"{path}: {name} lacks {', '.join(missing)}")
            data, scale, *rest = (stored.pop(part) for part in wanted)
            tensor = ScaledTensor(
                data,
                scale,
                as_format(fact["format"]),
                rest[0] if rest else None,
                as_layout(fact["layout"]),
                as_layout(fact["data_layout"]),
                fact["scale_rule"],
                fact["rotation"],
                tuple(fact["matrix"]) if fact["matrix"] else None,
            )
        except StorageError:
            raise
        except (ValueError, TypeError, KeyError) as error:
            raise StorageError(f"{path}: {name} can't be read: {error}") from error
        _check_global_scale(str(path), name, tensor)
        tensors[name] = tensor
    return {**stored, **tensors}


def _check_global_scale(where: str, name: str, tensor: ScaledTensor) -> None:
    if tensor.global_scale is not None and not tensor.global_scale.isfinite().all():
        raise StorageError(f"{where}: {name} has a global_scale that is not finite: {tensor.global_scale.tolist()}")
