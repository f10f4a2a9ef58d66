"""Programs that try to harm the machine, to outlive their time, or to forge a reward."""

# ruff: noqa: E501

# Printing or returning ANSWER is what is asked; no program here knows it.
SCRIPTS = {
    "endless loop": "while True: pass",
    "sleep": "import time; time.sleep(1000)",
    "sleep through signals": """
import signal, time
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: time.sleep(1)""",
    "fork bomb": "import os\nwhile True: os.fork()",
    "fork bomb that ignores refusals": """
import os
while True:
    try: os.fork()
    except OSError: pass""",
    "daemon": "import os\nif os.fork() == 0:\n    os.setsid(); os.execv('/bin/sleep', ['sleep', '999'])",
    "subprocess": "import subprocess; print(subprocess.run(['/bin/sh', '-c', 'id'], capture_output=True))",
    "own interpreter again": "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'x=1'])",
    "multiprocessing": "import multiprocessing as m; m.Process(target=print).start()",
    "clone by hand": "import ctypes; c = ctypes.CDLL(None)\nfor _ in range(100): c.syscall(56, 17, 0, 0, 0, 0)\nwhile True: pass",
    "clone3 by hand": "import ctypes; ctypes.CDLL(None).syscall(435, 0, 0); raise SystemExit(3)",
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 26))",
    "memory in one piece": "bytearray(1 << 40)",
    "memory mapped": "import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 1 << 28)); x[-1].write(b'1' * (1 << 28))",
    "memory in files without a name": "import os\nfor i in range(1000): os.write(os.memfd_create('x'), b'1' * (1 << 23))",
    "shared memory": "import ctypes; c = ctypes.CDLL(None)\nfor _ in range(99): assert c.shmget(0, 1 << 28, 0o1666) >= 0",
    "one large file": "f = open('/tmp/x', 'wb')\nwhile True: f.write(b'1' * (1 << 20))",
    "many files": "for i in range(10**9): open(f'/tmp/{i}', 'wb').write(b'1' * (1 << 20))",
    "empty files without end": "for i in range(10**9): open(f'/tmp/{i}', 'w')",
    "files that cannot be removed": """
import os
os.makedirs('/tmp/a/b/c'); open('/tmp/a/b/c/f', 'w').close()
for path in ('/tmp/a/b/c', '/tmp/a/b', '/tmp/a'): os.chmod(path, 0)""",
    "deep folders": "import os\nfor i in range(3000): os.mkdir('d'); os.chdir('d')",
    "a file in every place": """
import os
for place in ('/', '/dev', '/dev/shm', '/sandbox', '/root', '/lib', '/var/tmp', '/home', '/run'):
    try: open(place + '/left', 'w').write('x'); print('wrote', place)
    except OSError: pass
open('/tmp/left', 'w').write('x')""",
    "output flood": "while True: print('x' * 10**6)",
    "error flood": "import sys\nwhile True: sys.stderr.write('x' * 10**6)",
    "socket flood": "import os\nwhile True: os.write(3, b'x' * 65536)",
    "output flood past Python": "import os\nwhile True: os.write(1, b'1' * 65536)",
    "kill everyone": "import os\nos.kill(-1, 9)",
    "kill the parent": "import os\nos.kill(os.getppid(), 9)",
    "stop the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)",
    "kill by hand": "import ctypes, os\nc = ctypes.CDLL(None); p = os.getppid()\nfor n in (62, 200, 129): c.syscall(n, p, 9, 0)\nc.syscall(234, p, p, 9); c.syscall(424, 0, 9, 0, 0)",
    "starve the parent": "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    "ptrace": "import ctypes, os\nassert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0",
    "write into the parent": "import ctypes, os\nassert ctypes.CDLL(None).syscall(311, os.getppid(), 0, 0, 0, 0, 0) == 0",
    "raise the limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "read /proc": "print(open('/proc/self/environ').read())",
    "read the processes": "import os; print(os.listdir('/proc'))",
    "read the host": "for p in ('/etc/passwd', '/etc/hostname', '/root/.bashrc'): print(open(p).read())",
    "look for the tests": """
import os
found = [os.path.join(a, f) for a, _, fs in os.walk('/') for f in fs if f.endswith(('.jsonl', '.parquet'))]
print(found or 1 / 0)""",
    "search the memory": """
import gc
for o in gc.get_objects():
    if isinstance(o, dict) and ('output' in o or 'expected' in o): print(o.get('expected', o.get('output')))""",
    "network": "import socket; socket.create_connection(('1.1.1.1', 53), 1)",
    "network by name": "import urllib.request; urllib.request.urlopen('http://example.com', timeout=1)",
    "local sockets": "import socket; socket.socket(socket.AF_UNIX).connect('/run/docker.sock')",
    "netlink": "import socket; socket.socket(16, 3, 0)",
    "symbolic links": "import os; os.symlink('/etc/passwd', '/tmp/in'); print(open('/tmp/in').read())",
    "a link to everything": "import os; os.symlink('/', '/tmp/root'); os.link('/sandbox/guest/main.py', '/tmp/main')",
    "mount": "import ctypes; assert ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
    "new namespaces": "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "change the root": "import os; os.chroot('/tmp')",
    "become root": "import os; os.setuid(0)",
    "a device": "import os, stat; os.mknod('/tmp/d', 0o666 | stat.S_IFBLK, os.makedev(8, 0)); open('/tmp/d', 'rb')",
    "threads without end": """
import threading, time
threading.stack_size(32768)
while True:
    try: threading.Thread(target=time.sleep, args=(999,)).start()
    except Exception: pass""",
    "a thread that stays": "import threading, time; threading.Thread(target=time.sleep, args=(999,)).start()",
    "exit function that stays": "import atexit, time; atexit.register(time.sleep, 999)",
    "deep recursion": "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "deep recursion in C": "import sys; sys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nprint(x)",
    "deep syntax": "eval('(' * 10**5 + ')' * 10**5)",
    "crash": "import ctypes; ctypes.string_at(0)",
    "abort": "import os; os.abort()",
    "huge integers": "x = 7 ** 10 ** 8; print(x)",
    "slow pattern": "import re; re.match(r'(a+)+$', 'a' * 50 + 'b')",
    "exit as if well": "import sys; sys.exit(0)",
    "leave at once": "import os; os._exit(0)",
    "close everything": "import os; os.closerange(0, 256)\nwhile True: pass",
    "forged frames": 'import os\nfor fd in range(64):\n    try: os.write(fd, b\'\\0\\0\\0\\x20E{"status": 0, "verdict": ""}\\nANSWER\')\n    except OSError: pass',
    "a forged report": 'import json, os\nline = json.dumps(dict(verdict="ok", output="ANSWER", sent="", detail="", clean=True))\nfor fd in range(64):\n    try: os.write(fd, line.encode() + b"\\n")\n    except OSError: pass',
    "patched printing": "import builtins, sys\nbuiltins.print = sys.stdout.write = lambda *a: None",
    "patched comparison": "class S(str):\n    __eq__ = lambda a, b: True\n    __hash__ = str.__hash__\nprint(S('x'))",
    "patched guest": "import guest.main as m, guest.program as p\nm._relay = p.finish = lambda *a: (0, '')",
    "unwound guest": "import sys\nf = sys._getframe()\nwhile f.f_back: f = f.f_back\nf.f_globals['passed'] = True",
    "clock games": "import time\ntime.time = time.monotonic = time.perf_counter = lambda: 0.0\nwhile True: pass",
    "alarm games": "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.01, 0.01); signal.signal(14, lambda *a: None)\nwhile True: pass",
    "open up a device": "import os\nfor d in ('null', 'zero', 'random', 'urandom'): os.chmod('/dev/' + d, 0o777)",
    "close a device": "import os\nfor d in ('null', 'zero', 'random', 'urandom'): os.chmod('/dev/' + d, 0)",
    "age a device": "import os; os.utime('/dev/null', (0, 0)); os.utime('/dev/urandom')",
    "own a device": "import os; os.chown('/dev/null', 1000, 1000); os.lchown('/dev/zero', 0, 0)",
    "a device by descriptor": "import os\nfd = os.open('/dev/null', os.O_RDWR)\nos.fchmod(fd, 0); os.fchown(fd, 0, 0); os.utime(fd, (0, 0)); os.ftruncate(fd, 0)",
    "a device by hand": "import ctypes\nc = ctypes.CDLL(None)\nfor n in (90, 268, 452, 53, 52): c.syscall(n, b'/dev/null', 0o777, 0, 0); c.syscall(n, -100, b'/dev/null', 0, 0)\nfor n in (132, 235, 261, 280, 88): c.syscall(n, b'/dev/null', 0, 0, 0); c.syscall(n, -100, b'/dev/null', 0, 0)",
    "a device through a link": "import os\nos.mkdir('/tmp/d'); os.symlink('/dev/null', '/tmp/d/n'); os.chmod('/tmp/d/n', 0o700); os.chmod('/tmp/d', 0o500)",
    "a device for the one who cleans up": "import os\nos.mkdir('/tmp/d', 0o700); os.symlink('/dev/null', '/tmp/d/n')\nos.mkdir('/tmp/e', 0o300); os.symlink('/dev/zero', '/tmp/e/n')\nos.umask(0o777); os.mkdir('/tmp/f')",
    "remove a device": "import os; os.remove('/dev/null')",
    "replace a device": "import os; os.rename('/dev/null', '/tmp/null'); open('/dev/null', 'w')",
    "link a device": "import os; os.link('/dev/null', '/tmp/null')",
    "control a device": "import fcntl\nfor r in (0x5204, 0x5206, 0x80045200, 0x40045201): fcntl.ioctl(open('/dev/urandom', 'wb', 0), r, b'\\0' * 8)",
    "attributes of a device": "import os; os.setxattr('/dev/null', 'user.a', b'1')",
    "attributes without end": "import os\nfor i in range(10**9): open(f'/tmp/{i}', 'w').close(); os.setxattr(f'/tmp/{i}', 'user.a', b'1' * 65536)",
    "attributes by descriptor": "import os\nfor i in range(10**9): os.setxattr(os.open('/tmp', 0), f'user.{i}', b'1' * 65536)",
    "trusted attributes": "import os; os.setxattr('/tmp', 'trusted.a', b'1' * 65536)",
    "remove attributes": "import os; os.removexattr('/dev/null', 'user.a')",
    "folders without end": "import os\nfor i in range(10**9): os.mkdir(f'/tmp/{i}')",
    "links without end": "import os\nfor i in range(10**9): os.symlink('x' * 4000, f'/tmp/{i}')",
    "hard links without end": "import os\nopen('/tmp/x', 'w').close()\nfor i in range(10**9): os.link('/tmp/x', f'/tmp/{i}' + 'y' * 200)",
    "empty files in threads": """
import os, threading
def fill(n):
    os.mkdir(f'/tmp/{n}')
    for i in range(10**9): os.close(os.open(f'/tmp/{n}/{i}', 65))
for n in range(40): threading.Thread(target=fill, args=(n,)).start()""",
    "empty files without a name": "import os\nkept = [os.open('/tmp', os.O_TMPFILE | os.O_RDWR) for _ in range(10**6)]",
    "pipes by name": "import os\nfor i in range(10**9): os.mkfifo(f'/tmp/{i}')",
    "a hole in a file": "import os\nopen('/tmp/x', 'w').close(); os.truncate('/tmp/x', 1 << 40)",
    "room in a file": "import os\nos.posix_fallocate(os.open('/tmp/x', 66), 0, 1 << 40)",
    "a shared mapping": "import mmap\nx = [mmap.mmap(-1, 1 << 22) for _ in range(10**4)]",
    "descriptors without end": "import os\nwhile True: os.dup(0)",
    "full pipes": "import os\nfor _ in range(99):\n    r, w = os.pipe(); os.set_blocking(w, False); os.write(w, b'1' * (1 << 22))",
    "wide pipes": "import fcntl, os\nkept = [fcntl.fcntl(os.pipe()[1], 1031, 1 << 20) for _ in range(30)]",
    "full sockets": "import socket\nkept = [socket.socketpair() for _ in range(25)]\nfor a, b in kept:\n    a.setblocking(False); a.setsockopt(1, 7, 1 << 24)",
    "descriptors in sockets": "import array, socket\na, b = socket.socketpair()\nfor _ in range(10**6): a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0, 1, 2]))])",
    "locks without end": "import fcntl\nf = open('/tmp/x', 'w')\nfor i in range(10**9): fcntl.lockf(f, fcntl.LOCK_EX, 1, 2 * i)",
    "locks of open files": "import fcntl, struct\nf = open('/tmp/x', 'w')\nfor i in range(10**9): fcntl.fcntl(f, 37, struct.pack('hhqqi', 1, 0, 2 * i, 1, 0))",
    "lock the host's files": "import fcntl, os, time\nkept = [open(p) for p in ('/dev/null', os.__file__)]\nfor f in kept: fcntl.flock(f, fcntl.LOCK_EX); fcntl.lockf(f, fcntl.LOCK_SH)\ntime.sleep(9)",
    "a lease": "import fcntl\nfcntl.fcntl(open('/tmp/x', 'w'), fcntl.F_SETLEASE, fcntl.F_WRLCK)",
    "a lease on the host's file": "import fcntl, os\nfcntl.fcntl(open(os.__file__), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "signals to the parent by a descriptor": "import fcntl, os\nfcntl.fcntl(3, fcntl.F_SETOWN, os.getppid())",
    "signals to all by a descriptor": "import fcntl\nfcntl.fcntl(3, fcntl.F_SETOWN, -1)",
    "signals to a thread by a descriptor": "import fcntl, os, struct\nfcntl.fcntl(3, 15, struct.pack('ii', 1, os.getppid()))",
    "another signal by a descriptor": "import fcntl\nfcntl.fcntl(3, 10, 9)",
    "asynchronous input": "import fcntl, os\nfcntl.fcntl(3, fcntl.F_SETFL, os.O_ASYNC)",
    "asynchronous input by control": "import fcntl, struct\nfcntl.ioctl(3, 0x5452, struct.pack('i', 1))",
    "an owner by control": "import fcntl, os, struct\nfcntl.ioctl(3, 0x8901, struct.pack('i', os.getppid()))",
    "the group of a terminal": "import fcntl, struct\nfcntl.ioctl(0, 0x5410, struct.pack('i', 1))",
    "typing into a terminal": "import fcntl\nfcntl.ioctl(0, 0x5412, b'x')",
    "news of a folder": "import fcntl, os\nfcntl.fcntl(os.open('/lib', 0), 1026, 0xffffffff)",
    "watches": "import ctypes\nassert ctypes.CDLL(None).inotify_init() >= 0",
    "watches of all": "import ctypes\nassert ctypes.CDLL(None).fanotify_init(0, 0) >= 0",
    "timers without end": "import ctypes\nc = ctypes.CDLL(None)\nwhile True: assert c.syscall(222, 0, 0, ctypes.byref(ctypes.c_int())) == 0",
    "event descriptors": "import os\nos.eventfd(0)",
    "timer descriptors": "import ctypes\nassert ctypes.CDLL(None).timerfd_create(0, 0) >= 0",
    "signal descriptors": "import ctypes\nassert ctypes.CDLL(None).signalfd(-1, bytes(128), 0) >= 0",
    "semaphores": "import ctypes\nassert ctypes.CDLL(None).semget(0, 100, 0o1666) >= 0",
    "message queues": "import ctypes\nassert ctypes.CDLL(None).msgget(0, 0o1666) >= 0",
    "keys": "import ctypes\nassert ctypes.CDLL(None).syscall(248, b'user', b'x', b'y', 1, -3) >= 0",
    "rings": "import ctypes\nassert ctypes.CDLL(None).syscall(425, 8, bytes(200)) >= 0",
    "programs in the kernel": "import ctypes\nassert ctypes.CDLL(None).syscall(321, 0, bytes(200), 100) >= 0",
    "counters of the machine": "import ctypes\nassert ctypes.CDLL(None).syscall(298, bytes(200), 0, -1, -1, 0) >= 0",
    "faults of pages": "import ctypes\nassert ctypes.CDLL(None).syscall(323, 1) >= 0",
    "handles of files": "import ctypes\nassert ctypes.CDLL(None).name_to_handle_at(-100, b'/dev/null', bytes(200), bytes(8), 0) >= 0",
    "another filter": "import ctypes\nassert ctypes.CDLL(None).prctl(22, 2, 0, 0, 0) == 0",
    "readable again": "import ctypes\nassert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0",
    "adopt children": "import ctypes\nassert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0",
    "memory that stays": "import ctypes\nassert ctypes.CDLL(None).mlockall(3) == 0",
    "pipes into pages": "import os\nr, w = os.pipe()\nos.splice(0, w, 1)",
    "set the clock": "import time; time.clock_settime(0, 0)",
    "name the host": "import socket; socket.sethostname('x')",
    "the kernel's log": "import ctypes\nassert ctypes.CDLL(None).klogctl(3, bytes(100), 100) >= 0",
    "ports": "import ctypes\nassert ctypes.CDLL(None).ioperm(0, 10, 1) == 0",
    "restart the machine": "import ctypes\nassert ctypes.CDLL(None).reboot(0x1234567) == 0",
    "memory without a swap": "import ctypes\nassert ctypes.CDLL(None).swapoff(b'/dev/null') == 0",
    "a new mount by hand": "import ctypes\nassert ctypes.CDLL(None).syscall(430, b'tmpfs', 0) >= 0",
    "calls not made yet": "import ctypes\nassert max(ctypes.CDLL(None).syscall(n, 0, 0, 0, 0, 0, 0) for n in range(440, 1000) if n != 452) >= 0",
    "every call there is": "import ctypes\nc = ctypes.CDLL(None)\nfor n in range(335, 2000): c.syscall(n, 0, 0, 0, 0, 0, 0)\nraise SystemExit(3)",
    "calls of the other table": "import ctypes\nassert max(ctypes.CDLL(None).syscall(0x40000000 + n, 0, 0, 0) for n in range(600)) >= 0",
    "calls of 32 bits": """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex('53b814000000cd805bc3'))
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())""",
    "raw network": "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "packets": "import socket; socket.socket(17, 3, 0)",
    "ciphers of the kernel": "import socket; socket.socket(38, 5, 0)",
    "the host of a machine": "import socket; socket.socket(40, 1, 0)",
    "pairs of another kind": "import ctypes\nassert ctypes.CDLL(None).socketpair(30, 1, 0, bytes(8)) == 0",
    "go first": "import os; os.setpriority(os.PRIO_PROCESS, 0, -20)",
    "go first by policy": "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(99))",
    "choose a processor": "import os; os.sched_setaffinity(0, {0})",
    "a group of its own": "import os; os.setsid()",
    "another personality": "import ctypes\nassert ctypes.CDLL(None).personality(0x0400000) >= 0",
    "a signal without a name": "import os; os.kill(os.getpid(), 40)",
    "signals in a queue": "import os, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(34, 64))\nwhile True: os.kill(os.getpid(), 40)",
    "stop itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "a thread told to die": "import signal, threading\nt = threading.Thread(target=threading.Event().wait); t.start(); signal.pthread_kill(t.ident, 9)",
    "exit as no number can": "import sys; sys.exit(10**400)",
    "exit that cannot be said": "class E:\n    def __str__(self): raise ValueError\nraise SystemExit(E())",
    "an error that cannot be said": "class E(Exception):\n    def __str__(self): raise SystemExit(0)\nraise E",
    "an error hook that hides": "import os, sys\nsys.excepthook = lambda *a: os._exit(0)\n1 / 0",
    "no way to leave": "import os, sys\nos._exit = sys.exit = lambda *a: None\n1 / 0",
    "no way to clean up": "import gc\ngc.callbacks.append(lambda *a: 1 / 0)\nclass A:\n    def __del__(self):\n        while True: pass\na = A()",
    "an auditor that objects": "import sys\ndef no(*a): raise RuntimeError\nsys.addaudithook(no)",
    "an auditor that waits": "import sys, time\nsys.addaudithook(lambda *a: time.sleep(99))",
    "flushed for ever": "import sys\nclass Out:\n    def write(self, t): return len(t)\n    def flush(self):\n        while True: pass\nsys.stdout = Out()",
    "output without letters": "import os\nos.write(1, b'\\xff\\xfe\\0\\xed\\xa0\\x80' * 1000)",
    "half a character": "import sys\nprint('\\ud800'); sys.stderr.write('\\udfff')",
    "another input": "import os\nos.remove('/tmp/input'); os.symlink('/dev/zero', '/tmp/input')",
    "no folder": "import os\nos.chdir('/'); os.remove('/tmp/program/program.py'); os.rmdir('/tmp/program'); os.symlink('/', '/tmp/program')",
    "folders of no one": "import os\nos.umask(0o777)\nfor n in 'abc': os.mkdir('/tmp/' + n)",
    "a lock-out": "import os\nos.mkdir('/tmp/x', 0o300); open('/tmp/x/y', 'w').close(); os.mkdir('/tmp/x/z', 0o100)",
}

