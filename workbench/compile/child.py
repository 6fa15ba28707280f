"""The part that runs untrusted code: source text in, PTX and host MLIR out, as plain data.

Runs only in a fork of the compile server, after the fences of `workbench.compile.sandbox` are up. Everything
it returns is data that the parent validates; the DSL's own cubin is not returned.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

SOURCE_NAME = "candidate.py"
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(r"^error(\[(?P<code>\w+)\])?: ")
_REASON = re.compile(r"^.*\berror\b.*$", re.M)
"""First useful line of a compiler's log."""
_LONGEST = 20_000
_CUBIN = re.compile(r"^(\s*llvm\.mlir\.global internal constant @kernels_binary)\(.*$", re.M)


class UserError(Exception):
    """A candidate that breaks the contract of templates."""


def compile_job(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Compile one job in `folder` (the private one); never raises, except for what ends a process.

    `job` has source, arch, axes (with constants), knobs and buffers (name, shape, dtype in cutlass, align).
    Returns `{"ok": True, ptx, mlir, function, parameters, warnings, dsl, flavour}` or
    `{"ok": False, kind, message, line, detail}`.
    """
    path = folder / SOURCE_NAME
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            result = _compile(job, path, folder)
        result["warnings"] = [_clean(f"{w.category.__name__}: {w.message}", folder) for w in caught][:50]
        return result
    except BaseException as error:
        return _failure(error, path, folder)


def _compile(job: dict[str, Any], path: Path, folder: Path) -> dict[str, Any]:
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    path.write_text(job["source"])
    # The name is a function of the source alone: it enters kernel names, and PTX must be reproducible.
    name = f"candidate_{hashlib.sha256(job['source'].encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)

    build = getattr(module, "build", None)
    if not callable(build):
        raise UserError("the source has no function `build(axes, knobs)`")
    host = build(dict(job["axes"]), dict(job["knobs"]))
    if not callable(host):
        raise UserError(f"`build` must return a @cute.jit callable, not {type(host).__name__}")
    parameters = list(inspect.signature(host).parameters)
    buffers = {b["name"]: b for b in job["buffers"]}
    if not parameters or parameters[-1] != "stream":
        raise UserError(f"the host function's last parameter must be `stream`; it has {parameters}")
    unknown = [p for p in parameters[:-1] if p not in buffers]
    if unknown:
        raise UserError(
            f"the host function's parameter {unknown[0]!r} is no buffer; buffers: {', '.join(buffers)}"
        )
    tensors = []
    for p in parameters[:-1]:
        b = buffers[p]
        shape = tuple(b["shape"])
        order = tuple(reversed(range(len(shape))))
        dtype = getattr(cutlass, b["dtype"])
        tensors.append(make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=b["align"]))

    dump = folder / "dump"
    dump.mkdir()
    # The DSL's own assembling is thrown away, so it is spared; the option leaves the PTX as it is.
    options = f"--opt-level 0 --keep-ptx --generate-line-info --dump-dir {dump} --gpu-arch {job['arch']}"
    compiled = cute.compile(host, *tensors, make_fake_stream(), options=options)
    ptx = compiled.artifacts.PTX
    if not isinstance(ptx, str) or ".version" not in ptx:
        raise RuntimeError(f"the DSL kept no PTX for {job['arch']}")
    version = cutlass.CUDA_VERSION
    return {
        "ok": True,
        "ptx": ptx.replace(f"{folder}/", ""),
        "mlir": _CUBIN.sub(r"\1()", str(compiled.ir_module)),
        "function": compiled.function_name,
        "parameters": parameters,
        "dsl": cutlass.__version__,
        "flavour": f"{version.major}.{version.minor}",
    }


def _failure(error: BaseException, path: Path, folder: Path) -> dict[str, Any]:
    kind, log = _classify(error)
    text = _clean(_text(error), folder).strip()
    first = _PREFIX.sub("", text.splitlines()[0]).strip() if text else ""
    if isinstance(error, SystemExit):
        first = "the source ends the process (SystemExit)"
    elif kind == "compiler" and (reason := _REASON.search(log)):
        first = f"{first}: {reason.group().strip()}"
    elif type(error).__module__ == "builtins" or not first:
        first = f"{type(error).__name__}: {first}" if first else type(error).__name__
    trace = "".join(traceback.format_tb(error.__traceback__))
    return {
        "ok": False,
        "kind": kind,
        "message": first[:1000],
        "line": _line(error, path),
        "detail": _clean(log[-_LONGEST:], folder) or _clean(f"{text}\n{trace[-_LONGEST:]}", folder),
    }


def _text(error: BaseException) -> str:
    """The error's message, however the candidate wrote its `__str__`."""
    try:
        return str(error)[:_LONGEST]
    except Exception:
        return ""


def _classify(error: BaseException) -> tuple[str, str]:
    """Kind of failure and the compiler's log, if there is one."""
    if isinstance(error, MemoryError):
        return "memory", ""
    names = {c.__name__ for c in type(error).__mro__}
    if "CompilerDiagnosticError" in names:
        logs = (getattr(error, "ptxas_error", None), getattr(error, "nvvm_error", None))
        return "compiler", "\n".join(str(log) for log in logs if log)
    if "ICE " in str(error):
        return "compiler", str(getattr(error, "cause", "") or "")
    if names & {"DynamicLibNotFoundError", "DSLCudaRuntimeError"}:
        return "compiler", ""
    return "user", ""


def _line(error: BaseException | None, path: Path) -> int | None:
    """Line of the candidate's source that the error is about: the DSL's own, else the innermost frame's."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if str(getattr(error, "filename", "")) == str(path):
            line = getattr(error, "line", None) or getattr(error, "lineno", None)
            if isinstance(line, int):
                return line
        frames = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        if frames:
            return frames[-1]
        error = error.__cause__ or error.__context__
    return None


def _clean(text: str, folder: Path) -> str:
    return _ANSI.sub("", text).replace(f"{folder}/", "")
