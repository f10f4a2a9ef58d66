"""Limits that a process puts on itself before it runs a generated program; none can be undone.

A seccomp filter refuses new processes, new programs, signals and any other reach to processes but
its own, namespaces, sockets, and memory that the memory limit does not count.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct

_CLONE, _CLONE3, _TGKILL, _KILL, _PRLIMIT = range(5)  # the calls whose arguments decide

# Numbers of the system calls: those five, then all that are refused whatever their arguments.
# fork vfork execve execveat tkill rt_sigqueueinfo rt_tgsigqueueinfo ptrace process_vm_readv
# process_vm_writev unshare setns mount umount2 pivot_root chroot socket shmget shmat msgget semget
# mq_open memfd_create keyctl add_key request_key bpf perf_event_open userfaultfd setpriority
# sched_setaffinity sched_setscheduler sched_setparam sched_setattr ioprio_set kcmp migrate_pages
# move_pages setpgid setsid
_X86 = (
    (56, 435, 234, 62, 302),
    (57, 58, 59, 322, 200, 129, 297, 101, 310, 311, 272, 308, 165, 166, 155, 161, 41, 29, 30, 68,
     64, 240, 319, 250, 248, 249, 321, 298, 323, 141, 203, 144, 142, 314, 251, 312, 256, 279, 109,
     112),
)  # fmt: skip
_ARM = (
    (220, 435, 131, 129, 261),
    (221, 281, 130, 138, 240, 117, 270, 271, 97, 268, 40, 39, 41, 51, 198, 194, 196, 186, 190, 180,
     279, 219, 217, 218, 280, 241, 282, 140, 122, 119, 118, 274, 30, 272, 238, 239, 154, 157),
)  # fmt: skip
# pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen
# pidfd_open pidfd_getfd process_madvise mount_setattr memfd_secret
_EVERYWHERE = (424, 425, 426, 427, 428, 429, 430, 434, 438, 440, 442, 447)
_MACHINES = {"x86_64": (0xC000003E, *_X86), "aarch64": (0xC00000B7, *_ARM)}

_LOAD, _EQUAL, _AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE, _UNKNOWN, _KILLED = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
_X32, _CLONE_THREAD = 0x40000000, 0x00010000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE, _MODE_FILTER = 22, 38, 4, 2


def supported() -> bool:
    """Whether the filter is written for this kind of machine."""
    return platform.machine() in _MACHINES


def limit(memory: int, seconds: int, file_bytes: int) -> None:
    """Bounds this process: address space, CPU time, files, threads. In bytes and seconds."""
    for kind, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (getattr(resource, "RLIMIT_NPROC", None), 128),
    ):
        if kind is not None:
            hard = resource.getrlimit(kind)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))


def restrict() -> None:
    """Puts the seccomp filter on this process.

    Raises:
        OSError: the kernel refuses it, or this kind of machine is not known.
    """
    if not supported():
        raise OSError(f"no seccomp filter for {platform.machine()}")
    program = _program(platform.machine(), os.getpid())
    code = ctypes.create_string_buffer(program)
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    nothing = ctypes.c_ulong(0)
    for option, value, pointer in (
        (_PR_SET_DUMPABLE, 0, None),
        (_PR_SET_NO_NEW_PRIVS, 1, None),
        (_PR_SET_SECCOMP, _MODE_FILTER, header),
    ):
        if libc.prctl(option, ctypes.c_ulong(value), pointer, nothing, nothing):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _program(machine: str, pid: int) -> bytes:
    """The filter in the kernel's packet-filter code, 8 bytes an instruction."""
    architecture, special, refused = _MACHINES[machine]
    lines = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILLED)]
    lines += [(_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _REFUSE)]
    for number in (*refused, *_EVERYWHERE):
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    lines += [(_EQUAL, 0, 1, special[_CLONE3]), (_RETURN, 0, 0, _UNKNOWN)]  # libc falls to clone
    lines += [(_EQUAL, 0, 4, special[_CLONE]), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    lines += [(_HAS_BIT, 0, 1, _CLONE_THREAD), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    for number, allowed in (
        (special[_TGKILL], (pid,)),
        (special[_KILL], (pid,)),
        (special[_PRLIMIT], (0, pid)),
    ):
        lines += [(_EQUAL, 0, 2 + 2 * len(allowed), number), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
        for value in allowed:
            lines += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
        lines += [(_RETURN, 0, 0, _REFUSE)]
    lines += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("<HBBI", *line) for line in lines)