# The test is ``assert f(1) == ANSWER``; these define an f and more.
JUDGED = {
    "equal to everything": "class E:\n    __eq__ = lambda a, b: True\n    __bool__ = lambda a: True\nf = lambda x: E()",
    "equal number": "class E(int):\n    __eq__ = lambda a, b: True\n    __hash__ = int.__hash__\nf = lambda x: E(0)",
    "equal text": "class E(str):\n    __eq__ = lambda a, b: True\n    __hash__ = str.__hash__\nf = lambda x: E()",
    "patched assert": "import builtins\nbuiltins.AssertionError = ValueError\nf = lambda x: 0",
    "exit in a call": "import sys\ndef f(x): sys.exit(0)",
    "leave in a call": "import os\ndef f(x): os._exit(0)",
    "forged reply": 'import os\ndef f(x):\n    os.write(3, b\'{"test": 0, "error": ""}\\n\' * 9)\n    return 0',
    "forged reply at the start": 'import os\nos.write(3, b\'{"test": 0, "error": ""}\\n\' * 9)\nf = lambda x: 0',
    "broken reply": "import os\ndef f(x): os.write(3, b'{]\\n'); return 0",
    "reply of another kind": 'import os\ndef f(x): os.write(3, b\'[1]\\n{"value": [{"ref": "x"}, [1]]}\\n\'); return 0',
    "deep reply": "import os\ndef f(x): os.write(3, b'{\"value\": ' + b'[' * 10**5 + b']' * 10**5 + b'}\\n')",
    "endless call": "def f(x):\n    while True: pass",
    "own builtins": "def all(x): return True\nlen = sorted = list = set = all\nf = lambda x: 0",
    "read the tests": "import gc\ndef f(x): return [o for o in gc.get_objects() if isinstance(o, dict) and 'tests' in o]",
    "a circle": "def f(x):\n    a = []; a.append(a); return a",
    "no end of items": "import itertools\nf = lambda x: itertools.count()",
    "error of the judge": "def f(x): raise AssertionError('ANSWER')",
    "pickle": "class E:\n    def __reduce__(self): return (print, ('ANSWER',))\nf = lambda x: E()",
    "exit at the start": "import sys; sys.exit(0)",
    "exit at the start, said well": "exit()",
    "leave at the start": "import os; os._exit(0)",
    "leave where the names are asked": "import os\ndef __getattr__(name): os._exit(0)",
    "close the line": "import os; os.close(3)",
    "exit function of a judged program": "import atexit, os; atexit.register(os._exit, 0); exit()",
    "real-time signal in a call": "import os\ndef f(x): os.kill(os.getpid(), 40)",
    "a number without end": "f = lambda x: 1 << (1 << 24)",
    "a text without end": "f = lambda x: 'x' * (1 << 28)",
    "half a character as an error": "def f(x): raise ValueError('\\ud800' * 99)",
    "an error without a word": "class E(Exception):\n    def __str__(self): raise SystemExit\ndef f(x): raise E",
    "an exit without a word": "f = lambda x: (_ for _ in ()).throw(BaseException)",
    "an interrupt": "def f(x): raise KeyboardInterrupt",
    "a class that lies": "class E:\n    __class__ = str\n    def __eq__(a, b): return True\nf = lambda x: E()",
    "equal in a list": "class E:\n    __eq__ = lambda a, b: True\n    __hash__ = None\nf = lambda x: [E()]",
    "a text of a class": "class S(str):\n    __str__ = __repr__ = lambda s: 'x'\n    __len__ = lambda s: 3\nf = lambda x: S('y')",
    "patched protocol": "import guest.values as v\nv.dump = lambda x: {'value': True}\nf = lambda x: 0",
    "patched types": "import guest.values as v\nv._KINDS.clear()\nf = lambda x: (1,)",
    "patched answers": "import guest.program as p\np._answer = lambda m, q: {'value': [True, [1]]}\nf = lambda x: 0",
}

