"""Claims a range of host uids for one service, so that sessions of two services on a machine never share a uid.

The kernel counts processes by uid, and lets processes of one uid signal each other. The claim is a name in the kernel's
table of abstract sockets, which is free again when its holder ends, for whatever reason. Services in different network
namespaces do not see each other's names: their ranges are drawn at random. Independent of sandboxes.
"""

from __future__ import annotations

import errno
import secrets
import socket
import sys

FIRST_UID = 1_600_000_000
"""The first range: above what any distribution assigns."""
NUM_UIDS = 65_536
"""Size of a range."""
NUM_RANGES = 4096
"""The last range ends below 2**31, which some tools treat as the largest uid."""


class UidRange:
    """A claimed range of uids: `first` up to, but not including, `first + NUM_UIDS`. `close` gives it back.

    >>> with UidRange.claim() as uids, UidRange.claim() as others:
    ...     abs(uids.first - others.first) >= NUM_UIDS
    True
    """

    def __init__(self, first: int, holder: socket.socket) -> None:
        self.first, self._holder = first, holder

    @classmethod
    def claim(cls) -> UidRange:
        """A range that no other service of this network namespace holds. Raises OSError when all are taken."""
        start = secrets.randbelow(NUM_RANGES)
        if sys.platform != "linux":  # the engine of the docker backend runs in a virtual machine
            return cls(FIRST_UID + start * NUM_UIDS, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        for number in ((start + step) % NUM_RANGES for step in range(NUM_RANGES)):
            holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                holder.bind(f"\0agentrl-uids-{number}")
            except OSError as error:
                holder.close()
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return cls(FIRST_UID + number * NUM_UIDS, holder)
        raise OSError(errno.EBUSY, "every range of uids for sessions is taken")

    def close(self) -> None:
        """Give the range back. Safe to call twice."""
        self._holder.close()

    def __enter__(self) -> UidRange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
