"""The parent's side of the compile server: start it, send a job, turn the answer into data or an error."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from workbench.artifact import BoundBuffer
from workbench.compile import policy, sandbox
from workbench.compile.request import CompileError, CompileRequest, Limits
from workbench.errors import WorkbenchError

_HEADER = struct.Struct(">Q")
_KEPT_VARIABLES = ("LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
_FIXED_VARIABLES = {
    "PATH": "/usr/bin:/bin",
    "USER": "workbench",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    # Each job says its own arch. This one differs from the default target so that the DSL builds no execution
    # engine for it, which nobody would use and which takes a third of a compile's time.
    "CUTE_DSL_ARCH": "sm_100a",
}
_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "from workbench.compile.server import main; main(sys.argv[1:])"
)
_START_SECONDS = 120.0
_LONGEST_DETAIL = 50_000


class Traced(BaseModel):
    """What a child that succeeded returned: data of an untrusted process, its form checked."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")

    ok: Literal[True]
    ptx: str
    mlir: str
    """Final host module in MLIR's LLVM dialect, without the embedded cubin."""
    function: str
    """Name of the host function in `mlir`."""
    parameters: tuple[str, ...]
    """Buffer name of each parameter of the host function, the last being `stream`."""
    warnings: tuple[str, ...] = ()
    dsl: str
    """Version of nvidia-cutlass-dsl."""
    flavour: str
    """CUDA version of the DSL's libraries, such as `13.4`."""
    fences: tuple[str, ...] = ()
    """Sandbox fences that held, said before any candidate code ran."""
    seconds: float = 0.0
    """Wall-clock time of the child; the server's word, as is the next."""
    rss_bytes: int = 0
    """Largest resident size of the child, what it shares with the server included."""


class _Failed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    ok: Literal[False]
    kind: Literal["user", "compiler", "memory", "tool"]
    message: str
    line: int | None
    detail: str