# Programs that speak to the judge themselves; f never gives ANSWER.
_SERVE = """
import json, os
os.write(3, b'{"ready": true}\\n')
for line in os.fdopen(os.dup(3)):
    os.write(3, (REPLY if isinstance(REPLY, str) else json.dumps(REPLY)).encode() + b'\\n')
"""
_REPLIES = {
    "a value": {"value": [0, [1]]},
    "true": {"value": [True, [1]]},
    "no arguments": {"value": [0, []]},
    "more arguments": {"value": [0, [1, 2, 3]]},
    "arguments of another type": {"value": [0, [[]]]},
    "no pair": {"value": 0},
    "an object": {"value": [{"ref": 0}, [1]]},
    "an object of the judge": {"value": [{"own": 0}, [1]]},
    "a function of the judge": {"value": [{"builtin": "eval"}, [1]]},
    "a type": {"value": [{"type": "int"}, [1]]},
    "a type that is none": {"value": [{"type": "eval"}, [1]]},
    "a place below zero": {"value": [{"at": -1}, [1]]},
    "a tag of two": {"value": [{"int": "1", "tuple": []}, [1]]},
    "a tag of none": {"value": [{}, [1]]},
    "a tag that is a list": {"value": [{"[]": []}, [1]]},
    "nothing": {},
    "a list": [1],
    "a text": '"error"',
    "a set of lists": {"value": [{"set": [[1]]}, [1]]},
    "a dict of one": {"value": [{"dict": [[1]]}, [1]]},
    "a named tuple": {"value": [{"named": ["E", ["__eq__"], [1]]}, [1]]},
    "a wide range": {"value": [{"range": [0, 10**30, 1]}, [1]]},
    "a wide tuple": {"value": [{"tuple": {"range": [0, 10**12, 1]}}, [1]]},
    "a fraction of nothing": {"value": [{"fraction": [1, 0]}, [1]]},
    "a number that objects": {"value": [{"decimal": "sNaN"}, [1]]},
    "a large number": {"value": [{"int": "0x" + "f" * 100_000}, [1]]},
    "a number as a list": {"value": [{"int": [1]}, [1]]},
    "an error of the judge": {"error": ["AssertionError"], "message": ""},
    "an exit": {"error": ["SystemExit"], "message": "0"},
    "an error that is none": {"error": 7, "message": ["x"]},
    "an error of no kind": {"error": []},
    "a question": ["f", [], {"dict": []}],
    "no JSON": "nan(",
    "a deep text": "[" * 50_000,
    "a deep value": '{"value": [' + '{"tuple": [' * 5000 + "]}" * 5000 + ", [1]]}",
    "a verdict": '{"test": 0, "error": ""}',
    "names of the first release": '{"names": [["abs", false], ["f", false]]}',
}
JUDGED |= {
    "serves itself: " + name: f"REPLY = {reply!r}\n{_SERVE}" for name, reply in _REPLIES.items()
}

