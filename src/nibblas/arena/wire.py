"""What the three processes of the arena say to each other.

Messages are JSON objects, each behind its length, over a socket pair. A request carries a fresh nonce and its reply
must carry the same one: what is extra, missing, oversized or unreadable is a ProtocolError. Tensors travel through
shared memory:

- data for a submission, which the judge made: a pickled skeleton in which tensors are numbers, then the bytes of each
  distinct storage. Only the judge, which is trusted, writes such a skeleton.
- what a submission returned: a description in plain JSON that the runner checks, and the bytes of its tensors. Nothing
  of it is ever unpickled.
"""

import array
import fcntl
import io
import json
import math
import mmap
import os
import pickle
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_REPLY = 4 << 20  # bytes of one message from a worker; the report of a profiler is the longest
MAX_TRUSTED = 256 << 20  # bytes of one message from runner or judge
MAX_DEPTH = 8  # of what a submission returns
MAX_LEAVES = 4096
ALIGNMENT = 256  # bytes, of each storage in shared memory
LOOK = 0.1  # seconds between looks at what a worker does while its reply is waited for
_LENGTH = struct.Struct(">I")


class ProtocolError(Exception):
    """The other side broke the protocol; the message says how."""


class UnsendableError(ValueError):
    """A value that can't be handed to another process, with where it stands in the data."""


class Channel:
    """One end of a socket pair. The end that asks uses `ask`; the end that answers `requests` and `reply`."""

    def __init__(self, end: socket.socket, max_bytes: int = MAX_TRUSTED):
        self.end, self.max_bytes = end, max_bytes

    def close(self) -> None:
        """Close this end."""
        self.end.close()

    def ask(
        self,
        do: str,
        seconds: float,
        fds: Sequence[int] = (),
        look: Callable[[], None] | None = None,
        **values: Any,
    ) -> dict:
        """Send a request and return its reply, whose file descriptors are in "fds" where they are taken.

        `look` is called now and then while waiting, and may raise. Raises TimeoutError, EOFError or ProtocolError.
        """
        nonce = self.send_request(do, fds, **values)
        return self.take_reply(nonce, seconds, look)

    def send_request(self, do: str, fds: Sequence[int] = (), **values: Any) -> str:
        """Send a request and return its nonce; a ProtocolError where something was said without being asked."""
        if select.select([self.end], [], [], 0)[0]:
            if not self.end.recv(1, socket.MSG_PEEK):
                raise EOFError
            raise ProtocolError("a message that nobody asked for")
        nonce = secrets.token_hex(16)
        self._send({"do": do, "nonce": nonce, **values}, fds)
        return nonce

    def take_reply(self, nonce: str, seconds: float, look: Callable[[], None] | None = None) -> dict:
        """The reply to a request that was sent; as `ask`."""
        message, fds = self._receive(time.monotonic() + seconds, look)
        if message.get("nonce") != nonce:
            for fd in fds:
                os.close(fd)
            raise ProtocolError("a message that does not answer the request")
        return {**message, "fds": fds}

    def requests(self) -> Iterator[tuple[dict, list[int]]]:
        """Requests and their file descriptors, until the other side is gone."""
        while True:
            try:
                yield self._receive(math.inf, None)
            except (EOFError, ConnectionError):
                return

    def reply(self, nonce: str, fds: Sequence[int] = (), **values: Any) -> None:
        """Answer a request."""
        self._send({"nonce": nonce, **values}, fds)

    def _send(self, message: dict, fds: Sequence[int]) -> None:
        content = json.dumps(message).encode()
        frame = _LENGTH.pack(len(content)) + content
        try:
            self.end.settimeout(None)
            sent = socket.send_fds(self.end, [frame], list(fds)) if fds else 0
            self.end.sendall(frame[sent:])
        except (BrokenPipeError, ConnectionError):
            raise EOFError from None

    def _receive(self, deadline: float, look: Callable[[], None] | None) -> tuple[dict, list[int]]:
        fds: list[int] = []
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline, look, fds))
        if length > self.max_bytes:
            raise ProtocolError(f"a message of {length} bytes, {self.max_bytes} are allowed")
        content = self._read(length, deadline, look, fds)
        try:
            message = json.loads(content)
        except (ValueError, RecursionError):
            raise ProtocolError("a message that is not JSON") from None
        if not isinstance(message, dict):
            raise ProtocolError("a message that is no JSON object")
        return message, fds

    def _read(self, count: int, deadline: float, look: Callable[[], None] | None, fds: list[int]) -> bytes:
        taken = bytearray()
        while len(taken) < count:
            self._wait(deadline, look)
            try:
                part, control, *_ = self.end.recvmsg(min(count - len(taken), 1 << 20), socket.CMSG_SPACE(16))
            except ConnectionError:
                raise EOFError from None
            for level, kind, data in control:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds += array.array("i", data[: len(data) - len(data) % 4])
            if not part:
                raise EOFError
            taken += part
        return bytes(taken)

    def _wait(self, deadline: float, look: Callable[[], None] | None) -> None:
        if deadline == math.inf and look is None:
            return
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if select.select([self.end], [], [], min(left, LOOK))[0]:
                return
            if look is not None:
                look()


