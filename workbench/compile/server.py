"""The compile server: a trusted process that imported the DSL once and forks one fenced child per job.

The server never runs candidate code and never starts a thread (a fork of a threaded process may deadlock);
only its forks do, once the fences are up. It reads jobs from its standard input and answers on its standard
output, one at a time:

    job     8 bytes big-endian length, JSON {"job": ..., "limits": ..., "nonce": ...}
    answer  8 bytes length, JSON {"status", "signal", "code", "seconds", "rss_bytes", "fences", "log"},
            8 bytes length, the child's bytes (empty unless status is "answer")

A child's first line says which fences hold around it; the rest is the answer.

It ends, and kills the running child, when its standard input closes, which is what happens when the process
that started it dies.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from workbench.compile import policy, sandbox

_HEADER = struct.Struct(">Q")
LOG_BYTES = 4000
_POLL_SECONDS = 0.1


def main(argv: Sequence[str]) -> None:
    """Serve until standard input closes.

    `argv[0]` is the folder below which jobs get theirs, `argv[2]` JSON: the fences around the server.
    """
    root = Path(argv[0])
    outer: list[str] = json.loads(argv[2])
    channel_in, channel_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # nothing the DSL prints may reach the channel
    os.set_inheritable(channel_in, False)
    os.set_inheritable(channel_out, False)
    _warm_up(root)
    _send(channel_out, b"ready")
    try:
        while (message := _receive(channel_in)) is not None:
            header, body = _serve(json.loads(message), root, outer, channel_in, channel_out)
            _tidy(root)
            _send(channel_out, json.dumps(header).encode())
            _send(channel_out, body)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _warm_up(root: Path) -> None:
    """Compile a trivial kernel of our own, so that forks inherit a compiler that has started once."""
    from workbench.compile.child import compile_job

    folder = Path(tempfile.mkdtemp(dir=root, prefix="warm-"))
    compile_job({"source": _WARM_SOURCE, "arch": "sm_103a", "axes": {}, "knobs": {}, "buffers":
                 [{"name": "x", "shape": [64], "dtype": "Float32", "align": 16}]}, folder)  # fmt: skip
    shutil.rmtree(folder, ignore_errors=True)


_WARM_SOURCE = """
import cutlass.cute as cute

