"""Fences around a child that runs untrusted Python: limits, network, files, system calls.

Each fence is applied if the kernel has it; `apply` returns the names of those that hold and
`sandbox_capabilities` tells which would, so that `workbench doctor` can say what a machine lacks. Only ctypes
and the standard library are used: the file is loaded in the child before anything untrusted.

- `rlimits`: memory, CPU time, file size, open files, no core dumps; processes too where the user is not root.
- `network`: an empty network namespace (Linux `unshare`, through a user namespace where unprivileged).
- `landlock`: files below the job's own folder are the only ones that can be written; what can be read is the
  Python installation and the system's libraries. Signals and abstract sockets stay inside (ABI 6).
- `seccomp`: no new processes or programs, sockets, tracing, signals to others, namespaces or mounts.
- `capabilities`: all dropped, `no_new_privs` set.
- `bwrap`: the whole compile server runs under bubblewrap, where it is installed and works: without network,
  with a system that can only be read and nothing of the user's files. The other fences come on top.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

FENCES = ("rlimits", "network", "landlock", "seccomp", "capabilities", "bwrap")

_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_NEWIPC, _CLONE_THREAD = 0x10000000, 0x40000000, 0x08000000, 0x00010000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE = 1, 38, 4
_EPERM, _ENOSYS = 1, 38

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Bounds:
    """Limits of one child: seconds and bytes (see `workbench.compile.request.Limits`)."""

    seconds: float
    memory_bytes: int
    file_bytes: int
    open_files: int


class SandboxError(OSError):
    """A fence the kernel does not have or does not permit."""


def _call(name: str, *args: object) -> int:
    if _libc is None:
        raise SandboxError(f"{name}: not Linux")
    result = getattr(_libc, name)(*args)
    if result < 0:
        error = ctypes.get_errno()
        raise SandboxError(error, f"{name}: {os.strerror(error)}")
    return int(result)


def _prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    _call("prctl", option, ctypes.c_ulong(value), zero, zero, zero)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux only)."""
    if _libc is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def set_rlimits(bounds: Bounds) -> None:
    """Bound memory, CPU time, file size, open files and core dumps of this process."""
    cpu = int(bounds.seconds) + 2
    pairs = [
        (resource.RLIMIT_AS, _address_space() + bounds.memory_bytes),
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_FSIZE, bounds.file_bytes),
        (resource.RLIMIT_NOFILE, bounds.open_files),
        (resource.RLIMIT_CORE, 0),
    ]
    if os.getuid() != 0:
        # Counts all of the user's processes, so it only stops explosions; seccomp is the real fence.
        pairs.append((resource.RLIMIT_NPROC, 4096))
    for which, value in pairs:
        _, hard = resource.getrlimit(which)
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (limit, limit))


def _address_space() -> int:
    with open("/proc/self/statm") as f:  # noqa: PTH123
        return int(f.read().split()[0]) * resource.getpagesize()


def leave_network() -> None:
    """Move to an empty network (and IPC) namespace."""
    try:
        _call("unshare", _CLONE_NEWNET | _CLONE_NEWIPC)
    except SandboxError:
        _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC)


# Landlock (linux/landlock.h). Rights by ABI version, lowest bit first.
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_FILE, _READ_DIR, _EXECUTE = 1 << 2, 1 << 3, 1 << 0
_RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}


def landlock_version() -> int:
    """ABI version of Landlock, 0 if the kernel has none."""
    if _libc is None:
        return 0
    _libc.syscall.restype = ctypes.c_long
    version = _libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    return max(0, int(version))


