"""The trusted process: it makes inputs from seeds, keeps them, and checks what a submission returned.

It alone knows seeds and right answers. It runs the problem's reference.py, with stand-ins for what this machine lacks,
and never the submission. Other processes can't read its memory or environment.
"""

import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nibblas.arena import correctness
from nibblas.arena.coverage import coverage
from nibblas.arena.harden import Hardener
from nibblas.arena.launcher import hide_from_other_processes
from nibblas.arena.mutants import OF_OUTPUT, Situation
from nibblas.arena.poison import output_arguments, poison_
from nibblas.arena.record import Errors
from nibblas.arena.standins import StandIns, install
from nibblas.arena.wire import (
    Channel,
    Parcel,
    Room,
    UnsendableError,
    checked,
    copy_of,
    pack,
    same_bytes,
    storage_bytes,
    unpack,
)
from nibblas.memory import is_out_of_memory, without_memory_is_fine

MAX_TEXT = 8000  # characters of a message that are sent
PARTS = 8  # of all data, each of which may matter or not
BLOCK = 128  # bytes of a part that are changed to see: what memory moves at once, and no more than a row of a table
SELF_TEST = 1.0  # seconds for trying faulty answers on a problem's check, which itself may take no longer
TOO_SLOW = "the reference is too slow for its reads to be probed"
LARGE = 256 << 20  # bytes of data above which errors and coverage aren't measured: they take many times the memory


class Judge:
    """Holds the problem's functions and the data of the current call; one method for each request."""

    stand_ins: StandIns
    reference: ModuleType

    def __init__(self) -> None:
        self.inputs: Room | None = None
        self.outputs: Room | None = None
        self.filled: tuple[str, ...] = ()
        self.fillable: set[tuple[torch.dtype, torch.Size]] = set()
        self.expected: Any = None  # what the reference returns, without its values
        self.is_large = False
        self.harden: Hardener | None = None
        self.hardened = False

    def load(self, request: dict) -> dict:
        """Import reference.py from the current folder."""
        torch.set_num_threads(request["threads"] or torch.get_num_threads())
        self.device = torch.device(request["device"])
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device.index or 0)
        self.task = request["task"]
        sources = [path.read_bytes() for path in Path().rglob("*.py")]
        self.stand_ins = install(self.device, request["stand_ins"], sources)
        sys.path.insert(0, str(Path.cwd()))
        import reference

        self.reference = reference
        self.ref_kernel: Callable[[Any], Any] | None = getattr(reference, "ref_kernel", None)
        return {"stand_ins": self.stand_ins.take_used()}

    def make(self, request: dict) -> dict:
        """Make the data of a call, and put it into shared memory.

        The first call of a case also finds out which arguments are there to be filled, so that they hold nothing that
        helps, and, in at most `probing` seconds, how many bytes must be read, or else why that is not known.
        """
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(request["seed"] % 2**32)
        self.data = self.reference.generate_input(**request["values"])
        if request["first"]:
            self.filled, self.fillable, self.expected = (), set(), None
            self.harden = Hardener(self.ref_kernel) if self.ref_kernel is not None else None
        self.hardened = request["hardened"] and self.harden is not None
        if self.harden is not None and self.hardened:
            self.data = self.harden(self.data, request["seed"])
        facts = self._first_call(request["probing"]) if request["first"] else {}
        if (request["first"] or self.hardened) and not self.is_large:
            facts["coverage"] = [asdict(found) for found in coverage(self.data)]
        tensors = correctness.named_tensors(self.data, "data")
        for name in self.filled:
            poison_(tensors[name])
        parcel = pack(self.data)
        if self.inputs is None or self.inputs.nbytes < parcel.nbytes:
            self.inputs = _replaced(self.inputs, parcel.nbytes, writable=False)
        return {
            "parcel": parcel.write(self.inputs.memory),
            "names": _names(tensors, parcel),
            "redrawn": self.harden.redrawn if self.harden is not None and self.hardened else (),
            "has_zeros": self.harden is None or self.harden.has_zeros,
            "stand_ins": self.stand_ins.take_used(),
            "fd": self.inputs.fd,
            **facts,
        }

    def _first_call(self, probing: float) -> dict[str, Any]:
        parcel = pack(self.data)
        facts: dict[str, Any] = {}
        self.is_large = parcel.nbytes > LARGE
        ref_kernel = self.ref_kernel
        if ref_kernel is None:
            return {"unprobed": "the problem has no ref_kernel whose reads could be probed"}
        seconds: list[float] = []

        def timed(data: Any) -> Any:
            started = time.monotonic()
            result = ref_kernel(data)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.monotonic() - started)
            return result

        expected = timed(copy_of(parcel))
        facts["written_bytes"] = sum(t.nbytes for t in correctness.named_tensors(expected, "result").values())
        self.expected = pytree.tree_map_only(Tensor, lambda t: t.detach().to("meta"), expected)
        del expected
        self.filled = output_arguments(self.data, timed)
        tensors = correctness.named_tensors(self.data, "data")
        self.fillable = {(tensors[name].dtype, tensors[name].shape) for name in self.filled}
        facts["unprobed"] = TOO_SLOW
        if min(seconds[:2]) * 2 < probing:  # on the same data, and what starts or compiles does so in the first call
            facts["unprobed"] = "there is too little memory to probe the reference's reads"
            with without_memory_is_fine():
                facts |= _probed(ref_kernel, parcel, probing)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the workers want the same memory
        return facts

    def room(self, request: dict) -> dict:
        """Shared memory that a worker may write its output to."""
        if self.outputs is None or self.outputs.nbytes < request["nbytes"]:
            self.outputs = _replaced(self.outputs, request["nbytes"], writable=True)
        return {"fd": self.outputs.fd}

    def check(self, request: dict) -> dict:
        """Check what was returned, by the reference's types and the problem's own check; measure errors if asked.

        A check may write to its data, so that it is done on a copy where another output is to be checked `again`.
        """
        assert self.outputs is not None
        output = checked(request["output"]).build(self.outputs.memory, self.device)
        if self.expected is not None and (unlike := _unlike(output, self.expected, "the output", self.fillable)):
            return {"good": False, "message": unlike}
        parcel = pack(self.data)
        answers = self._answers(parcel) if (request["measure"] or self.hardened) and not self.is_large else []
        data = copy_of(parcel) if request["again"] else self.data
        started = time.monotonic()
        good, message = correctness.passes(self.reference.check_implementation, data, output)
        is_quick = time.monotonic() - started < SELF_TEST
        if good and self.hardened:
            faults = [correctness.fault_beside_rounding(output, answer) for answer in answers]
            good, message = not any(faults), next(filter(None, faults), message)
        return {
            "errors": [asdict(errors) for answer in answers for errors in _errors(output, answer)],
            "good": good,
            "message": message[:MAX_TEXT],
            "takes": self._takes(parcel) if request["self_test"] and good and is_quick and not self.is_large else [],
            "stand_ins": self.stand_ins.take_used(),
        }

    def _takes(self, parcel: Parcel) -> list[str]:
        """Faulty answers that the problem's check takes for right, of those that are tried in SELF_TEST seconds."""
        if self.ref_kernel is None:
            return []
        right, found, until = self.ref_kernel(copy_of(parcel)), [], time.monotonic() + SELF_TEST
        for mutant in OF_OUTPUT:
            data = copy_of(parcel)
            wrong = mutant.make(Situation(data, right, None, self.ref_kernel, ()))
            if time.monotonic() > until:
                break
            if wrong is None or correctness.is_same(wrong, right):
                continue
            if correctness.passes(self.reference.check_implementation, data, wrong)[0]:
                found.append(mutant.name)
        return found

    def _answers(self, parcel: Parcel) -> list[correctness.Answer]:
        exact = correctness.exact_answer(self.task, copy_of(parcel), self.ref_kernel)
        rounded = None
        if self.ref_kernel is not None:
            rounded = correctness.reference_answer(self.ref_kernel(copy_of(parcel)))
        return [answer for answer in (exact, rounded) if answer is not None]


