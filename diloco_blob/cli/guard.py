"""Become a command that dies with the process that started it.

`launch` starts every process through this file, with `python -I -S guard.py PARENT_PID COMMAND...`: it asks the kernel
for a SIGKILL when its parent dies (Linux's `prctl(PR_SET_PDEATHSIG)`), checks that the parent has not died already, and
then *becomes* the command, which keeps its process id and the wish. So not even SIGKILL of the launcher leaves islands
behind that nobody knows of. The usual other way, `preexec_fn`, is unsafe in a process that has threads.

Elsewhere than on Linux there is no such wish: the islands then go on, as they would on machines of their own, and a new
`launch` of the same run fences them. Imports nothing but the standard library, and little of that: it starts in
milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Bind this process to its parent and become the command.

    Args:
        argv: Process id of the parent, then the command's words.
    """
    parent, command = int(argv[0]), argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(137)
    os.execv(command[0], command)  # noqa: S606 - no shell is what we want


if __name__ == "__main__":
    main(sys.argv[1:])
