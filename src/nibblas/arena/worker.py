"""The process that runs a submission. Nothing that it says is believed without a check elsewhere.

It answers one request at a time: `start` and calibrating calls first, then `load`, then for each call `prepare`,
`call`, `describe` and `fetch`. Warm-up and measurement are the same requests. Torch, its timers and all that is used
here are looked up before the submission is imported.

One process serves all cases of a run, as a person's program would: what it keeps from one case to the next can't make
it right, since each call gets data that did not exist before and only the bytes that it returns are judged. After a
case in which it failed it is replaced.
"""

import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from mmap import mmap
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nibblas.arena.device import Device, device_of
from nibblas.arena.poison import poison_
from nibblas.arena.standins import StandIns, install
from nibblas.arena.wire import Channel, bytes_at, describe, map_fd, storage_bytes, unpack, write_tensors
from nibblas.memory import is_out_of_memory, without_memory_is_fine

MAX_TEXT = 8000  # characters of an error or a report that are sent
FUNCTION = "custom_kernel"


class Worker:
    """Holds the submission, its data and what it returned; one method for each request."""

    device: Device
    stand_ins: StandIns
    kernel: Callable[[Any], Any]

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self.data: Any = None
        self.output: Any = None
        self.tensors: list[Tensor] = []

    def start(self, request: dict, fds: list[int]) -> dict:
        """Get ready on a device, with a function that does nothing in place of the submission's."""
        if request["threads"]:
            torch.set_num_threads(request["threads"])
        self.device = device_of(request["device"])
        sources = [path.read_bytes() for path in Path().rglob("*.py")]
        self.stand_ins = install(self.device.device, request["stand_ins"], sources)
        self.kernel = _nothing
        return {"timers": self.device.timers, "flush_bytes": self.device.flush_bytes}

    def load(self, request: dict, fds: list[int]) -> dict:
        """Import the submission and find its function."""
        sys.path.insert(0, str(Path.cwd()))
        name = request["main"].removesuffix(".py").replace("/", ".")
        try:
            module: ModuleType = __import__(name, fromlist=[FUNCTION])
            self.kernel = getattr(module, FUNCTION)
        except BaseException as error:
            return {"error": _told(error)}
        return {"stand_ins": self.stand_ins.take_used()}

    def prepare(self, request: dict, fds: list[int]) -> dict:
        """Take new data, at the addresses of the last or elsewhere; poison what was returned; empty the caches."""
        self.device.hold_back(())  # which keeps data
        for tensor in self.tensors:
            _poison(tensor)
        sizes = [tensor.nbytes for tensor in self.tensors]
        self.output, self.data, self.tensors = None, None, []
        if fds:
            try:
                self._take(map_fd(fds[0]), request["parcel"], request["elsewhere"])
            except (MemoryError, OSError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                    raise
                self.storages = []
                return {"not_taken": str(error)[:MAX_TEXT]}
        for nbytes in sizes:
            # What the submission allocates next must not find an earlier answer there.
            with without_memory_is_fine():
                torch.empty(nbytes, dtype=torch.uint8, device=self.device.device).fill_(0xFF)
        self.device.hold_back(self.storages)
        self.device.settle()
        self.device.synchronize()
        return {}

    def _take(self, memory: mmap, parcel: dict, elsewhere: bool) -> None:
        """Copy data from shared memory to the addresses of the last, if it fits there, or to others."""
        if elsewhere or [nbytes for _, nbytes, _ in parcel["storages"]] != [s.nbytes() for s in self.storages]:
            # The old ones are held until the new ones are there, or they would get the same addresses.
            self.storages = [self._new(nbytes, kind) for _, nbytes, kind in parcel["storages"]]
        for storage, (offset, nbytes, _) in zip(self.storages, parcel["storages"], strict=True):
            storage_bytes(storage).copy_(bytes_at(memory, offset, nbytes))
        self.data = unpack(memory[: parcel["skeleton"]], self.storages)

    def _new(self, nbytes: int, kind: str) -> torch.UntypedStorage:
        device = self.device.device if kind == self.device.device.type else torch.device(kind)
        return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()

    def call(self, request: dict, fds: list[int]) -> dict:
        """Call the submission's function, and time it; where asked for under a profiler."""
        try:
            if request.get("traced"):
                spans, self.output, work = self.device.traced(self.kernel, self.data)
                return {"spans": spans, "work": asdict(work)}
            spans, self.output = self.device.timed(self.kernel, self.data)
        except BaseException as error:
            return {"error": _told(error)}
        return {"spans": spans}

    def describe(self, request: dict, fds: list[int]) -> dict:
        """What the last call returned, and which stand-ins it went through."""
        description, self.tensors = describe(self.output)
        return {"output": description, "stand_ins": self.stand_ins.take_used()}

    def fetch(self, request: dict, fds: list[int]) -> dict:
        """Write what was returned to shared memory; tell which other data changed."""
        room = map_fd(fds[0], write=True)
        write_tensors(self.tensors, request["offsets"], room)
        del room
        changed = []
        if len(fds) > 1:
            memory = map_fd(fds[1])
            returned = {tensor.untyped_storage().data_ptr() for tensor in self.tensors}
            for number, (offset, nbytes, _) in enumerate(request["parcel"]["storages"]):
                storage = self.storages[number]
                if nbytes and storage.data_ptr() in returned:
                    continue
                if storage.nbytes() != nbytes or not _equal(storage_bytes(storage), bytes_at(memory, offset, nbytes)):
                    changed.append(number)
            del memory
        return {"changed": changed}

    def profile(self, request: dict, fds: list[int]) -> dict:
        """Call the function under torch's profiler, and return its table; or for a profiler that runs this process."""
        from torch.profiler import ProfilerActivity, profile

        on_gpu = self.device.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self.device.release()
        self.device.synchronize()
        try:
            with torch.cuda.profiler.profile() if request["by_runner"] else profile(activities=activities) as found:
                self.output = self.kernel(self.data)
                self.device.synchronize()
        except BaseException as error:
            return {"error": _told(error)}
        if request["by_runner"]:
            return {}
        order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        return {"report": found.key_averages().table(sort_by=order, row_limit=20)[: 8 * MAX_TEXT]}


def _nothing(data: Any) -> None:
    return None


def _told(error: BaseException) -> dict:
    """What is sent of an error: its type, its message, and the end of its traceback without our own lines."""
    trace = error.__traceback__
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    return {"type": type(error).__name__, "message": str(error)[:MAX_TEXT], "traceback": text[-MAX_TEXT:]}


def _equal(a: Tensor, b: Tensor) -> bool:
    step = 64 << 20
    return all(torch.equal(a[at : at + step], b[at : at + step].to(a.device)) for at in range(0, a.numel(), step))


def _poison(tensor: Tensor) -> None:
    """Overwrite a tensor, and no more of its storage than it covers, with what is no right answer."""
    # One whose elements share memory, or whose memory was taken back, can't be written.
    with torch.no_grad(), suppress(RuntimeError):
        poison_(tensor.detach())


def main() -> None:
    """Serve the channel whose file descriptor is the first argument."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    worker = Worker()
    answers = {
        name: getattr(worker, name) for name in ("start", "load", "prepare", "call", "describe", "fetch", "profile")
    }
    for request, fds in channel.requests():
        channel.reply(request["nonce"], **answers[request["do"]](request, fds))


if __name__ == "__main__":
    main()