# Programs whose f gives nothing right, and a test that one of their tricks is meant for.
_EQUAL = """
class E:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    def __sub__(self, other): return self
    __rsub__ = __add__ = __radd__ = __mul__ = __mod__ = __and__ = __or__ = __xor__ = __sub__
    def __abs__(self): return self
    __neg__ = __round__ = __abs__
    def __bool__(self): return True
    def __hash__(self): return 0
    def __len__(self): return 3
    def __iter__(self): return iter([self] * 3)
    def __getitem__(self, i): return self
    def __float__(self): return 3.14
    __index__ = __int__ = lambda self: 3
    def __str__(self): return 'x'
class f(E):
    def __new__(cls, *a, **k): return object.__new__(cls)
"""
_OF_EQUALS = {
    "a tolerance": "assert abs(f(1) - 3.14) < 1e-6",
    "a tolerance the other way": "assert abs(3.14 - f(1)) < 1e-6",
    "rounded": "assert round(f(1), 2) == 3.14",
    "close": "import math\nassert math.isclose(f(1), 3.14)",
    "as a number": "assert float(f(1)) == 3.14 and int(f(1)) == 3",
    "in order": "assert 3 < f(1) < 5",
    "one of": "assert f(1) in (3, 4, 5)",
    "in it": "assert 3 in f(1)",
    "not unequal": "assert not f(1) != 3",
    "item by item": "assert all(a == b for a, b in zip(f(1), [1, 2, 3]))",
    "as a list": "assert list(f(1)) == [1, 2, 3]",
    "as a set": "assert set(f(1)) == {1, 2, 3}",
    "sorted": "assert sorted(f(1)) == [1, 2, 3]",
    "an item": "assert f(1)[0] == 3",
    "a type": "assert type(f(1)) is list or isinstance(f(1), (list, int)) and f(1) == 3",
}
FORGED = {name: (_EQUAL, test) for name, test in _OF_EQUALS.items()} | {
    "own math": ("class math:\n    isclose = staticmethod(lambda *a, **k: True)\nf = lambda x: 0",
        "assert math.isclose(f(1), 3.14)"),
    "own math as an object": ("class M:\n    def __getattr__(self, n): return lambda *a, **k: True\nmath = M()\nf = lambda x: 0",
        "assert math.isclose(f(1), 3.14)"),
    "patched math": ("import math\nmath.isclose = lambda *a, **k: True\nf = lambda x: 0",
        "assert math.isclose(f(1), 3.14)"),
    "own np": ("class np:\n    isclose = allclose = staticmethod(lambda *a, **k: True)\nf = lambda x: 0",
        "assert np.isclose(f(1), 3.14) and np.allclose(f(1), 3)"),
    "own isclose": ("isclose = lambda *a, **k: True\nf = lambda x: 0", "assert isclose(f(1), 3.14)"),
    "own Counter": ("Counter = lambda x: 0\nf = lambda x: 0", "assert Counter(f(1)) == Counter('aab')"),
    "own built-ins": ("abs = round = set = sorted = all = any = isinstance = len = lambda *a: 0\nf = lambda x: 9",
        "assert abs(f(1) - 3) < 1 and set([f(1)]) == {3}"),
    "own error": ("AssertionError = ValueError = Exception\nf = lambda x: 0", "assert f(1) == 3"),
    "own helper of the test": ("same = lambda *a: True\nf = lambda x: 0",
        "def same(a, b): return a == b\nassert same(f(1), 3)"),
    "own import of the test": ("isclose = lambda *a: True\nf = lambda x: 0",
        "from math import isclose\nassert isclose(f(1), 3)"),
    "an attribute": ("class E:\n    __eq__ = lambda a, b: True\nclass R: x = E()\nf = lambda x: R()",
        "assert f(1).x == 3"),
    "the test's function": ("def f(g): return eval(next((str(c) for c in g.__code__.co_consts if c), '0'))",
        "def g(x): return 3.14\nassert f(g) == 3.14"),
    "the test's names": ("def f(g): return g.__globals__['WANTED']",
        "WANTED = 3.14\nassert f(lambda: 0) == WANTED"),
    "the test's object": ("def f(o): return o._wanted", "class O: _wanted = 3.14\nassert f(O()) == 3.14"),
    "the test's class": ("def f(o): return o.__class__.wanted",
        "class O:\n    def __init__(self): pass\n    wanted = 3.14\nassert f(O()) == 3.15"),
    "the caller's frame": ("import sys\ndef f(g):\n    frame = sys._getframe()\n    while frame:\n        if 'WANTED' in frame.f_globals: return frame.f_globals['WANTED']\n        frame = frame.f_back",
        "WANTED = 3.14\nassert f(lambda: 0) == WANTED"),
    "a changed argument": ("def f(x): x.clear(); x.append(3); return 0", "x = [1]\nassert f(x) == 3"),
    "a view": ("f = lambda x: {'a': 0}.keys()", "assert f(1) == {3}"),
    "a type for a value": ("f = lambda x: int", "assert f(1) == 3"),
    "judged by its own name": ("f = bool", "assert f(1) == 3 and f(0) == 3"),
    "no number": ("f = lambda x: float('nan')", "assert f(1) == f(1) or abs(f(1) - 3) < 1"),
    "the end of a loop": ("def f(x): raise StopIteration", "assert all(map(lambda x: f(x) == 3, [1, 2]))"),
    "nothing there": ("", "assert gcd_of(1) == 1"),
    "an end in a call that a test forgives": ("import os\ndef f(x): os._exit(0)",
        "try: f(1)\nexcept BaseException: pass"),
    "an end between calls that a test forgives": ("import os, threading\ndef f(x): threading.Timer(0.1, os._exit, (0,)).start()",
        "import time\nf(1)\ntime.sleep(0.5)\ntry: f(2)\nexcept BaseException: pass"),
    "a closed line that a test forgives": ("import os\ndef f(x): os.closerange(3, 99)",
        "try: f(1)\nexcept BaseException: pass"),
    "a line without end": ("import os\ndef f(x):\n    while True: os.write(3, b'x' * 65536)",
        "try: f(1)\nexcept BaseException: pass"),
}  # fmt: skip