# --- shared memory -------------------------------------------------------------------------------------------------


class Room:
    """Shared memory of a fixed size that another process gets by its file descriptor.

    It can be neither shrunk nor grown, so that no one who reads it can be made to fault. One that is made with
    `writable=False` can be written by its maker alone.
    """

    def __init__(self, nbytes: int, writable: bool):
        self.nbytes = nbytes
        self.fd = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, max(nbytes, 1))
        self.memory = mmap.mmap(self.fd, max(nbytes, 1))
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        if not writable:
            seals |= getattr(fcntl, "F_SEAL_FUTURE_WRITE", 0x10)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)

    def close(self) -> None:
        """Let go of the memory; it is given back once no tensor and no other process looks into it."""
        del self.memory
        os.close(self.fd)


def map_fd(fd: int, *, write: bool = False) -> mmap.mmap:
    """The memory behind a file descriptor, which this closes. What is written to it without `write` stays here."""
    try:
        return mmap.mmap(fd, 0, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_COPY)
    finally:
        os.close(fd)


def bytes_at(memory: mmap.mmap, offset: int, nbytes: int) -> Tensor:
    """A uint8 tensor over shared memory."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


# --- data for a submission -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parcel:
    """Nested data taken apart: the pickled skeleton, and the distinct storages that its tensors look into."""

    skeleton: bytes
    storages: tuple[torch.UntypedStorage, ...]

    @property
    def offsets(self) -> list[int]:
        """Where each storage begins in shared memory, behind the skeleton."""
        offsets, at = [], _aligned(len(self.skeleton))
        for storage in self.storages:
            offsets.append(at)
            at = _aligned(at + storage.nbytes())
        return offsets

    @property
    def nbytes(self) -> int:
        """Of skeleton and storages in shared memory."""
        if not self.storages:
            return len(self.skeleton)
        return self.offsets[-1] + self.storages[-1].nbytes()

    def write(self, memory: mmap.mmap) -> dict:
        """Copy all into shared memory, and return what the other side needs to find it."""
        memory[: len(self.skeleton)] = self.skeleton
        for offset, storage in zip(self.offsets, self.storages, strict=True):
            bytes_at(memory, offset, storage.nbytes()).copy_(storage_bytes(storage))
        return {
            "skeleton": len(self.skeleton),
            "storages": [
                [offset, storage.nbytes(), storage.device.type]
                for offset, storage in zip(self.offsets, self.storages, strict=True)
            ],
        }


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, forbidden: str):
        super().__init__(file, protocol=5)
        self.forbidden = forbidden
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> tuple | None:
        if not isinstance(obj, Tensor):
            return None
        if type(obj) not in (Tensor, torch.nn.Parameter):
            raise UnsendableError(f"a tensor of type {type(obj).__name__}")
        if obj.layout is not torch.strided or obj.is_quantized or obj.device.type == "meta":
            raise UnsendableError(f"a tensor with layout {obj.layout} on {obj.device}")
        storage = obj.untyped_storage()
        number = self.numbers.setdefault(storage._cdata, len(self.numbers))
        self.storages[number] = storage
        kind = "parameter" if type(obj) is torch.nn.Parameter else "tensor"
        flags = (obj.requires_grad, obj.is_conj(), obj.is_neg())
        return kind, number, obj.dtype, tuple(obj.shape), obj.stride(), obj.storage_offset(), flags

    def reducer_override(self, obj: Any) -> Any:
        home = obj if isinstance(obj, type) or callable(obj) else type(obj)
        if getattr(home, "__module__", None) == self.forbidden:
            name = getattr(home, "__qualname__", repr(home))
            raise UnsendableError(f"{name} of {self.forbidden}.py, which is kept from submissions")
        return NotImplemented


class _Unpacker(pickle.Unpickler):
    def __init__(self, skeleton: bytes, storages: Sequence[torch.UntypedStorage]):
        super().__init__(io.BytesIO(skeleton))
        self.storages = storages
        self.tensors: dict[tuple, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        # The same tensor at two places stays one object.
        if pid not in self.tensors:
            kind, number, dtype, shape, stride, offset, (requires_grad, conj, neg) = pid
            storage = self.storages[number]
            tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
            tensor = tensor.conj() if conj else tensor
            tensor = torch._neg_view(tensor) if neg else tensor
            if kind == "parameter":
                tensor = torch.nn.Parameter(tensor, requires_grad=requires_grad)
            elif requires_grad:
                tensor.requires_grad_()
            self.tensors[pid] = tensor
        return self.tensors[pid]


def pack(data: Any, forbidden: str = "reference") -> Parcel:
    """Take data apart. UnsendableError for tensors that are no plain ones, and for objects of the forbidden module."""
    file = io.BytesIO()
    packer = _Packer(file, forbidden)
    try:
        packer.dump(data)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise UnsendableError(f"the data can't be handed to another process: {error}") from None
    storages = tuple(packer.storages[number] for number in range(len(packer.numbers)))
    return Parcel(file.getvalue(), storages)


def unpack(skeleton: bytes, storages: Sequence[torch.UntypedStorage]) -> Any:
    """Put data together again, over other storages of the same sizes. Only for what the judge packed."""
    return _Unpacker(skeleton, storages).load()


def storage_bytes(storage: torch.UntypedStorage) -> Tensor:
    """A uint8 tensor over a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def copy_of(parcel: Parcel) -> Any:
    """The data of a parcel once more, over storages of its own."""
    return unpack(parcel.skeleton, [storage.clone() for storage in parcel.storages])


