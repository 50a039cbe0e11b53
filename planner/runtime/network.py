"""Which network interface the exchanges of a run listen on: the loopback, unless another one is named.

Exchanges are neither encrypted nor authenticated: whoever reaches the port of a rank can read and write its tensors.
torch's gloo listens where the host's name points by default, and its store on all interfaces.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import socket
import struct
import sys

import torch.distributed as dist

from planner.errors import UsageError

_CHOOSE_INTERFACE = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables by which gloo and NCCL are told an interface."""
_STORE_TIMEOUT = datetime.timedelta(minutes=5)
_GET_ADDRESS = 0x8915
"""`SIOCGIFADDR` of netdevice(7) on Linux."""


def loopback() -> str:
    """Name of the loopback interface.

    Raises:
        UsageError: the machine has none.
    """
    names = [name for _, name in socket.if_nameindex()]
    for name in ("lo", "lo0"):
        if name in names:
            return name
    raise UsageError("no loopback interface", hint=f"name one of {', '.join(names) or 'no interface'}")


def listen_on(interface: str) -> None:
    """Let exchanges that this process sets up from now on, by gloo or NCCL, listen on one interface."""
    gloo, nccl = _CHOOSE_INTERFACE
    os.environ[gloo] = interface
    os.environ[nccl] = f"={interface}"  # this name, not all that begin with it


def join_others(interface: str = "") -> None:
    """Initialise torch.distributed with gloo from the environment that `torchrun` sets.

    Processes of one machine listen on its loopback interface. Those of several machines listen on the interface that is
    named, by the argument or by `GLOO_SOCKET_IFNAME`.

    Args:
        interface: its name, such as `eth0`; "" for the loopback.

    Raises:
        UsageError: the environment lacks a variable, or there are several machines and no interface is named; or the
            machine does not have it.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        message = f"torch.distributed is not ready: {', '.join(missing)} not set"
        raise UsageError(message, hint="start by torchrun, or call init_process_group")
    interface = interface or _asked_interface()
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise UsageError(f"no network interface {interface!r}", hint=f"this machine has {', '.join(names)}")
    listen_on(interface)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # the store is torchrun's
        dist.init_process_group("gloo")
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=_store(interface, rank, world), rank=rank, world_size=world)


def _asked_interface() -> str:
    """The interface of processes for which none was named: the loopback on one machine, else that of the environment.

    Raises:
        UsageError: there are several machines and the environment names none.
    """
    if _one_machine():
        return loopback()
    asked = os.environ.get(_CHOOSE_INTERFACE[0], "")
    if not asked:
        names = ", ".join(name for _, name in socket.if_nameindex() if name != loopback())
        raise UsageError(
            "processes on several machines, and no network interface to listen on is named",
            hint=f"--interface NAME, of a network that only these machines reach (here: {names or 'none'})",
        )
    return asked


def _one_machine() -> bool:
    """Whether all processes are on this machine: as many as `torchrun` started here, or led by a loopback address."""
    if os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ["WORLD_SIZE"] or os.environ["WORLD_SIZE"] == "1":
        return True
    with contextlib.suppress(OSError, ValueError):
        return ipaddress.ip_address(socket.gethostbyname(os.environ["MASTER_ADDR"])).is_loopback
    return False


def _store(interface: str, rank: int, world: int) -> dist.TCPStore:
    """The store by which the processes find each other; the first rank's listens on one interface alone.

    Raises:
        UsageError: the interface has no address, or the port is taken.
    """
    port = int(os.environ["MASTER_PORT"])
    if rank > 0:
        return dist.TCPStore(os.environ["MASTER_ADDR"], port, world, is_master=False, timeout=_STORE_TIMEOUT)
    address = "127.0.0.1" if interface == loopback() else _address(interface)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        message = f"cannot listen on port {port} of {interface}: {error.strerror}"
        raise UsageError(message, hint="set MASTER_PORT to a free port") from error
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        world,
        is_master=True,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _address(interface: str) -> str:
    """The IPv4 address of an interface.

    Raises:
        UsageError: it has none.
    """
    if sys.platform == "linux":
        import fcntl

        request = struct.pack("256s", interface.encode()[:15])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, contextlib.suppress(OSError):
            return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _GET_ADDRESS, request)[20:24])
    raise UsageError(
        f"no IPv4 address of {interface!r} is known", hint="start by torchrun, which has a store of its own"
    )
