"""Removes the control groups of a service that was killed. Run by path, with the folders as arguments.

Imports nothing of the project. Its standard input is a pipe that only the service holds: end-of-file means that the
service is gone, for whatever reason.
"""

import os
import sys
import time

DEADLINE_S = 10.0


def main(folders: list[str]) -> None:
    """Wait until the service ends, then delete each folder and its subfolders as soon as their processes are gone."""
    sys.stdin.buffer.read()
    deadline = time.monotonic() + DEADLINE_S
    while folders and time.monotonic() < deadline:
        for folder in list(folders):
            try:
                for name in os.listdir(folder):
                    if os.path.isdir(inner := os.path.join(folder, name)):
                        os.rmdir(inner)
                os.rmdir(folder)
            except FileNotFoundError:
                pass
            except OSError:
                continue
            folders.remove(folder)
        time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1:])
