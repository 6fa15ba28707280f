"""Compiles the corpus into a cache folder: PTX, cubin, host MLIR and arguments of every module.

Each entry is compiled in a forked child, since bad inline assembly can kill a process.
`python corpus.py [NAME …]` compiles what the cache lacks and prints what does not compile.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernel_modules as modules
import kernel_package as package

CACHE = Path(__file__).parents[2] / ".workbench" / "external"


def folder() -> Path:
    """Where the corpus of the installed version lies."""
    from importlib import metadata

    return CACHE / f"vllm-{package.installed()}-dsl-{metadata.version('nvidia-cutlass-dsl')}-{package.ARCH}"


def describe(argument: Any) -> dict[str, Any]:
    """What a launch has to know of one argument of a compile: extents, strides and dtype, or the value."""
    if argument is None:
        return {"kind": "none"}
    name = type(argument).__name__
    if "Stream" in name:
        return {"kind": "stream"}
    if hasattr(argument, "element_type") and hasattr(argument, "shape"):
        number = lambda v: v if isinstance(v, int) else str(v)  # noqa: E731
        flat = lambda t: [number(v) for v in t]  # noqa: E731
        return {
            "kind": "tensor", "dtype": str(argument.element_type.__name__),
            "shape": flat(argument.shape), "stride": flat(argument.stride),
        }  # fmt: skip
    if isinstance(argument, int | float | bool):
        return {"kind": "scalar", "dtype": name, "value": argument}
    value = getattr(argument, "value", None)
    return {"kind": "scalar", "dtype": name, "value": value if isinstance(value, int | float) else str(value)}


def _recording(into: Path, entry: str) -> tuple[Callable[..., Any], list[str]]:
    import cutlass.cute as cute

    plain, made = cute.compile, list[str]()

    def compile_(kernel: Any, *args: Any, options: str = "", **kwargs: Any) -> Any:
        name = entry if not made else f"{entry}_{len(made) + 1}"
        made.append(name)
        words = [w for w in options.split() if w != "--enable-tvm-ffi"]
        if "--gpu-arch" not in options:
            words.append(f"--gpu-arch={package.ARCH}")
        target = into / name
        target.mkdir()
        with tempfile.TemporaryDirectory() as dump:
            words += ["--keep-ptx", "--keep-cubin", "--dump-dir", dump]
            compiled = plain(kernel, *args, options=" ".join(words), **kwargs)
            ptx, cubin = compiled.artifacts.PTX, compiled.artifacts.CUBIN
            if not isinstance(cubin, bytes):
                raise RuntimeError("the compiler kept no cubin")
            (target / "kernel.ptx").write_text(ptx if isinstance(ptx, str) else ptx.decode())
            (target / "kernel.cubin").write_bytes(cubin)
        (target / "host.mlir").write_text(str(compiled.ir_module))
        about = {
            "kernel": type(kernel).__name__, "function": compiled.function_name,
            "arguments": [describe(a) for a in args],
        }  # fmt: skip
        (target / "about.json").write_text(json.dumps(about, indent=1))
        return compiled

    return compile_, made


def _compile_one(entry: modules.Entry, into: Path) -> str:
    """Compile in this process; return the error, empty if there is none."""
    import cutlass.cute as cute

    record, made = _recording(into, entry.name)
    cute.compile = record
    cute.experimental.compile = record
    try:
        entry.compile()
    except BaseException as error:
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0][:300]}"
    return "" if made else "nothing was compiled"


def build(names: list[str] | None = None, report: Callable[[str], None] = print) -> dict[str, dict[str, Any]]:
    """Compile what the cache lacks; return family, seconds and error of each entry by name."""
    root = folder()
    root.mkdir(parents=True, exist_ok=True)
    index = root / "index.json"
    known: dict[str, dict[str, Any]] = json.loads(index.read_text()) if index.is_file() else {}
    todo = [
        e for e in modules.entries() if (names and e.name in names) or (not names and e.name not in known)
    ]
    if todo:
        package.prepare()
    for entry in todo:
        start = time.monotonic()
        work = Path(tempfile.mkdtemp(dir=root, prefix=".new-"))
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, 1)
            os.dup2(sink, 2)
            os.write(write, _compile_one(entry, work).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            error = pipe.read()
        _, status = os.waitpid(child, 0)
        if status:
            error = f"the compiler died (status {status})"
        modules_made = sorted(p.name for p in work.iterdir()) if not error else []
        for name in modules_made:
            shutil.rmtree(root / name, ignore_errors=True)
            (work / name).rename(root / name)
        shutil.rmtree(work)
        known[entry.name] = {
            "family": entry.family, "modules": modules_made, "error": error,
            "seconds": round(time.monotonic() - start, 2),
        }  # fmt: skip
        index.write_text(json.dumps(known, indent=1))
        report(f"{entry.name:36} {known[entry.name]['seconds']:6.2f} s  {error or 'ok'}")
    return {e.name: known[e.name] for e in modules.entries() if e.name in known}


if __name__ == "__main__":
    result = build(sys.argv[1:] or None)
    made = sum(len(v["modules"]) for v in result.values())
    print(f"{made} modules of {len(result)} entries; {sum(bool(v['error']) for v in result.values())} failed")
