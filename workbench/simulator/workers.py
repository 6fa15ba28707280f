"""Forked processes that share the CTAs of large launches over the shared arena.

A worker is forked when the first launch that pays for it begins and serves all later ones: it has the
programs and the state of every launch by inheritance, and memory by the shared mapping.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.errors import MemoryShortageError
from workbench.simulator.launch import LaunchState
from workbench.simulator.ordering.order import Touched
from workbench.simulator.ordering.shadow import meet
from workbench.simulator.running import Part, joined, partition, run_chunks

Array = npt.NDArray[np.int64]


class Workers:
    """Runs launches with the help of forked processes; a context manager that ends them."""

    def __init__(self, states: Sequence[LaunchState]) -> None:
        self._states = states
        self._children: list[tuple[int, int, int]] = []
        """Process id, pipe to it, pipe from it."""

    def __enter__(self) -> Workers:
        """Return itself; nothing is forked yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes."""
        for pid, to, back in self._children:
            os.close(to)
            os.close(back)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._children.clear()

    def run(self, index: int) -> Part:
        """Run launch `index`.

        Raises:
            MemoryShortageError: if a process dies; whatever a process raised is raised here.
        """
        state = self._states[index]
        groups = partition(state)
        if len(groups) == 1 or not state.options.check_races:
            return self._share(index, groups)[0]
        before = _Before(state)
        part, touched = self._share(index, groups)
        if not part.findings and not _collide(touched):
            return part
        # Accesses of different processes are not compared with each other, so that what is found would depend
        # on their number: run it again in one.
        before.restore(state)
        return run_chunks(state, partition(state, 1)[0])

    def _share(self, index: int, groups: list[list[Array]]) -> tuple[Part, list[Touched]]:
        """Run launch `index` in as many processes as there are groups."""
        state = self._states[index]
        while len(self._children) < len(groups) - 1:
            self._fork(len(self._children) + 1)
        helpers = self._children[: len(groups) - 1]
        for _, to, _ in helpers:
            try:
                os.write(to, struct.pack("<I", index))
            except BrokenPipeError:
                raise MemoryShortageError(_DIED) from None
        part = run_chunks(state, groups[0])
        touched = [part.touched]
        for _, _, back in helpers:
            answer = _receive(back)
            if isinstance(answer, Exception):
                raise answer
            touched.append(answer.touched)
            part = joined(state, part, answer)
        return part, touched

    def _fork(self, number: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        command, to = os.pipe()
        back, answer = os.pipe()
        pid = os.fork()
        if pid:
            os.close(command)
            os.close(answer)
            self._children.append((pid, to, back))
            return
        try:
            for _, other_to, other_back in self._children:
                os.close(other_to)
                os.close(other_back)
            os.close(to)
            os.close(back)
            self._serve(number, command, answer)
        finally:
            os._exit(0)

    def _serve(self, number: int, command: int, answer: int) -> None:
        """Run the share of process `number` of each launch that is asked for, until the pipe closes."""
        while len(request := os.read(command, 4)) == 4:
            state = self._states[struct.unpack("<I", request)[0]]
            try:
                result: Any = run_chunks(state, partition(state)[number])
            except Exception as error:  # handed to the parent, which raises it
                result = error
            data = pickle.dumps(result)
            data = struct.pack("<Q", len(data)) + data
            while data:
                data = data[os.write(answer, data) :]


class _Before:
    """What a launch may change, as it was."""

    def __init__(self, state: LaunchState) -> None:
        memory = state.memory
        self._bytes = [
            (a.start, memory.bytes[a.start : a.end].copy(), memory.shadow[a.start : a.end].copy())
            for a in memory.allocations
            if a.writable
        ]

    def restore(self, state: LaunchState) -> None:
        """Put everything back and forget what the launch has done."""
        memory = state.memory
        for start, data, shadow in self._bytes:
            memory.bytes[start : start + len(data)] = data
            memory.shadow[start : start + len(data)] = shadow
        state.restart()


def _collide(touched: list[Touched]) -> bool:
    """Whether one process wrote what another one wrote or read."""
    for k, mine in enumerate(touched):
        for other, theirs in enumerate(touched):
            if other == k:
                continue
            for start in mine.keys() & theirs.keys():
                wrote, (written, read) = mine[start][0], theirs[start]
                if meet(wrote, read) or (k < other and meet(wrote, written)):
                    return True
    return False


_DIED = "a simulator process ended early; the machine may be out of memory"


def _receive(pipe: int) -> Any:
    def take(count: int) -> bytes:
        parts = []
        while count:
            piece = os.read(pipe, min(count, 1 << 20))
            if not piece:
                raise MemoryShortageError(_DIED)
            parts.append(piece)
            count -= len(piece)
        return b"".join(parts)

    return pickle.loads(take(struct.unpack("<Q", take(8))[0]))  # from our own fork
