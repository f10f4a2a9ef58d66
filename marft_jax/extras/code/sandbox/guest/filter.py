"""Limits that a process puts on itself before it runs a generated program; none can be undone.

A seccomp filter allows what an interpreter needs and refuses every other system call: so what a
kernel has or will get of new processes, programs, namespaces, sockets, watches, leases, locks,
attributes of files, and memory that no limit counts, cannot be reached.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import resource
import struct
import sys

_CALLS = """
read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -,
lseek 8 62, mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134,
rt_sigprocmask 14 135, rt_sigreturn 15 139, pread64 17 67, pwrite64 18 68, readv 19 65,
writev 20 66, access 21 -, pipe 22 -, select 23 -, sched_yield 24 124, mremap 25 216,
msync 26 227, madvise 28 233, dup 32 23, dup2 33 -, pause 34 -, nanosleep 35 101,
getitimer 36 102, alarm 37 -, setitimer 38 103, getpid 39 172, sendto 44 206, recvfrom 45 207,
recvmsg 47 212, shutdown 48 210, getsockname 51 204, getpeername 52 205, getsockopt 55 209,
exit 60 93, wait4 61 260, uname 63 160, fsync 74 82, fdatasync 75 83, truncate 76 45,
ftruncate 77 46, getdents 78 -, getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -, mkdir 83 -,
rmdir 84 -, creat 85 -, link 86 -, unlink 87 -, symlink 88 -, readlink 89 -, umask 95 166,
gettimeofday 96 169, getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153,
getuid 102 174, getgid 104 176, geteuid 107 175, getegid 108 177, getppid 110 173, getpgrp 111 -,
getgroups 115 158, getresuid 118 148, getresgid 120 150, getpgid 121 155, getsid 124 156,
rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132,
statfs 137 43, fstatfs 138 44, getpriority 140 141, sched_getparam 143 121,
sched_getscheduler 145 120, sched_get_priority_max 146 125, sched_get_priority_min 147 126,
sched_rr_get_interval 148 127, arch_prctl 158 -, setrlimit 160 164, gettid 186 178,
getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12,
flistxattr 196 13, time 201 -, futex 202 98, sched_getaffinity 204 123, epoll_create 213 -,
getdents64 217 61, set_tid_address 218 96, restart_syscall 219 128, fadvise64 221 223,
clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, exit_group 231 94,
epoll_wait 232 -, epoll_ctl 233 21, waitid 247 95, openat 257 56, mkdirat 258 34,
newfstatat 262 79, unlinkat 263 35, renameat 264 38, linkat 265 37, symlinkat 266 36,
readlinkat 267 78, faccessat 269 48, pselect6 270 72, ppoll 271 73, set_robust_list 273 99,
get_robust_list 274 100, epoll_pwait 281 22, fallocate 285 47, epoll_create1 291 20, dup3 292 24,
pipe2 293 59, preadv 295 69, pwritev 296 70, getcpu 309 168, renameat2 316 276,
getrandom 318 278, membarrier 324 283, preadv2 327 286, pwritev2 328 287, statx 332 291,
rseq 334 293, close_range 436 436, faccessat2 439 439
"""
"""Allowed whatever their arguments; after the name its number on x86-64 and on ARM64."""

_IGNORED = """
flock 73 32, chmod 90 -, fchmod 91 52, chown 92 -, fchown 93 55, lchown 94 -, utime 132 -,
utimes 235 -, fchownat 260 54, futimesat 261 -, fchmodat 268 53, utimensat 280 88,
fchmodat2 452 452
"""
"""Answered as if done, and not done: programs that copy or lock their own files go on, and no
device or other file of the host is touched."""

_DECIDED = """
ioctl 16 29, socketpair 53 199, clone 56 220, kill 62 129, fcntl 72 25, prctl 157 167,
tkill 200 130, tgkill 234 131, prlimit64 302 261
"""
"""Allowed with some arguments."""

_MACHINES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}  # column of numbers, AUDIT_ARCH
_X32, _NEW = 0x40000000, 435  # the other table; numbers later than what C libraries rely on
_SELF = 0x5E1F0000  # stands for the process that the filter is for
_LOAD, _EQUAL, _AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND, _THIRD = 0, 4, 16, 24, 32  # offsets in seccomp_data
_ALLOW, _IGNORE, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x00050000, 0x00050001, 0x00050026
_KILL = 0x80000000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE, _MODE_FILTER = 22, 38, 4, 2

_Line = tuple[int, int, int, int]  # code, lines to skip if true, if false, value


def _answer(answer: int, *numbers: int) -> list[_Line]:
    """Returns the answer where the loaded number is one of these."""
    return [line for n in numbers for line in ((_EQUAL, 0, 1, n), (_RETURN, 0, 0, answer))]


def _argument(offset: int, *allowed: int) -> list[_Line]:
    """Allows these values of an argument."""
    return [(_LOAD, 0, 0, offset), *_answer(_ALLOW, *allowed)]


_RULES = {
    "kill": _argument(_FIRST, _SELF),
    "tkill": _argument(_FIRST, _SELF),
    "tgkill": _argument(_FIRST, _SELF),
    "prlimit64": _argument(_FIRST, 0, _SELF),
    "socketpair": _argument(_FIRST, 1),  # AF_UNIX
    "prctl": _argument(_FIRST, 15, 16),  # PR_SET_NAME PR_GET_NAME
    # TCGETS TCGETS2 TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX
    "ioctl": _argument(_SECOND, 0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451),
    "fcntl": [
        # F_DUPFD F_GETFD F_SETFD F_GETFL F_GETLK F_OFD_GETLK F_DUPFD_CLOEXEC F_GETPIPE_SZ
        *_argument(_SECOND, 0, 1, 2, 3, 5, 36, 1030, 1032),
        *_answer(_IGNORE, 6, 7, 37, 38),  # locks, which cannot conflict in one process
        *((_EQUAL, 0, 3, 4), (_LOAD, 0, 0, _THIRD)),  # F_SETFL, but with O_ASYNC
        *((_HAS_BIT, 1, 0, 8192), (_RETURN, 0, 0, _ALLOW)),
    ],
    "clone": [  # CLONE_THREAD without any CLONE_NEW
        *((_LOAD, 0, 0, _FIRST), (_HAS_BIT, 0, 2, 0x00010000), (_HAS_BIT, 1, 0, 0x7E020000)),
        (_RETURN, 0, 0, _ALLOW),
    ],
}
"""Arguments with which the calls of ``_DECIDED`` are not refused."""


def unsupported() -> str:
    """Returns why the filter does not fit here; empty where it does."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        known = "only for Linux on x86-64 and ARM64"
        return f"no filter of system calls for {platform.machine()}, {known}"
    return "" if struct.calcsize("P") == 8 else "no filter of system calls for 32-bit interpreters"