def _errors(output: Any, answer: correctness.Answer) -> tuple[Errors, ...]:
    """Nothing where the answer is in another form, which is for the problem's check to judge."""
    try:
        return correctness.errors(output, answer)
    except ValueError:
        return ()


def _probed(ref_kernel: Callable[[Any], Any], parcel: Parcel, seconds: float) -> dict[str, Any]:
    found = read_bytes(ref_kernel, parcel, seconds)
    if found is None:
        return {"unprobed": "the reference gives no tensors, or others each time"}
    (read, tried), total = found, sum(storage.nbytes() for storage in parcel.storages)
    if total and not tried:
        return {"unprobed": TOO_SLOW}
    return {"read_bytes": read, "tried_bytes": tried, "data_bytes": total}


def read_bytes(ref_kernel: Callable[[Any], Any], parcel: Parcel, seconds: float) -> tuple[int, int] | None:
    """Bytes of the data that the reference's answer was seen to depend on, and of how many that was tried.

    None where the answer is another one each time.

    A storage has as many parts as make each at most one of the PARTS of all data, and at least two, or more where
    there are less than PARTS storages: so that many need few calls, and few get enough. A small block at random of
    each part is zeroed in turn, of large storages first, as long as there is time. A storage counts whole where all
    of its blocks make a difference and there are PARTS of them, its own or those of all storages of fewer parts
    together, but for such as seem not to be read; else the share of those that did, less one for luck. What was not
    tried counts nothing. So it is rarely more than what every right kernel has to read.
    """

    def answer(changed: int, part: slice) -> list[Tensor] | None:
        storages = [storage.clone() for storage in parcel.storages]
        if storages:
            storage_bytes(storages[changed])[part] = 0
        try:
            return list(correctness.named_tensors(ref_kernel(unpack(parcel.skeleton, storages)), "result").values())
        except Exception as error:  # whatever a reference raises on data that makes no sense
            if is_out_of_memory(error):
                raise
            return None

    def differs(tensors: list[Tensor] | None) -> bool:
        return tensors is None or len(tensors) != len(usual) or not all(map(same_bytes, tensors, usual))

    deadline, nothing = time.monotonic() + seconds, slice(0, 0)
    usual = answer(0, nothing) or []
    if not usual or differs(answer(0, nothing)):
        return None
    sizes = {number: storage.nbytes() for number, storage in enumerate(parcel.storages) if storage.nbytes()}
    least = min(max(2 * PARTS // len(sizes), 2), PARTS) if sizes else 0
    all_bytes = sum(sizes.values())
    steps = {number: -(-size // max(-(-size * PARTS // all_bytes), least)) for number, size in sizes.items()}
    mattered = {
        number: [
            differs(answer(number, _block(at, min(at + steps[number], sizes[number]))))
            for at in range(0, sizes[number], steps[number])
            if time.monotonic() < deadline
        ]
        for number in sorted(sizes, key=sizes.__getitem__, reverse=True)
    }
    of_few = [hit for hits in mattered.values() if len(hits) < PARTS and any(hits) for hit in hits]
    read_total, tried_total = 0, 0
    for number, hits in mattered.items():
        judged = hits if len(hits) >= PARTS else of_few
        is_sure = len(judged) >= PARTS and all(judged)
        share = sum(hits) if is_sure else max(sum(hits) - 1, 0)
        read_total += min(share * steps[number], sizes[number])
        tried_total += min(len(hits) * steps[number], sizes[number])
    return read_total, tried_total


def _block(start: int, end: int) -> slice:
    """At most BLOCK bytes at a random place of a part."""
    at = random.randrange(start, max(end - BLOCK, start) + 1)
    return slice(at, min(at + BLOCK, end))


def _replaced(room: Room | None, nbytes: int, writable: bool) -> Room:
    if room is not None:
        room.close()
    return Room(nbytes, writable)


def _names(tensors: dict[str, Tensor], parcel: Parcel) -> list[str]:
    """Where the first tensor of each storage stands in the data."""
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        names.setdefault(tensor.untyped_storage()._cdata, name)
    return [names.get(storage._cdata, "data") for storage in parcel.storages]


def _unlike(got: Any, expected: Any, what: str, fillable: Collection[tuple[torch.dtype, torch.Size]]) -> str | None:
    """How what was returned differs in kind from what the reference returns; None where it does not.

    A tensor may also be of the dtype and shape of an output argument, which a reference in float64 leaves alone.
    """
    if isinstance(expected, Tensor):
        if not isinstance(got, Tensor):
            return f"{what} is a {type(got).__name__}, the reference gives a tensor"
        if got.shape != expected.shape:
            return f"{what} has shape {tuple(got.shape)}, the reference's has {tuple(expected.shape)}"
        if got.dtype != expected.dtype and (got.dtype, got.shape) not in fillable:
            return f"{what} has dtype {got.dtype}, the reference's has {expected.dtype}"
    elif isinstance(expected, tuple | list):
        if not isinstance(got, tuple | list) or len(got) != len(expected):
            length = f" of {len(got)}" if isinstance(got, tuple | list) else ""
            kind = "list" if isinstance(expected, list) else "tuple"
            return f"{what} is a {type(got).__name__}{length}, the reference gives a {kind} of {len(expected)}"
        pairs = enumerate(zip(got, expected, strict=True))
        return next(filter(None, (_unlike(a, b, f"{what}[{index}]", fillable) for index, (a, b) in pairs)), None)
    return None


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_TEXT]


def main() -> None:
    """Serve the channel whose file descriptor is the first argument, until it closes."""
    hide_from_other_processes()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    judge = Judge()
    answers = {name: getattr(judge, name) for name in ("load", "make", "room", "check")}
    for request, _ in channel.requests():
        try:
            reply = answers[request["do"]](request)
        except UnsendableError as error:
            reply = {"error": {"type": "UnsendableError", "message": str(error), "traceback": ""}}
        except BaseException as error:
            trace = "".join(traceback.format_exception(error))[-MAX_TEXT:]
            reply = {"error": {"type": type(error).__name__, "message": _brief(error), "traceback": trace}}
        fd = reply.pop("fd", None)
        channel.reply(request["nonce"], [] if fd is None else [fd], **reply)
    sys.stdout.flush()
    os._exit(0)  # taking torch and a GPU down in order takes a second, and the runner waits for this end


if __name__ == "__main__":
    main()
