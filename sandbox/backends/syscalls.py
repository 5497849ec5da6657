"""Numbers of the system calls that a session may make, per machine. Independent of how a filter is built.

This is an allow-list: calls that are not listed are refused. Left out on purpose: execve, ptrace, mount, unshare,
setns, bpf, io_uring, keyctl, perf, userfaultfd, memfd_create, System V IPC, message queues, inotify, personality,
flock (any program that can read a file could lock it against all others on the host),
everything that changes a uid, a clock or the kernel; and calls that could send SIGCONT to a session that is stopped
between two calls: POSIX timers and setpgid (here), a signal for a child's death or for a descriptor (by their
arguments, in seccomp.py).
"""

from __future__ import annotations

_X86_64 = """
read:0 write:1 open:2 close:3 stat:4 fstat:5 lstat:6 poll:7 lseek:8 mmap:9 mprotect:10 munmap:11 brk:12
rt_sigaction:13 rt_sigprocmask:14 rt_sigreturn:15 pread64:17 pwrite64:18 readv:19 writev:20 access:21 pipe:22
select:23 sched_yield:24 mremap:25 msync:26 mincore:27 madvise:28 dup:32 dup2:33 pause:34 nanosleep:35
getitimer:36 alarm:37 setitimer:38 getpid:39 sendfile:40 connect:42 accept:43 sendto:44 recvfrom:45 sendmsg:46
recvmsg:47 shutdown:48 bind:49 listen:50 getsockname:51 getpeername:52 socketpair:53 setsockopt:54
getsockopt:55 fork:57 vfork:58 exit:60 wait4:61 kill:62 uname:63 fsync:74 fdatasync:75
truncate:76 ftruncate:77 getdents:78 getcwd:79 chdir:80 fchdir:81 rename:82 mkdir:83 rmdir:84 link:86
unlink:87 symlink:88 readlink:89 chmod:90 fchmod:91 umask:95 gettimeofday:96 getrlimit:97 getrusage:98
sysinfo:99 times:100 getuid:102 getgid:104 geteuid:107 getegid:108 getppid:110 getpgrp:111
setsid:112 getgroups:115 getresuid:118 getresgid:120 getpgid:121 getsid:124 rt_sigpending:127
rt_sigtimedwait:128 rt_sigsuspend:130 sigaltstack:131 utime:132 statfs:137 fstatfs:138 getpriority:140
setpriority:141 sched_getparam:143 sched_getscheduler:145 sched_get_priority_max:146
sched_get_priority_min:147 arch_prctl:158 setrlimit:160 gettid:186 tkill:200 time:201 futex:202
sched_setaffinity:203 sched_getaffinity:204 epoll_create:213 getdents64:217 set_tid_address:218
restart_syscall:219 fadvise64:221 clock_gettime:228 clock_getres:229 clock_nanosleep:230 exit_group:231 epoll_wait:232
epoll_ctl:233 tgkill:234 utimes:235 waitid:247 openat:257 mkdirat:258 futimesat:261 newfstatat:262
unlinkat:263 renameat:264 linkat:265 symlinkat:266 readlinkat:267 fchmodat:268 faccessat:269 pselect6:270
ppoll:271 set_robust_list:273 get_robust_list:274 utimensat:280 epoll_pwait:281 timerfd_create:283 eventfd:284
fallocate:285 timerfd_settime:286 timerfd_gettime:287 accept4:288 eventfd2:290 epoll_create1:291 dup3:292
pipe2:293 preadv:295 pwritev:296 prlimit64:302 getcpu:309 renameat2:316 getrandom:318 membarrier:324
copy_file_range:326 preadv2:327 pwritev2:328 statx:332 rseq:334 close_range:436 faccessat2:439
epoll_pwait2:441 futex_waitv:449 fchmodat2:452
"""