# --- what a submission returned ------------------------------------------------------------------------------------


def describe(output: Any) -> tuple[dict, list[Tensor]]:
    """What a submission returned as plain JSON, and its tensors in order; what is not allowed there is named in it."""
    tensors: list[Tensor] = []
    leaves = 0

    def of(value: Any, depth: int) -> dict:
        nonlocal leaves
        leaves += 1
        if depth > MAX_DEPTH or leaves > MAX_LEAVES:
            return {"bad": f"more than {MAX_DEPTH} levels or {MAX_LEAVES} values"}
        kind = type(value)
        if kind is Tensor:
            tensors.append(value)
            return {"tensor": len(tensors) - 1}
        if kind is list:
            return {"list": [of(item, depth + 1) for item in value]}
        if kind is tuple or kind.__module__ == "torch.return_types":
            return {"tuple": [of(item, depth + 1) for item in value]}
        if kind is dict and all(type(key) is str for key in value):
            return {"dict": {key: of(item, depth + 1) for key, item in value.items()}}
        if value is None or kind in (bool, int, str):
            return {"value": value}
        if kind is float:
            return {"float": value.hex()}
        return {"bad": f"{kind.__module__}.{kind.__qualname__}"}

    tree = of(output, 0)
    facts = [
        {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "device": tensor.device.type,
            "layout": str(tensor.layout),
            # Others are harmless: torch.compile leaves notes of its own.
            "replaced": sorted(name for name in map(str, vars(tensor)) if hasattr(torch.Tensor, name)),
        }
        for tensor in tensors
    ]
    return {"tree": tree, "tensors": facts}, tensors