@cute.kernel
def kernel(x: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    x[tid] = x[tid] + 1.0

@cute.jit
def host(x: cute.Tensor, stream):
    kernel(x).launch(grid=[1, 1, 1], block=[64, 1, 1], stream=stream)

def build(axes, knobs):
    return host
"""


def _tidy(root: Path) -> None:
    """Remove what a job left outside its own folder, which it can where Landlock does not hold."""
    for path in root.iterdir():
        if path.name == "server.log":
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _serve(
    message: dict[str, Any], root: Path, outer: list[str], channel_in: int, channel_out: int
) -> tuple[dict[str, Any], bytes]:
    limits = message["limits"]
    folder = Path(tempfile.mkdtemp(dir=root, prefix="job-")).resolve()
    log = folder / "log.txt"
    read, write = os.pipe()
    start = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            _child(message, folder, log, write, (channel_in, channel_out), outer)
        finally:
            os._exit(70)
    os.close(write)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # the child does so too: whoever comes first
    status, body = _watch(pid, read, channel_in, folder, start + limits["seconds"], limits)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, wait_status, usage = os.wait4(pid, 0)
    os.close(read)
    told, whole, body = body.partition(b"\n")
    killed_by = os.WTERMSIG(wait_status) if os.WIFSIGNALED(wait_status) else 0
    code = os.WEXITSTATUS(wait_status) if os.WIFEXITED(wait_status) else 0
    if status == "ended":
        if killed_by == signal.SIGXCPU or (
            killed_by == signal.SIGKILL and usage.ru_utime >= limits["seconds"]
        ):
            status = "timeout"
        elif killed_by == signal.SIGXFSZ:
            status = "disk"
        else:
            status = "signal" if killed_by else "answer" if body and not code else "exit"
    header = {
        "status": status,
        "signal": killed_by,
        "code": code,
        "seconds": time.monotonic() - start,
        "rss_bytes": usage.ru_maxrss * 1024,
        "fences": json.loads(told) if whole else [],
        "log": _tail(log),
    }
    shutil.rmtree(folder, ignore_errors=True)
    return header, body if status == "answer" else b""


def _watch(
    pid: int, read: int, client: int, folder: Path, deadline: float, limits: dict[str, Any]
) -> tuple[str, bytes]:
    """Read the child's answer until it ends or breaks a limit; return the status and the bytes."""
    os.set_blocking(read, False)
    ended = os.pidfd_open(pid)
    chunks: list[bytes] = []
    size = 0
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout", b""
            ready, _, _ = select.select([read, ended, client], [], [], min(left, _POLL_SECONDS))
            if client in ready:  # nothing is sent during a job: the other side has gone
                os.killpg(pid, signal.SIGKILL)
                raise SystemExit(0)
            over = ended in ready
            while chunk := _read_some(read):
                chunks.append(chunk)
                size += len(chunk)
                if size > limits["result_bytes"]:
                    return "oversize", b""
            if over:
                return "ended", b"".join(chunks)
            if not ready and _folder_bytes(folder) > 2 * limits["file_bytes"]:
                return "disk", b""
            if read in ready and not chunk:
                # The child closed its end: only its death is left to wait for.
                select.select([ended, client], [], [], min(left, _POLL_SECONDS))
    finally:
        os.close(ended)


def _read_some(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 20)
    except OSError as e:
        if e.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
            return b""
        raise


def _folder_bytes(folder: Path) -> int:
    total = 0
    for at, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(at, name)).st_blocks * 512  # noqa: PTH118
    return total


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - LOG_BYTES))
            return f.read(LOG_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _child(
    message: dict[str, Any], folder: Path, log: Path, write: int, close: Sequence[int], outer: list[str]
) -> NoReturn:
    """Fence this process in, run the candidate, write the answer; never returns."""
    from workbench.compile.child import compile_job

    limits = message["limits"]
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    sandbox.die_with_parent()
    for fd in close:
        os.close(fd)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.closerange(3, write)
    os.closerange(write + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] if write < 1024 else write + 1024)
    os.chdir(folder)
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME"):
        os.environ[name] = str(folder)
    tempfile.tempdir = str(folder)
    bounds = sandbox.Bounds(
        limits["seconds"], limits["memory_bytes"], limits["file_bytes"], limits["open_files"]
    )
    fences = outer + sandbox.apply(bounds, [str(folder)], sandbox.readable_paths(), message["without"])
    # Said before any candidate code runs: what it may then do to this process changes nothing of it.
    os.write(write, json.dumps(fences).encode() + b"\n")
    missing = [f for f in message["required"] if f not in fences]
    if message["policy"]:
        missing += policy.lacking(fences)
    if missing:
        result: dict[str, Any] = {"ok": False, "kind": "tool", "line": None, "detail": "",
                                  "message": policy.refusal(missing)}  # fmt: skip
    else:
        result = compile_job(message["job"], folder)
    try:
        data = json.dumps(result).encode()
    except MemoryError:
        os._exit(71)
    data = message["nonce"].encode() + data
    view = memoryview(data)
    while view:
        view = view[os.write(write, view) :]
    os._exit(0)


def _send(fd: int, data: bytes) -> None:
    view = memoryview(_HEADER.pack(len(data)) + data)
    while view:
        view = view[os.write(fd, view) :]


def _receive(fd: int) -> bytes | None:
    head = _read_exactly(fd, _HEADER.size)
    return None if head is None else _read_exactly(fd, _HEADER.unpack(head)[0])


def _read_exactly(fd: int, n: int) -> bytes | None:
    parts: list[bytes] = []
    while n:
        part = os.read(fd, min(n, 1 << 20))
        if not part:
            return None
        parts.append(part)
        n -= len(part)
    return b"".join(parts)