_AARCH64 = """
getcwd:17 eventfd2:19 epoll_create1:20 epoll_ctl:21 epoll_pwait:22 dup:23 dup3:24 mkdirat:34
unlinkat:35 symlinkat:36 linkat:37 renameat:38 statfs:43 fstatfs:44 truncate:45 ftruncate:46 fallocate:47
faccessat:48 chdir:49 fchdir:50 fchmod:52 fchmodat:53 openat:56 close:57 pipe2:59 getdents64:61 lseek:62
read:63 write:64 readv:65 writev:66 pread64:67 pwrite64:68 preadv:69 pwritev:70 sendfile:71 pselect6:72
ppoll:73 readlinkat:78 newfstatat:79 fstat:80 fsync:82 fdatasync:83 timerfd_create:85 timerfd_settime:86
timerfd_gettime:87 utimensat:88 exit:93 exit_group:94 waitid:95 set_tid_address:96 futex:98 set_robust_list:99
get_robust_list:100 nanosleep:101 getitimer:102 setitimer:103 clock_gettime:113 clock_getres:114 clock_nanosleep:115
sched_getscheduler:120 sched_getparam:121 sched_setaffinity:122 sched_getaffinity:123 sched_yield:124
sched_get_priority_max:125 sched_get_priority_min:126 restart_syscall:128 kill:129 tkill:130 tgkill:131
sigaltstack:132 rt_sigsuspend:133 rt_sigaction:134 rt_sigprocmask:135 rt_sigpending:136 rt_sigtimedwait:137
rt_sigreturn:139 setpriority:140 getpriority:141 getresuid:148 getresgid:150 times:153 getpgid:155
getsid:156 setsid:157 getgroups:158 uname:160 getrlimit:163 setrlimit:164 getrusage:165 umask:166 getcpu:168
gettimeofday:169 getpid:172 getppid:173 getuid:174 geteuid:175 getgid:176 getegid:177 gettid:178 sysinfo:179
socketpair:199 bind:200 listen:201 accept:202 connect:203 getsockname:204 getpeername:205 sendto:206
recvfrom:207 setsockopt:208 getsockopt:209 shutdown:210 sendmsg:211 recvmsg:212 brk:214 munmap:215 mremap:216
mmap:222 fadvise64:223 mprotect:226 msync:227 mincore:232 madvise:233 accept4:242 wait4:260 prlimit64:261
renameat2:276 getrandom:278 membarrier:283 copy_file_range:285 preadv2:286 pwritev2:287 statx:291 rseq:293
close_range:436 faccessat2:439 epoll_pwait2:441 futex_waitv:449 fchmodat2:452
"""

CONDITIONAL = {
    "x86_64": {"clone": 56, "clone3": 435, "fcntl": 72, "ioctl": 16, "prctl": 157, "socket": 41},
    "aarch64": {"clone": 220, "clone3": 435, "fcntl": 25, "ioctl": 29, "prctl": 167, "socket": 198},
}
"""Calls that are allowed only with some arguments, which the filter checks."""

BY_ARGUMENT = (
    "socketpair",
    "setsockopt",
    "getsockopt",
    "sendto",
    "recvfrom",
    "sendmsg",
    "recvmsg",
    "close_range",
    "mmap",
)
"""Calls of the tables above that the filter allows only with some arguments."""


_REACH_OUT = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "utime", "utimes", "futimesat", "utimensat"),
    *("setpriority", "sched_setaffinity", "prlimit64"),
    *("socketpair", "connect", "bind", "listen", "accept", "accept4", "sendmsg"),
)
"""Calls with which a program without namespaces could change files or processes of its uid, or reach their sockets."""


_UNCHARGED = ("sendfile",)
"""Calls that can put memory into the kernel's name, refused where no control group charges it to the session: sendfile
pins a whole page of a file that is then cut off for each byte in a pipe."""


def allowed(machine: str, *, shares_host: bool, is_charged: bool) -> list[int]:
    """Numbers of the calls that are allowed with any arguments. Raises KeyError for an unknown machine."""
    refused = {*BY_ARGUMENT, *(_REACH_OUT if shares_host else ()), *(() if is_charged else _UNCHARGED)}
    return [number for name, number in _table(machine).items() if name not in refused]


def number_of(machine: str, name: str) -> int:
    """The number of a call. Raises KeyError."""
    return _table(machine)[name]


def _table(machine: str) -> dict[str, int]:
    table = {"x86_64": _X86_64, "aarch64": _AARCH64}[machine]
    return {name: int(number) for name, _, number in (entry.partition(":") for entry in table.split())}