class _Header(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    status: Literal["answer", "timeout", "oversize", "disk", "signal", "exit"]
    signal: int
    code: int
    seconds: float
    rss_bytes: int
    fences: tuple[str, ...]
    log: str


class _ServerDiedError(Exception):
    """The server's end of the channel closed."""


class CompileServer:
    """A pre-warmed process that compiles candidates, each in a fenced fork of its own.

    Use it as a context manager, or let `workbench.compile.compile_candidate` keep one for the process. Jobs
    of several threads wait for each other; a server that died is started again by the next job. About
    210 MiB resident while it lives.
    """

    def __init__(
        self, required_fences: tuple[str, ...] = (), *, without_fences: tuple[str, ...] = ()
    ) -> None:
        """Prepare a server; it starts with its first job.

        Args:
            required_fences: fences without which a job is refused (kind `tool`), beside those that
                `workbench.compile.policy` requires.
            without_fences: fences that are not put up, for tests of what follows.
        """
        self.required_fences, self.without_fences = required_fences, without_fences
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._root: Path | None = None

    def __enter__(self) -> CompileServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the running server, None if there is none."""
        return self._process.pid if self._process is not None else None

    @property
    def root(self) -> Path | None:
        """The running server's own folder, None if there is none."""
        return self._root

    def close(self) -> None:
        """End the server process; the object can be used again."""
        with self._lock:
            self._stop()

    def trace(self, request: CompileRequest, limits: Limits) -> Traced:
        """Run the candidate in a child and return what it traced to.

        Raises:
            CompileError: typed, whatever the candidate did, within `limits.seconds` and a little.
        """
        nonce = secrets.token_hex(16)
        job = {
            "source": request.source,
            "arch": request.arch,
            "axes": {**request.axes, **request.constants},
            "knobs": request.knobs,
            "buffers": [_buffer(b) for b in request.buffers],
        }
        message = {
            "job": job,
            "limits": limits.model_dump(),
            "nonce": nonce,
            "required": self.required_fences,
            "policy": not policy.is_unsafe_allowed(),
            "without": self.without_fences,
        }
        data = json.dumps(message).encode()
        with self._lock:
            for last in (False, True):
                try:
                    header, body = self._exchange(data, limits)
                    break
                except _ServerDiedError:
                    self._stop()
                    if last:
                        raise CompileError("crash", "the compile server died twice on this job") from None
        return _interpret(header, body, nonce, limits)

    def _exchange(self, data: bytes, limits: Limits) -> tuple[_Header, bytes]:
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        # A server that is itself stuck (stopped, swapped out) must not hang its user.
        watchdog = threading.Timer(limits.seconds + 30, process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            process.stdin.write(_HEADER.pack(len(data)) + data)
            process.stdin.flush()
            header = _Header.model_validate_json(_receive(process))
            return header, _receive(process)
        except (BrokenPipeError, ConnectionError) as e:
            raise _ServerDiedError from e
        except BaseException:
            # Interrupted in the middle of an answer: the channel is out of step, the server must go.
            process.kill()
            raise
        finally:
            watchdog.cancel()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._owner != os.getpid():  # after a fork the parent's server is not ours to talk to
            self._process, self._root, self._owner = None, None, os.getpid()
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        self._process = self._start()
        return self._process

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            self._root = Path(tempfile.mkdtemp(prefix="workbench-compile-"))
        except OSError as e:
            raise WorkbenchError(
                f"cannot make a temporary folder: {e.strerror}; set TMPDIR to a writable folder"
            ) from e
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME"):
            environment[name] = str(self._root)
        environment |= _FIXED_VARIABLES
        path = [str(Path(__file__).resolve().parents[2]), *(p for p in sys.path if p)]
        outer = ["bwrap"] if "bwrap" not in self.without_fences and _bwrap_holds() else []
        command = [
            sys.executable,
            "-s",
            "-E",
            "-c",
            _START,
            str(self._root),
            json.dumps(path),
            json.dumps(outer),
        ]
        if outer:
            command = sandbox.bwrap_command(str(self._root)) + command
        try:
            with (self._root / "server.log").open("wb") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    cwd=self._root,
                    start_new_session=True,
                )
        except OSError as e:
            shutil.rmtree(self._root, ignore_errors=True)
            raise CompileError("tool", f"the compile server does not start: {e}") from e
        watchdog = threading.Timer(_START_SECONDS, process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            _receive(process)
        except _ServerDiedError:
            text = (
                (self._root / "server.log").read_text(errors="replace").strip() if self._root.exists() else ""
            )
            process.wait()
            shutil.rmtree(self._root, ignore_errors=True)
            reason = text.splitlines()[-1] if text else f"it ended with status {process.returncode}"
            raise CompileError("tool", f"the compile server does not start: {reason}", detail=text) from None
        finally:
            watchdog.cancel()
        return process

    def _stop(self) -> None:
        process, root = self._process, self._root
        self._process = self._root = None
        if process is None or self._owner != os.getpid():
            return
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if root is not None:
            shutil.rmtree(root, ignore_errors=True)


_bwrap_holds = functools.cache(sandbox.has_bwrap)

_default: CompileServer | None = None
_default_lock = threading.Lock()


def _after_fork() -> None:
    """Forget the parent's server: its channel is the parent's, and its locks may be held there."""
    global _default, _default_lock
    _default, _default_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def default_server() -> CompileServer:
    """The server that this process shares; started by its first job, ended at exit."""
    global _default
    with _default_lock:
        if _default is None:
            _default = CompileServer()
            atexit.register(_default.close)
        return _default


def _buffer(buffer: BoundBuffer) -> dict[str, Any]:
    """The tensor a kernel sees: a packed sub-byte buffer is bytes, its last extent in bytes."""
    shape, bits = list(buffer.shape), buffer.dtype.bits
    if bits < 8:
        shape[-1] = shape[-1] * bits // 8
    return {"name": buffer.name, "shape": shape, "dtype": buffer.dtype.cutlass_name, "align": buffer.align}


def _receive(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    head = process.stdout.read(_HEADER.size)
    if len(head) < _HEADER.size:
        raise _ServerDiedError
    (size,) = _HEADER.unpack(head)
    data = process.stdout.read(size)
    if len(data) < size:
        raise _ServerDiedError
    return data


def _interpret(header: _Header, body: bytes, nonce: str, limits: Limits) -> Traced:
    log = header.log.strip()
    if header.status == "timeout":
        raise CompileError("timeout", f"not done after {limits.seconds:g} s", detail=log)
    if header.status == "oversize":
        raise CompileError("crash", f"the answer is larger than {limits.result_bytes >> 20} MiB", detail=log)
    if header.status == "disk":
        raise CompileError(
            "crash", f"wrote more than {limits.file_bytes >> 20} MiB to its folder", detail=log
        )
    if header.status == "signal":
        name = (
            signal.Signals(header.signal).name
            if header.signal in list(signal.Signals)
            else str(header.signal)
        )
        starved = "bad_alloc" in log or "out of memory" in log.lower() or header.signal == signal.SIGKILL
        if starved:
            raise CompileError(
                "memory", f"out of memory ({name}); limit {limits.memory_bytes >> 20} MiB", detail=log
            )
        reason = (
            log.splitlines()[-1]
            if log
            else "no message; often inline assembly whose constraints do not match"
        )
        raise CompileError("crash", f"the compiler process died of {name}: {reason}", detail=log)
    if header.status == "exit":
        if header.code == 71:
            raise CompileError("memory", f"out of memory; limit {limits.memory_bytes >> 20} MiB", detail=log)
        raise CompileError(
            "crash", f"the compile process left with status {header.code} and no answer", detail=log
        )
    if not body.startswith(nonce.encode()):
        raise CompileError("crash", "the compile process wrote something that is not an answer", detail=log)
    try:
        answer: Any = json.loads(body[len(nonce) :])
        if isinstance(answer, dict) and answer.get("ok") is False:
            failed = _Failed.model_validate(answer)
            message = " ".join(failed.message.split())[:1000]
            raise CompileError(failed.kind, message, failed.line, failed.detail[:_LONGEST_DETAIL])
        traced = Traced.model_validate(answer)
        for text in (traced.ptx, traced.mlir, traced.function, *traced.parameters, *traced.warnings):
            text.encode()  # JSON can hold halves of characters
    except (ValueError, ValidationError, RecursionError) as e:
        raise CompileError("crash", "the compile process answered with something that is no result",
                           detail=f"{e}\n{log}") from e  # fmt: skip
    seen = {"seconds": header.seconds, "rss_bytes": header.rss_bytes, "fences": header.fences}
    return traced.model_copy(update=seen)
