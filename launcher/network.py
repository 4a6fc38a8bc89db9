"""Which address and interface of this host lead to another one."""

import fcntl
import ipaddress
import logging
import socket
import struct
from collections.abc import MutableMapping

from lockstep.launcher.errors import LaunchError

logger = logging.getLogger(__name__)

_SIOCGIFADDR = 0x8915
_ANY_PORT = 9
_IFREQ = "256s"
_ADDRESS_IN_IFREQ = slice(20, 24)
# Otherwise each library guesses by itself, and a host name that means loopback misleads it.
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def local_address(towards: str) -> str:
    """The address of this host that packets to ``towards`` leave from.

    Raises:
        LaunchError: the name is unknown, or no route leads there.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            towards, _ANY_PORT, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            # Nothing is sent: connecting a datagram socket only looks up the route.
            probe.connect(address)
            own: str = probe.getsockname()[0]
    except OSError as error:
        raise LaunchError(f"no way leads from this host to {towards}: {error}") from error
    return own


def interface_of(address: str) -> str | None:
    """The interface that has an IPv4 address, if one of this host does."""
    for _, name in socket.if_nameindex():
        if _ipv4_of(name) == address:
            return name
    return None


def use_route(towards: str, env: MutableMapping[str, str]) -> None:
    """Have gloo and NCCL meet ranks of other hosts on the interface that leads to ``towards``.

    What the user has set stays. IPv6 is left to the libraries.

    Raises:
        LaunchError: no way leads there.
    """
    address = local_address(towards)
    interface = interface_of(address)
    if interface is None or ipaddress.ip_address(address).version != 4:
        return
    for name in _INTERFACE_VARIABLES:
        env.setdefault(name, interface)
    used = ", ".join(f"{name}={env[name]}" for name in _INTERFACE_VARIABLES)
    logger.info("to reach %s: %s (%s), %s", towards, interface, address, used)


def _ipv4_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack(_IFREQ, interface.encode()[:15])
            reply = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(reply[_ADDRESS_IN_IFREQ])
