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
    "patched printing": "import builtins, sys\nbuiltins.print = sys.stdout.write = lambda *a: None",
    "patched comparison": "class S(str):\n    __eq__ = lambda a, b: True\n    __hash__ = str.__hash__\nprint(S('x'))",
    "patched guest": "import guest.main as m, guest.program as p\nm._relay = p.finish = lambda *a: (0, '')",
    "unwound guest": "import sys\nf = sys._getframe()\nwhile f.f_back: f = f.f_back\nf.f_globals['passed'] = True",
    "clock games": "import time\ntime.time = time.monotonic = time.perf_counter = lambda: 0.0\nwhile True: pass",
    "alarm games": "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.01, 0.01); signal.signal(14, lambda *a: None)\nwhile True: pass",
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
    "reply of another kind": 'import os\ndef f(x): os.write(3, b\'[1]\\n{"value": {"ref": "x"}}\\n\'); return 0',
    "deep reply": "import os\ndef f(x): os.write(3, b'{\"value\": ' + b'[' * 10**5 + b']' * 10**5 + b'}\\n')",
    "endless call": "def f(x):\n    while True: pass",
    "own builtins": "def all(x): return True\nlen = sorted = list = set = all\nf = lambda x: 0",
    "read the tests": "import gc\ndef f(x): return [o for o in gc.get_objects() if isinstance(o, dict) and 'tests' in o]",
    "a circle": "def f(x):\n    a = []; a.append(a); return a",
    "no end of items": "import itertools\nf = lambda x: itertools.count()",
    "error of the judge": "def f(x): raise AssertionError('ANSWER')",
    "pickle": "class E:\n    def __reduce__(self): return (print, ('ANSWER',))\nf = lambda x: E()",
}
