"""Looks into the environments of processes below this one for a canary, as long as a test goes on."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path


class Watch(threading.Thread):
    """Looks at every process below this one again and again; use it as a context manager.

    Args:
        canary: what none of them may have.
        spared: command lines that hold one of these, arguments ended by NUL, have the canary on purpose.
    """

    def __init__(self, canary: str, spared: tuple[str, ...] = ()) -> None:
        super().__init__(daemon=True)
        self.canary, self.spared = canary.encode(), tuple(s.encode() for s in spared)
        self.seen: set[str] = set()
        self.looked: set[int] = set()
        self.over = threading.Event()

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join()

    def run(self) -> None:
        while not self.over.wait(0.02):
            parents: dict[int, int] = {}
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError, IndexError, ValueError):
                    parents[int(folder.name)] = int(
                        (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
                    )
            for pid in parents:
                if self._is_mine(pid, parents):
                    with contextlib.suppress(OSError):
                        self._look(Path(f"/proc/{pid}"), pid)

    def _look(self, folder: Path, pid: int) -> None:
        command = (folder / "cmdline").read_bytes()
        environment = (folder / "environ").read_bytes()
        if any(x in command for x in self.spared):  # itself, or a fork of it that is about to run something
            return
        self.looked.add(pid)
        if self.canary in environment and command == (folder / "cmdline").read_bytes():
            self.seen.add(command.replace(b"\0", b" ").decode(errors="replace"))

    def _is_mine(self, pid: int, parents: dict[int, int]) -> bool:
        at = parents.get(pid, 0)
        while at > 1 and at != os.getpid():
            at = parents.get(at, 0)
        return at == os.getpid()
