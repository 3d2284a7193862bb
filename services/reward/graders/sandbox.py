"""Runs one program that nobody trusts, locked down; started as a script by `code.py`, stdlib only.

    its folder a file system of bounded size, where the kernel lets us mount one (else the parent
    watches) ──> no capabilities ──> limits (CPU, memory, files) ──> Landlock (reads Python, writes
    its own folder) ──> seccomp (no sockets, processes, signals, priorities, shared memory; no way
    out of its process group or of dying with its parent) ──> the program

What cannot be locked does not run: exit code LOCK_FAILED. The request comes on stdin as JSON; the
program's own standard input and output are files, and so is where the value of a function goes.
"""

import ctypes
import io
import json
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterator
from typing import Any

LOCK_FAILED = 70

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000  # include/uapi/linux/sched.h
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 0x4000, 1 << 18  # uapi/linux/mount.h

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 1, 38, 22, 2
_SIGKILL, _EPERM, _ENOSYS = 9, 1, 38

# Kernel ABI: include/uapi/asm-generic/unistd.h and arch/x86/entry/syscalls/syscall_64.tbl. Each is
# denied: networks, other processes, signals, priorities, process groups, System V and POSIX queues
# and memory (they outlive their maker), mounts, limits, clocks, keys, kernel interfaces.
_CLONE = {"x86_64": 56, "aarch64": 220}
_DENIED = {
    "x86_64": [
        29, 30, 31, 41, 42, 43, 44, 46, 47, 49, 50, 53, 57, 58, 59, 62, 64, 65, 66, 67, 68, 69, 70,
        71, 101, 109, 112, 129, 141, 142, 144, 155, 160, 161, 163, 164, 165, 166, 167, 168, 169,
        170, 175, 176, 200, 203, 220, 227, 234, 240, 241, 246, 248, 249, 250, 251, 256, 272, 279,
        288, 297, 298, 302, 303, 304, 308, 310, 311, 312, 313, 314, 321, 322, 323, 424, 425, 426,
        427, 428, 429, 430, 431, 432, 433, 434, 438, 440, 442, 448,
    ],
    "aarch64": [
        30, 39, 40, 41, 51, 89, 97, 104, 105, 106, 112, 117, 118, 119, 122, 129, 130, 131, 138, 140,
        142, 154, 157, 161, 164, 170, 180, 181, 186, 187, 188, 189, 190, 191, 192, 193, 194, 195,
        196, 197, 198, 199, 200, 201, 202, 203, 206, 211, 212, 217, 218, 219, 221, 224, 225, 238,
        239, 240, 241, 242, 261, 264, 265, 268, 270, 271, 272, 273, 274, 280, 281, 282, 424, 425,
        426, 427, 428, 429, 430, 431, 432, 433, 434, 438, 440, 442, 448,
    ],
}  # fmt: skip
# Denied by an argument: (system call, which argument, values). fcntl's F_SETOWN, F_SETSIG,
# F_SETOWN_EX and F_NOTIFY and ioctl's FIOASYNC, FIOSETOWN and SIOCSPGRP have others signalled;
# PR_SET_PDEATHSIG would let the program outlive its parent.
_DENIED_ARGUMENTS = {
    "x86_64": [(72, 1, (8, 10, 15, 1026)), (16, 1, (0x5452, 0x8901, 0x8902)), (157, 0, (1,))],
    "aarch64": [(25, 1, (8, 10, 15, 1026)), (29, 1, (0x5452, 0x8901, 0x8902)), (167, 0, (1,))],
}
_FCNTL, _F_SETFL, _O_ASYNC = {"x86_64": 72, "aarch64": 25}, 4, 0o20000
_CLONE3 = 435  # its arguments cannot be looked at; without it the C library uses clone
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_CLONE_THREAD = 0x00010000

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_RULE_PATH_BENEATH, _LANDLOCK_VERSION = 1, 1
_READ = 0b1101  # execute (libraries are mapped), read a file, list a folder
_READABLE = (
    *("/usr/lib", "/usr/local/lib", "/lib", "/lib64", "/usr/share/zoneinfo"),
    *("/dev/null", "/dev/urandom", "/dev/zero"),
)


def main() -> None:
    """Read the request, lock, run. Example: {"code": "print(1)", "folder": "/tmp/x", ...}."""
    request = json.loads(sys.stdin.buffer.read())
    try:
        _lock(request)
    except (OSError, ValueError) as err:
        sys.stderr.write(f"cannot be locked down: {err}\n")
        sys.stderr.flush()
        os._exit(LOCK_FAILED)
    _run(request)


def _run(request: dict[str, Any]) -> None:
    sys.stdin = io.TextIOWrapper(io.BytesIO(request["stdin"].encode()))
    sys.argv = ["program"]
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(request["code"], "program", "exec"), names)  # noqa: S102  what this is for
    if function := request.get("function"):
        value = _callable(names, function)(*request["arguments"])
        with os.fdopen(request["result"], "w") as result:
            json.dump(value, result)
    sys.stdout.flush()


def _callable(names: dict[str, Any], function: str) -> Any:
    """A function of that name, or the method of a class `Solution`."""
    return names[function] if function in names else getattr(names["Solution"](), function)


