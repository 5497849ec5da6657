"""A session reaches no network and no socket of another process."""

from __future__ import annotations

import pytest

from sandbox.client import SandboxClient, SandboxSession
from tests.sandbox.tiers import Tier

CONNECT = "import socket; s = socket.socket({family}, {kind}); s.settimeout(3); s.connect({address})"
NETWORK = {
    "tcp": CONNECT.format(family="2", kind="1", address="('1.1.1.1', 80)"),
    "udp": CONNECT.format(family="2", kind="2", address="('1.1.1.1', 53)"),
    "ipv6": CONNECT.format(family="10", kind="1", address="('::1', 80)"),
    "metadata": CONNECT.format(family="2", kind="1", address="('169.254.169.254', 80)"),
    "local": CONNECT.format(family="2", kind="1", address="('127.0.0.1', {port})"),
    "dns": "import socket; socket.getaddrinfo('example.com', 80)",
    "raw": "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "packet": "import socket; socket.socket(17, 3)",
    "netlink": "import socket; socket.socket(16, 3, 0)",
    "vsock": "import socket; socket.socket(40, 1).connect((2, 1))",
    "alg": "import socket; socket.socket(38, 5, 0)",
    "docker": CONNECT.format(family="1", kind="1", address="'/var/run/docker.sock'"),
    "abstract": CONNECT.format(family="1", kind="1", address="b'\\0sandbox-test'"),
    "datagram_pair": "import socket; a, b = socket.socketpair(1, 2); a.sendto(b'x', '/dev/log')",
    "datagram_pair_abstract": "import socket; a, b = socket.socketpair(1, 2); a.sendto(b'x', '\\0sandbox-test')",
    "listen": "import socket; s = socket.socket(); s.bind(('0.0.0.0', 0)); s.listen(); raise OSError if s.getsockname()[1] else 0",
    "multicast": CONNECT.format(family="2", kind="2", address="('224.0.0.1', 5353)"),
    "broadcast": "import socket; s = socket.socket(2, 2); s.setsockopt(1, 6, 1); s.sendto(b'x', ('255.255.255.255', 9))",
    "gateway": CONNECT.format(family="2", kind="1", address="('172.17.0.1', {port})"),
    "bluetooth": "import socket; socket.socket(31, 3, 3)",
    "can": "import socket; socket.socket(29, 3, 1)",
    "systemd": CONNECT.format(family="1", kind="1", address="'/run/dbus/system_bus_socket'"),
    "containerd": CONNECT.format(family="1", kind="1", address="'/run/containerd/containerd.sock'"),
    "asyncio": "import asyncio; asyncio.run(asyncio.open_connection('127.0.0.1', {port}))",
    "sendto": "import socket, os\ns = socket.socket(1, 2); s.sendto(b'x', '/dev/log')",
    "interfaces": "import socket; names = [n for _, n in socket.if_nameindex() if n != 'lo']; assert names",
    "http": "import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}/healthz')",
}


@pytest.mark.parametrize("name", NETWORK)
async def test_there_is_no_network(isolated: Tier, client: SandboxClient, session: SandboxSession, name: str) -> None:
    code = NETWORK[name].replace("{port}", client.url.rsplit(":", 1)[1])
    result = await session.exec(code, timeout_s=3)
    assert result.status == "error"
    assert result.wall_s < 1.0
