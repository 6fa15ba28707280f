"""Hostile candidates: each costs its own trial, typed and within its limit, and nothing else.

They go to the server past the screen, as a trick that the screen does not know would.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from candidates import SCALE, copy, request

from workbench.compile import FENCES, CompileError, CompileServer, Limits, sandbox_capabilities

LIMITS = Limits(seconds=60, memory_bytes=1 << 30, file_bytes=4 << 20)
BRIEF = LIMITS.model_copy(update={"seconds": 2.0})
HELD = sandbox_capabilities()


def fenced(*names: str) -> pytest.MarkDecorator:
    missing = [n for n in names if not HELD[n]]
    return pytest.mark.skipif(bool(missing), reason=f"this kernel does not permit {missing}")


def trace(server: CompileServer, build: str, limits: Limits = LIMITS) -> CompileError | None:
    """Run statements in `build` of an otherwise good candidate; the failure, or None if it compiled."""
    source = copy(build=textwrap.indent(textwrap.dedent(build).strip(), "    ").strip())
    start = time.monotonic()
    try:
        server.trace(request(source), limits)
    except CompileError as e:
        return e
    finally:
        # The hard limit, not a speed: it has room for a very busy machine.
        assert time.monotonic() - start < limits.seconds + 20
        assert server.trace(request(SCALE), Limits()).ptx  # the next one is not harmed
    return None


@pytest.mark.parametrize(
    "build",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start(); time.sleep(1000)",
        "import math; math.factorial(10**8)",
    ],
)
def test_hang(server: CompileServer, build: str) -> None:
    error = trace(server, build, BRIEF)
    assert error is not None and error.kind == "timeout" and "2 s" in error.message


def test_hang_in_a_destructor_costs_nothing(server: CompileServer) -> None:
    head = "class D:\n    def __del__(self):\n        while True: pass\n\nd = D()\n"
    assert server.trace(request(copy(head=head)), LIMITS).ptx


@pytest.mark.parametrize(
    "build",
    ["x = bytearray(8 << 30)", "x = []\nwhile True: x.append(bytes(1 << 20))", "x = 'a'\nwhile True: x += x"],
)
def test_memory(server: CompileServer, build: str) -> None:
    error = trace(server, build)
    assert error is not None and error.kind == "memory"


@fenced("seccomp")
@pytest.mark.parametrize(
    "build",
    [
        "import os\nfor _ in range(64): os.fork()",
        "import os\nif os.fork() == 0:\n    os.setsid()\n    import time; time.sleep(1000)",
        "import subprocess; subprocess.run(['/bin/true'])",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import socket; socket.socket()",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.kill(-1, 9)",
        "import os; os.killpg(os.getpgid(os.getppid()), 9)",
        "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
        "import os, resource as r; r.prlimit(os.getppid(), r.RLIMIT_CPU, (1, 1))",
        "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "import os; os.sched_setaffinity(os.getppid(), {0})",
        "import os; os.memfd_create('x')",
        "import signal, os; signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
    ],
)
def test_processes_sockets_and_signals_are_refused(server: CompileServer, build: str) -> None:
    error = trace(server, build)
    assert error is not None and error.kind == "user" and "not permitted" in error.message


def test_network_is_out_of_reach(server: CompileServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        error = trace(server, f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=1)")
    assert error is not None and error.kind == "user"


def test_environment_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-secret")
    with CompileServer() as own:
        error = trace(own, "import os; raise RuntimeError(sorted(os.environ))")
        assert error is not None and "SOME_API_KEY" not in error.message and "HOME" in error.message
        error = trace(own, "import os; raise RuntimeError(os.environ['HOME'], os.getcwd())")
        assert error is not None and os.environ["HOME"] not in error.message.split("'")
        # Nor do the files of the processes that started it.
        error = trace(own, "import os; raise RuntimeError(open(f'/proc/{os.getppid()}/environ').read())")
        assert error is not None and "sk-secret" not in error.message + error.detail


@fenced("landlock")
def test_only_its_own_folder_is_writable(server: CompileServer, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for statement in (
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"open({str(victim)!r}, 'a').write('x')",
        f"import os; os.unlink({str(victim)!r})",
        f"import os; os.rename({str(victim)!r}, 'taken')",
        f"import os; os.link({str(victim)!r}, 'linked')",
        f"import os; os.symlink({str(victim)!r}, 'l'); open('l', 'w')",
        f"import os; os.mkdir({str(tmp_path / 'd')!r})",
        f"raise RuntimeError(open({str(victim)!r}).read())",
        "import cutlass; open(cutlass.__file__, 'a')",
        "import workbench.artifact as a; open(a.__file__, 'a')",
    ):
        error = trace(server, statement)
        assert error is not None and error.kind == "user", statement
        assert "Permission denied" in error.message or "cross-device" in error.message, error.message
    assert victim.read_text() == "mine" and list(tmp_path.iterdir()) == [victim]
    assert trace(server, "open('here', 'w').write('x')") is None


@fenced("landlock")
def test_a_home_on_the_import_path_is_not_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("sk-secret")
    monkeypatch.syspath_prepend(str(tmp_path))
    with CompileServer() as own:
        error = trace(own, f"raise RuntimeError(open({str(tmp_path / 'key')!r}).read())")
        assert error is not None and "Permission denied" in error.message


def test_disk(server: CompileServer) -> None:
    error = trace(server, "open('f', 'wb').write(bytes(64 << 20))")
    assert error is not None and "File too large" in error.message
    error = trace(
        server, "import itertools\nfor i in itertools.count(): open(f'f{i}', 'wb').write(bytes(1 << 20))"
    )
    assert error is not None and error.kind == "crash" and "MiB" in error.message


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("import os; os._exit(0)", "status 0 and no answer"),
        ("import os; os._exit(9)", "status 9 and no answer"),
        ("import os; os.abort()", "SIGABRT"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "SIGILL"),
        ("import os\nfor fd in range(3, 256):\n    try: os.write(fd, b'{}')\n    except OSError: pass",
         "not an answer"),
        ("import os; os.closerange(0, 256)", "no answer"),
        ("import json; json.dumps = lambda *a, **k: 'garbage'", "no result"),
        ("import json; json.dumps = lambda *a, **k: '{\"ok\": true, \"ptx\": 3}'", "no result"),
        ("import json; json.dumps = lambda *a, **k: '[' * 100000", "no result"),
        ("import json; json.dumps = lambda *a, **k: '{\"ok\": false, \"kind\": \"arch\"}'", "no result"),
        ("import json; d = json.dumps; json.dumps = lambda o: d({**o, 'ptx': '\\ud800'})", "no result"),
        ("import json; d = json.dumps; json.dumps = lambda o: d({**o, 'dsl': 'x' * (65 << 20)})", "larger"),
    ],
)  # fmt: skip
def test_crash_and_garbage(server: CompileServer, build: str, message: str) -> None:
    error = trace(server, build)
    assert error is not None and error.kind == "crash" and message in error.message, error


def test_exit_is_the_candidates_fault(server: CompileServer) -> None:
    error = trace(server, "import sys; sys.exit(0)")
    assert error is not None and error.kind == "user" and "ends the process" in error.message


def test_a_bad_inline_assembly_kills_only_its_child(server: CompileServer) -> None:
    head = "from cutlass._mlir.dialects import llvm\nfrom cutlass.cutlass_dsl import T\n"
    lines = (
        "    llvm.inline_asm(T.i32(), [], 'add.s32 $0, $1, $2;', '=r,r,r', has_side_effects=True,\n"
        "                    is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT)\n    y[tid]"
    )
    with pytest.raises(CompileError) as caught:
        server.trace(request(copy(head=head).replace("    y[tid]", lines)), LIMITS)
    assert caught.value.kind == "crash" and "SIG" in caught.value.message


def test_stdout_is_not_the_channel(server: CompileServer) -> None:
    forged = json.dumps({"ok": True, "ptx": "forged"})
    assert (
        trace(server, f"import sys; print({forged!r}); sys.stdout.flush(); print('x', file=sys.stderr)")
        is None
    )


def test_patches_do_not_outlive_the_child(server: CompileServer) -> None:
    build = "import json, cutlass.cute as c\njson.loads = json.dumps = None\nc.compile = None"
    for _ in range(2):  # fails both times, for what it did itself
        error = trace(server, build)
        assert error is not None
    assert json.dumps({}) == "{}"


def test_limits_cannot_be_raised(server: CompileServer) -> None:
    error = trace(server, "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))")
    assert error is not None and error.kind == "user"


def test_folders_of_jobs_are_removed(server: CompileServer) -> None:
    trace(server, "import os; os.mkdir('d'); open('d/f', 'w').write('x'); os.chmod('d', 0)")
    trace(server, "import os; os._exit(0)")
    assert server.root is not None
    assert not list(server.root.glob("job-*"))


def test_server_that_died_is_started_again() -> None:
    with CompileServer() as own:
        before = own.trace(request(copy()), Limits()).ptx
        assert own.pid is not None
        os.kill(own.pid, signal.SIGKILL)
        assert own.trace(request(copy()), Limits()).ptx == before
        root = own.root
    assert own.pid is None and root is not None and not root.exists()
    assert own.trace(request(copy()), Limits()).ptx == before
    own.close()


def test_server_that_dies_during_a_job() -> None:
    with CompileServer() as own:
        own.trace(request(copy()), Limits())
        pid = own.pid
        assert pid is not None
        killer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(CompileError) as caught:  # it is tried once more, on a new server
            own.trace(request(copy(build="import time; time.sleep(30)")), BRIEF)
        killer.join()
        assert caught.value.kind == "timeout" and own.pid not in (None, pid)


def test_required_fences() -> None:
    with CompileServer(required_fences=("no such fence",)) as own, pytest.raises(CompileError) as caught:
        own.trace(request(copy()), Limits())
    assert caught.value.kind == "tool" and "no such fence" in caught.value.message


def test_capabilities_name_every_fence() -> None:
    assert tuple(HELD) and set(HELD) == set(FENCES)
    assert HELD["rlimits"]


@pytest.mark.slow
def test_nothing_is_left_when_the_user_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "user.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from candidates import copy, request\n"
        "from workbench.compile import CompileServer, Limits\n"
        "s = CompileServer(); s.trace(request(copy()), Limits())\n"
        "print(s.pid, flush=True)\n"
        "s.trace(request(copy(build='while True: pass')), Limits(seconds=600))\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    deadline = time.monotonic() + 60
    children: list[int] = []
    while not children and time.monotonic() < deadline:
        children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        time.sleep(0.05)
    assert children
    process.kill()
    process.wait()
    process.stdout.close()
    while time.monotonic() < deadline and any(Path(f"/proc/{p}").exists() for p in (pid, *children)):
        time.sleep(0.05)
    assert not any(Path(f"/proc/{p}").exists() for p in (pid, *children))
    assert not list(tmp_path.glob("workbench-compile-*"))


def test_messages_are_one_printable_line(server: CompileServer) -> None:
    error = trace(server, r"raise RuntimeError('a\x1b[2Jb\x07\r\n\u202e\ud800c')")
    assert error is not None and error.message.isprintable() and str(error).isprintable()
    error.message.encode()