def confine_files(writable: Sequence[str], readable: Iterable[str]) -> None:
    """Restrict file access to `writable` folders and `readable` files and folders (Landlock)."""
    abi = landlock_version()
    if abi == 0:
        raise SandboxError("Landlock is not in this kernel")
    rights = _RIGHTS_BY_ABI[min(abi, 5)]
    network = 0b11 if abi >= 4 else 0
    scoped = 0b11 if abi >= 6 else 0
    attributes = struct.pack("QQQ", rights, network, scoped)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    assert _libc is not None
    ruleset = _call(
        "syscall", _LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)
    )
    try:
        for paths, wanted in ((writable, rights & ~_EXECUTE), (readable, _READ_FILE | _READ_DIR | _EXECUTE)):
            for path in paths:
                _allow(ruleset, path, wanted)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _call("syscall", _LANDLOCK_RESTRICT, ruleset, ctypes.c_uint(0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # not on this machine
    try:
        if not os.path.isdir(path):  # noqa: PTH112
            rights &= _EXECUTE | _READ_FILE | (1 << 1)
        rule = struct.pack("=Qi", rights, fd)
        _call("syscall", _LANDLOCK_ADD, ruleset, 1, rule, ctypes.c_uint(0))
    finally:
        os.close(fd)


def readable_paths() -> list[str]:
    """What compiling needs to read: Python, its packages, system libraries, a few system files."""
    # Of the import path only what installers fill: another entry may be a user's whole home.
    packages = [
        p for p in sys.path if p.rstrip("/").endswith(("site-packages", "dist-packages", "dsl_packages"))
    ]
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, own, *packages}
    this_process = os.path.realpath("/proc/self")
    system = [
        "/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime",
        "/usr/share/zoneinfo", "/dev/urandom", "/dev/random", "/dev/null", "/dev/zero", "/proc/cpuinfo",
        "/proc/meminfo", "/proc/sys/vm/overcommit_memory", "/sys/devices/system/cpu", this_process,
    ]  # fmt: skip
    return sorted(os.path.realpath(f) for f in folders) + system


def bwrap_command(root: str) -> list[str]:
    """A command that runs what follows it under bubblewrap, with `root` the only folder to write to."""
    bwrap = shutil.which("bwrap") or "bwrap"
    command = [bwrap, "--unshare-net", "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--die-with-parent",
               "--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev"]  # fmt: skip
    program = os.path.realpath(sys.executable)
    links = [path for path in ("/lib", "/lib64") if os.path.islink(path)]  # noqa: PTH114
    for path in [*readable_paths(), os.path.dirname(program)]:  # noqa: PTH120
        if not path.startswith(("/proc/", "/dev/")) and path not in links:
            command += ["--ro-bind-try", path, path]
    for path in links:
        command += ["--symlink", os.readlink(path), path]  # noqa: PTH115
    return [*command, "--bind", root, root, "--chdir", root, "--remount-ro", "/", "--"]


def has_bwrap() -> bool:
    """Whether bubblewrap is installed and permitted to do what is asked of it."""
    if sys.platform != "linux" or shutil.which("bwrap") is None:
        return False
    command = [*bwrap_command(tempfile.gettempdir()), sys.executable, "-s", "-E", "-c", "pass"]
    try:
        return subprocess.run(command, capture_output=True, timeout=20, env={}, check=False).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


# seccomp (linux/seccomp.h, linux/bpf_common.h): a classic-BPF program over (nr, arch, args).
_SECCOMP_ALLOW, _SECCOMP_ERRNO, _SECCOMP_KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LD, _JEQ, _JSET, _JGE, _RET = 0x20, 0x15, 0x45, 0x35, 0x06
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SYSCALLS: dict[str, dict[str, tuple[int, ...]]] = {
    # Denied, by groups: processes and programs; sockets; tracing, signals and scheduling of other processes;
    # mounts, namespaces; bpf, perf, keys; modules, kexec, reboot, swap, accounting; userfaultfd, io_uring,
    # new mount API; file handles; memory files, which no limit counts.
    "x86_64": {
        "deny": (57, 58, 59, 322, 41, 53, 42, 43, 288, 49, 50, 44, 46, 101, 310, 311, 312, 424, 434, 438,
                 129, 297, 141, 142, 144, 314, 203, 251, 256, 279, 165, 166, 155, 161, 308, 272, 321, 298,
                 248, 249, 250, 175, 176, 313, 246, 320, 169, 167, 168, 163, 323, 425, 426, 427, 428, 429,
                 430, 431, 432, 433, 442, 304, 319, 447),
        "clone": (56,), "absent": (435, 200), "self": (62, 234), "self or 0": (302,),
    },
    "aarch64": {
        "deny": (221, 281, 198, 199, 203, 202, 242, 200, 201, 206, 211, 117, 270, 271, 272, 424, 434, 438,
                 138, 240, 140, 118, 119, 274, 122, 30, 238, 239, 40, 39, 41, 51, 268, 97, 280, 241, 217,
                 218, 219, 105, 106, 273, 104, 294, 142, 224, 225, 89, 282, 425, 426, 427, 428, 429, 430,
                 431, 432, 433, 442, 265, 279, 447),
        "clone": (220,), "absent": (435, 130), "self": (129, 131), "self or 0": (261,),
    },
}  # fmt: skip


def filter_system_calls() -> None:
    """Refuse system calls that make processes, reach the network or touch other processes (seccomp)."""
    machine = platform.machine()
    if machine not in _SYSCALLS or _libc is None:
        raise SandboxError(f"no system call table for {machine}")
    calls = _SYSCALLS[machine]
    program: list[tuple[int, int, int, int]] = [
        (_LD, 0, 0, 4),
        (_JEQ, 1, 0, _AUDIT_ARCH[machine]),
        (_RET, 0, 0, _SECCOMP_KILL),
        (_LD, 0, 0, 0),
    ]
    if machine == "x86_64":  # the x32 table would go round the list
        program += [(_JGE, 0, 1, 0x40000000), (_RET, 0, 0, _SECCOMP_ERRNO | _EPERM)]
    refuse = (_RET, 0, 0, _SECCOMP_ERRNO | _EPERM)
    for number in calls["deny"]:
        program += [(_JEQ, 0, 1, number), refuse]
    for number in calls["absent"]:  # clone3 and tkill: libc falls back to clone and tgkill
        program += [(_JEQ, 0, 1, number), (_RET, 0, 0, _SECCOMP_ERRNO | _ENOSYS)]
    number_again, first_argument, pid = (_LD, 0, 0, 0), (_LD, 0, 0, 16), os.getpid()
    for number in calls["clone"]:  # threads only
        program += [(_JEQ, 0, 3, number), first_argument, (_JSET, 1, 0, _CLONE_THREAD), refuse, number_again]
    for number in calls["self"]:  # kill, tgkill
        program += [(_JEQ, 0, 3, number), first_argument, (_JEQ, 1, 0, pid), refuse, number_again]
    for number in calls["self or 0"]:  # prlimit
        program += [
            (_JEQ, 0, 4, number),
            first_argument,
            (_JEQ, 2, 0, 0),
            (_JEQ, 1, 0, pid),
            refuse,
            number_again,
        ]
    program.append((_RET, 0, 0, _SECCOMP_ALLOW))
    code = b"".join(struct.pack("=HBBI", *i) for i in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    fprog = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _call("prctl", 22, ctypes.c_ulong(2), fprog, ctypes.c_ulong(0), ctypes.c_ulong(0))


def drop_capabilities() -> None:
    """Give up all capabilities for good."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header = struct.pack("Ii", 0x20080522, 0)
    _call("capset", header, bytes(24))


def apply(
    bounds: Bounds, writable: Sequence[str], readable: Iterable[str], without: Sequence[str] = ()
) -> list[str]:
    """Put up every fence this machine permits around this process; return the names of those that hold.

    Those in `without` are left out: for tests of what follows where a machine does not permit them.
    """
    steps: list[tuple[str, Callable[[], None]]] = [
        ("network", leave_network),
        ("landlock", lambda: confine_files(writable, readable)),
        ("rlimits", lambda: set_rlimits(bounds)),
        ("capabilities", drop_capabilities),
        ("seccomp", filter_system_calls),
    ]
    held = []
    for name, step in steps:
        if name in without:
            continue
        try:
            step()
        except OSError:
            continue
        held.append(name)
    return held


def sandbox_capabilities() -> dict[str, bool]:
    """Which fences this machine permits, found by putting them up in a short-lived child; and `bwrap`."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            held = apply(Bounds(5, 1 << 30, 1 << 20, 64), [], readable_paths())
            os.write(write, ",".join(held).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as f:
        held = f.read().decode().split(",")
    os.waitpid(pid, 0)
    return {**{name: name in held for name in FENCES}, "bwrap": has_bwrap()}