def _lock(request: dict[str, Any]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    _bound_disk(libc, request)
    _drop_capabilities(libc)
    _checked(libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), "die with the parent")
    os.chdir(request["folder"])
    limits = {
        resource.RLIMIT_CPU: request["cpu_s"],
        resource.RLIMIT_AS: request["memory_bytes"],
        resource.RLIMIT_FSIZE: request["file_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for which, bound in limits.items():
        inherited = resource.getrlimit(which)[1]  # which cannot be raised
        least = bound if inherited == resource.RLIM_INFINITY else min(bound, inherited)
        resource.setrlimit(which, (least, least))
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    _lock_files(libc, request["folder"])
    _lock_calls(libc)


def _bound_disk(libc: Any, request: dict[str, Any]) -> None:
    """Mount a tmpfs on the folder, seen by this process alone: mount_namespaces(7), tmpfs(5).

    Where that is not allowed (containers often forbid it) the folder stays as it is.
    """
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_MOUNTS) != 0:
        if libc.unshare(_NEW_MOUNTS | _NEW_USER) != 0:
            return
        for name, text in _identity(user, group).items():
            try:
                with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123
                    file.write(text)
            except OSError:
                return
    if libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) != 0:
        return
    options = f"size={request['disk_bytes']},nr_inodes={request['max_files']},mode=700"
    flags = _MS_NOSUID | _MS_NODEV
    libc.mount(b"tmpfs", request["folder"].encode(), b"tmpfs", flags, options.encode())


def _identity(user: int, group: int) -> dict[str, str]:
    """Files of /proc/self by which a new user namespace keeps them: user_namespaces(7)."""
    return {
        "setgroups": "deny",
        "uid_map": f"{user} {user} 1",
        "gid_map": f"{group} {group} 1",
    }


def _drop_capabilities(libc: Any) -> None:
    """capset(2), version 3: none is effective, permitted or inheritable."""
    header, nothing = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    _checked(libc.capset(header, nothing), "no capabilities")


def _lock_files(libc: Any, folder: str) -> None:
    """Landlock: Documentation/userspace-api/landlock.rst of the kernel."""
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION)
    _checked(version, "Landlock (Linux 5.13)")
    everything = (1 << {1: 13, 2: 14}.get(version, 15)) - 1
    handled = struct.pack("Q", everything)
    ruleset = libc.syscall(_LANDLOCK_CREATE, handled, len(handled), 0)
    _checked(ruleset, "a Landlock ruleset")
    readable = {*_READABLE, sys.prefix, sys.base_prefix}
    for path, access in [(folder, everything), *((one, _READ) for one in sorted(readable))]:
        if os.path.exists(path):  # noqa: PTH110  pathlib would be one import more
            allowed = access if os.path.isdir(path) else access & 0b100  # noqa: PTH112
            _allow(libc, ruleset, path, allowed)
    _checked(libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "the Landlock ruleset in force")
    os.close(ruleset)


def _allow(libc: Any, ruleset: int, path: str, access: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", access, descriptor)
    added = libc.syscall(_LANDLOCK_ADD, ruleset, _LANDLOCK_RULE_PATH_BENEATH, rule, 0)
    os.close(descriptor)
    _checked(added, f"a Landlock rule for {path}")


def _lock_calls(libc: Any) -> None:
    """seccomp: Documentation/userspace-api/seccomp_filter.rst of the kernel."""
    machine = platform.machine()
    if machine not in _DENIED:
        raise OSError(f"no table of system calls for {machine}")
    program = b"".join(_filter(machine))
    buffer = ctypes.create_string_buffer(program)

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    given = Program(len(program) // 8, ctypes.addressof(buffer))
    locked = libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(given), 0, 0)
    _checked(locked, "a seccomp filter")


def _filter(machine: str) -> Iterator[bytes]:
    """Classic BPF over struct seccomp_data: number at 0, architecture at 4, arguments from 16."""
    load, equal, at_least, bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, allow = 0x80000000, 0x7FFF0000
    deny, unknown = 0x00050000 | _EPERM, 0x00050000 | _ENOSYS

    def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    yield instruction(load, 4)
    yield instruction(equal, _AUDIT_ARCH[machine], 1, 0)
    yield instruction(answer, kill)
    yield instruction(load, 0)
    yield instruction(at_least, _X32_BIT, 0, 1)
    yield instruction(answer, kill)
    for number in _DENIED[machine]:
        yield instruction(equal, number, 0, 1)
        yield instruction(answer, deny)
    for number, argument, values in _DENIED_ARGUMENTS[machine]:
        yield instruction(equal, number, 0, 2 * len(values) + 2)
        yield instruction(load, 16 + 8 * argument)
        for value in values:
            yield instruction(equal, value, 0, 1)
            yield instruction(answer, deny)
        yield instruction(load, 0)
    yield instruction(equal, _FCNTL[machine], 0, 6)
    yield instruction(load, 24)
    yield instruction(equal, _F_SETFL, 0, 3)
    yield instruction(load, 32)
    yield instruction(bits, _O_ASYNC, 0, 1)
    yield instruction(answer, deny)
    yield instruction(load, 0)
    yield instruction(equal, _CLONE3, 0, 1)
    yield instruction(answer, unknown)
    yield instruction(equal, _CLONE[machine], 0, 3)  # threads may begin, processes may not
    yield instruction(load, 16)
    yield instruction(bits, _CLONE_THREAD, 1, 0)
    yield instruction(answer, deny)
    yield instruction(answer, allow)


def _checked(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


if __name__ == "__main__":
    main()