def limit(memory: int, seconds: int, file_bytes: int) -> None:
    """Bounds this process: address space, CPU time, files, threads. In bytes and seconds."""
    for kind, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (getattr(resource, "RLIMIT_NPROC", None), 128),
        (getattr(resource, "RLIMIT_SIGPENDING", None), 128),
    ):
        if kind is not None:
            hard = resource.getrlimit(kind)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))


def prepare() -> None:
    """Does for all children of this process what ``restrict`` needs."""
    if not unsupported():
        _code(platform.machine())
        _libc()


def restrict() -> None:
    """Puts the seccomp filter on this process.

    Raises:
        OSError: the kernel refuses it, or this kind of machine is not known.
    """
    if reason := unsupported():
        raise OSError(reason)
    this_process, anyone = struct.pack("<I", os.getpid()), struct.pack("<I", _SELF)
    program = _code(platform.machine()).replace(anyone, this_process)
    code = ctypes.create_string_buffer(program)
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    nothing = ctypes.c_ulong(0)
    for option, value, pointer in (
        (_PR_SET_DUMPABLE, 0, None),
        (_PR_SET_NO_NEW_PRIVS, 1, None),
        (_PR_SET_SECCOMP, _MODE_FILTER, header),
    ):
        if _libc().prctl(option, ctypes.c_ulong(value), pointer, nothing, nothing):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@functools.cache
def _code(machine: str) -> bytes:
    """Writes the filter in the kernel's packet-filter code, 8 bytes a line.

    Entries of another kind are no use: 32-bit ones end the process, x32's are refused.
    """
    column, architecture = _MACHINES[machine]
    lines = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)]
    lines += [(_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _REFUSE)]
    lines += _answer(_ALLOW, *_numbers(_CALLS, column).values())
    lines += _answer(_IGNORE, *_numbers(_IGNORED, column).values())
    for name, number in _numbers(_DECIDED, column).items():
        rule = [*_RULES[name], (_RETURN, 0, 0, _REFUSE)]
        lines += [(_EQUAL, 0, len(rule), number), *rule]
    lines += [(_AT_LEAST, 0, 1, _NEW), (_RETURN, 0, 0, _UNKNOWN), (_RETURN, 0, 0, _REFUSE)]
    return b"".join(struct.pack("<HBBI", *line) for line in lines)


def _numbers(table: str, column: int) -> dict[str, int]:
    rows = [row.split() for row in table.split(",")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}