@dataclass(frozen=True)
class Returned:
    """A description of what a submission returned that has been checked. Offsets are where the bytes are to stand."""

    tree: dict
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor, contiguous."""
        return [dtype.itemsize * math.prod(shape) for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]

    @property
    def offsets(self) -> list[int]:
        """Where each tensor begins in shared memory."""
        offsets, at = [], 0
        for size in self.sizes:
            offsets.append(at)
            at = _aligned(at + size)
        return offsets

    @property
    def nbytes(self) -> int:
        """Of all tensors in shared memory."""
        return self.offsets[-1] + self.sizes[-1] if self.shapes else 0

    def to_json(self) -> dict:
        """For the judge, who reads it with `checked`."""
        dtypes = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        facts = [
            {"dtype": dtype, "shape": list(shape), "device": "", "layout": "torch.strided", "replaced": []}
            for dtype, shape in zip(dtypes, self.shapes, strict=True)
        ]
        return {"tree": self.tree, "tensors": facts}

    def build(self, memory: mmap.mmap, device: torch.device) -> Any:
        """The value itself, its tensors copied out of shared memory."""
        tensors = [
            bytes_at(memory, offset, size).clone().view(dtype).reshape(shape).to(device)
            for offset, size, dtype, shape in zip(self.offsets, self.sizes, self.dtypes, self.shapes, strict=True)
        ]

        def of(tree: dict) -> Any:
            ((kind, value),) = tree.items()
            if kind == "tensor":
                return tensors[value]
            if kind == "dict":
                return {key: of(item) for key, item in value.items()}
            if kind in ("list", "tuple"):
                return (list if kind == "list" else tuple)(of(item) for item in value)
            return float.fromhex(value) if kind == "float" else value

        return of(self.tree)


def write_tensors(tensors: Sequence[Tensor], offsets: Sequence[int], memory: mmap.mmap) -> None:
    """Copy tensors into shared memory, contiguous."""
    for tensor, offset in zip(tensors, offsets, strict=True):
        flat = _flat_bytes(tensor)
        bytes_at(memory, offset, flat.numel()).copy_(flat)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same, bit for bit."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_flat_bytes(a), _flat_bytes(b))


def _flat_bytes(t: Tensor) -> Tensor:
    return t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def checked(description: Any, device: str | None = None) -> Returned:
    """Check a description that came from a worker.

    Raises ProtocolError where it is no description, and UnsendableError, in words for people, where what was returned
    is not allowed: anything but plain tensors (on that device type, where one is given), numbers, words, None, and
    tuples, lists and dicts of them.
    """
    try:
        tree, facts = description["tree"], description["tensors"]
        dtypes = tuple(_dtype(fact["dtype"]) for fact in facts)
        shapes = tuple(tuple(fact["shape"]) for fact in facts)
        for shape in shapes:
            if not all(type(n) is int and 0 <= n < 2**48 for n in shape) or math.prod(shape) >= 2**48:
                raise ProtocolError(f"a tensor of shape {str(shape)[:80]}")
        seen = _check_tree(tree, len(facts), 0)
        if sorted(seen) != list(range(len(facts))):
            raise ProtocolError("a description that does not name each of its tensors once")
        for fact in facts:
            if fact["layout"] != "torch.strided":
                raise UnsendableError(f"the submission returned a tensor with layout {str(fact['layout'])[:40]}")
            if fact["replaced"]:
                raise UnsendableError(
                    f"the submission returned a tensor with attributes of its own in place of torch's:"
                    f" {str(fact['replaced'])[:99]}"
                )
            if device is not None and fact["device"] != device:
                raise UnsendableError(f"the submission returned a tensor on {str(fact['device'])[:20]}, need {device}")
        return Returned(tree, dtypes, shapes)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        if isinstance(error, UnsendableError):
            raise
        raise ProtocolError(f"a description of an output that is none: {type(error).__name__}") from None


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ProtocolError(f"a tensor of dtype {str(name)[:40]}")
    return found


def _check_tree(tree: Any, tensors: int, depth: int) -> list[int]:
    """The numbers of the tensors that a tree names."""
    if depth > MAX_DEPTH + 1:
        raise ProtocolError("a description that is too deep")
    ((kind, value),) = tree.items()
    if kind == "bad":
        raise UnsendableError(f"the submission returned {str(value)[:80]}, need tensors, or tuples or lists of them")
    if kind == "tensor":
        if type(value) is not int or not 0 <= value < tensors:
            raise ProtocolError(f"tensor {str(value)[:20]} of {tensors}")
        return [value]
    if kind in ("list", "tuple", "dict"):
        items = list(value.values()) if kind == "dict" else list(value)
        return [number for item in items for number in _check_tree(item, tensors, depth + 1)]
    if kind == "float":
        float.fromhex(value)
    elif kind != "value" or not (value is None or type(value) in (bool, int, str)):
        raise ProtocolError(f"a value of kind {str(kind)[:20]}")
    return []
