"""Runs a kernel on tensors: its own memory made beforehand, rows padded where the batch is between two."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .launch import Program
from .table import Buffer, Kernel, Op

make_program: Callable[..., Any] = Program
"""What runs the launches; tests put a recorder or a simulator in its place."""


class NotPrepared(RuntimeError):  # noqa: N818
    """A kernel is used for the first time while a graph is being captured; its memory would be made then."""


class Executor:
    """One kernel on one device, with its scratch memory and the memory of padded batches.

    Calls in one stream are ordered by it. A call in another stream than the last waits for the last.
    """

    def __init__(self, op: Op, kernel: Kernel, device: torch.device) -> None:
        self.op, self.kernel, self.device = op, kernel, device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # makes the device's context current in this thread
        self.program = make_program(kernel.load(), kernel.launches)
        self.own = {s.name: self._memory(s.nbytes, s.zeroed) for s in kernel.slots if s.own}
        self.staged: dict[str, torch.Tensor] = {}
        self.reads_metadata = any(b.role == "metadata" for b in op.buffers)
        self._last: Any = None

    def run(self, tensors: Mapping[str, torch.Tensor], batch: int, metadata_complete: bool = False) -> None:
        """Run the kernel on tensors of `batch` rows, outputs and states written in place.

        Args:
            tensors: storage tensors of the op's buffers.
            batch: rows, at most the kernel's.
            metadata_complete: the metadata (slots, lengths) were complete before the predecessor in the
                stream started, as the kernel was verified for. Without it the first kernel starts only when
                its predecessor has ended.
        """
        stream = self._follow()
        used = dict(tensors)
        padded = batch != self.kernel.batch
        if padded:
            for b in self.op.buffers:
                if b.batched:
                    used[b.name] = self._fill(b, tensors[b.name], batch)
        addresses = {name: t.data_ptr() for name, t in (*self.own.items(), *used.items())}
        # Rows staged by a copy are not complete before that copy, which is the kernel's predecessor.
        after_wait = padded or (self.reads_metadata and not metadata_complete)
        self.program.run(addresses, stream, after_wait=after_wait)
        if padded:
            for b in self.op.buffers:
                if b.batched and b.mutated:
                    tensors[b.name].copy_(used[b.name][:batch])

    def make_staging(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make the memory of padded batches."""
        for b in self.op.buffers:
            if b.batched and b.name not in self.staged:
                shape = (self.kernel.batch, *tensors[b.name].shape[1:])
                self.staged[b.name] = torch.empty(shape, dtype=tensors[b.name].dtype, device=self.device)

    def _fill(self, buffer: Buffer, tensor: torch.Tensor, batch: int) -> torch.Tensor:
        stage = self.staged[buffer.name]
        if buffer.role != "output":
            stage[:batch].copy_(tensor)
            if buffer.pad is not None:
                stage[batch:].fill_(buffer.pad)
            else:
                stage[batch:].copy_(tensor[-1:].expand_as(stage[batch:]))
        return stage

    def _memory(self, nbytes: int, zeroed: bool) -> torch.Tensor:
        make = torch.zeros if zeroed else torch.empty
        return make(max(nbytes, 1), dtype=torch.uint8, device=self.device)

    def _follow(self) -> int:
        if self.device.type != "cuda":
            return 0
        stream = torch.cuda.current_stream(self.device)
        if self._last is not None and self._last != stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._last)
        self._last = stream
        return int(stream.cuda_stream)


_lock = threading.Lock()
_executors: dict[tuple[str, torch.device], Executor] = {}


def capturing(device: torch.device) -> bool:
    """True if the current stream of the device is being captured into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def executor(op: Op, kernel: Kernel, tensors: Mapping[str, torch.Tensor], batch: int) -> Executor:
    """The kernel's executor on the tensors' device, made at its first use.

    Raises:
        NotPrepared: if it would have to be made while a graph is captured.
    """
    device = next(iter(tensors.values())).device
    with _lock:
        made = _executors.get((kernel.key, device))
        whole = made is not None and (batch == kernel.batch or bool(made.staged))
        if not whole and capturing(device):
            raise NotPrepared(
                f"{op.name} at batch {batch} is used for the first time inside a graph capture; call it once"
                " with such tensors before the capture"
            )
        if made is None:
            with _on(device):
                made = _executors[kernel.key, device] = Executor(op, kernel, device)
        if not whole and batch != kernel.batch:
            made.make_staging(tensors)
        return made


def forget() -> None:
    """Drop all executors; graphs that hold their memory must be gone."""
    with _lock:
        _executors.clear()


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else torch.no_grad()
