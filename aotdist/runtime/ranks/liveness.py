"""Which ranks are alive: each keeps a TCP port open, and a refused connection means that its process is gone.

The port is never served. The kernel completes connections to it as long as the process lives, even if the
process is blocked in a collective or holds the interpreter lock, and refuses them once the process is gone,
even by SIGKILL. So there is no heartbeat, no thread, and no traffic per step.

Between machines a firewall may refuse connections as well. So a refusal counts only from a machine that has
answered this process before; on the same machine it always counts.

A rank that has not opened its port yet has gloo's connections since `init_process_group`, if the default
group has gloo: the kernel closes them when the process is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import ipaddress
import os
import selectors
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from aotdist.torch_seam.groups import PrefixStore, Store, TCPStore, runs_on_gloo, world_group_name

Pulse = Literal["alive", "dead", "unknown"]
"""`unknown`: the machine does not answer, or its answer proves nothing."""

_BACKLOG = 4096
"""Connections that the kernel keeps for a port that nobody serves: Linux's own limit. Beyond that, probes get
no answer, which is `unknown`, never `dead`."""

_AT_ONCE = 256
"""Ranks probed together: well below the usual limit of 1,024 open files."""

_NOBODYS_TAG = 2**31 - 7
"""The tag of receives that no rank ever answers."""

_ports: list[socket.socket] = []
"""The ports that this process has opened, one for each interface."""

_answering: set[str] = set()
"""Addresses of other machines on which a port has answered: no firewall refuses in their place."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank's port is.

    Args:
        machine: identifies the machine and its network namespace.
        ip: numeric address of the interface.
        port: TCP port.
    """

    machine: str
    ip: str
    port: int


def address_of_this_process(store: Store) -> Address:
    """Open this process's port, once; returns its address for ranks that can reach the store.

    It is open only on the interface that leads to the store's host, as the ranks' connections are.
    """
    ip = _ip_towards(_host_of(store))
    return Address(_machine(), ip, _open_port(ip).getsockname()[1])


def is_hosted_by_a_rank(store: Store) -> bool:
    """Whether rank 0's process hosts the store, and not torchrun's agent, a file or memory."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)


def pulses(addresses: Mapping[int, Address], timeout_s: float = 1.0) -> dict[int, Pulse]:
    """Probe ranks, many at a time; 0.1 ms each on one machine, `timeout_s` at most for a silent one."""
    ranks = sorted(addresses)
    found: dict[int, Pulse] = {}
    for start in range(0, len(ranks), _AT_ONCE):
        found |= _probe({rank: addresses[rank] for rank in ranks[start : start + _AT_ONCE]}, timeout_s)
    return found


def dead_among(addresses: Mapping[int, Address]) -> list[int]:
    """The ranks whose process is certainly gone."""
    return [rank for rank, pulse in pulses(addresses).items() if pulse == "dead"]


def is_closed(rank: int) -> bool:
    """Whether gloo has seen a rank close its connection in the default group; False if that has no gloo.

    On a closed connection, a receive fails when it is started. On an open one, it is dropped at once:
    waiting for it, however briefly, would close the connection.
    """
    world, cpu = world_group_name(), torch.device("cpu")
    try:
        if world is not None and runs_on_gloo(world, cpu):
            dist.irecv(torch.empty(1, device=cpu), src=rank, tag=_NOBODYS_TAG)
    except RuntimeError as error:  # also raised if the group has no backend for CPUs
        return "Connection closed by peer" in str(error)
    return False


def meet_machines(addresses: Mapping[int, Address], turn: int) -> None:
    """Probe every other machine once while its ranks live, so that its refusals count later.

    Args:
        addresses: of ranks that are believed to be alive.
        turn: which of a machine's ranks to probe; different callers should take different turns.
    """
    by_machine: dict[str, list[int]] = {}
    for rank, address in addresses.items():
        if address.machine != _machine() and address.ip not in _answering:
            by_machine.setdefault(address.ip, []).append(rank)
    chosen = [ranks[turn % len(ranks)] for ranks in by_machine.values()]
    pulses({rank: addresses[rank] for rank in chosen})


@functools.cache
def _machine() -> str:
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    return f"{socket.gethostname()} {uuid.getnode()}"


@functools.cache
def _open_port(ip: str) -> socket.socket:
    port = socket.create_server((ip, 0), family=_family(ip), backlog=_BACKLOG)
    atexit.register(port.close)
    _ports.append(port)
    return port


def _family(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET


def _close_in_child() -> None:
    """Close the ports in a forked process: a data loader that outlives its rank must not keep them open."""
    while _ports:
        _ports.pop().close()
    _open_port.cache_clear()


os.register_at_fork(after_in_child=_close_in_child)


def _host_of(store: Store) -> str:
    """Name or address of the store's host; this machine for stores in files and in memory."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else "localhost"


@functools.cache
def _ip_towards(host: str) -> str:
    """The address of the interface through which this machine reaches `host`; nothing is sent."""
    with contextlib.suppress(OSError):
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    return "127.0.0.1"


def _probe(addresses: Mapping[int, Address], timeout_s: float) -> dict[int, Pulse]:
    codes: dict[int, int] = {}
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as selector:
        for rank, address in addresses.items():
            probe = opened.enter_context(socket.socket(_family(address.ip), socket.SOCK_STREAM))
            probe.setblocking(False)
            codes[rank] = probe.connect_ex((address.ip, address.port))
            if codes[rank] == errno.EINPROGRESS:
                selector.register(probe, selectors.EVENT_WRITE, rank)
        _await_answers(selector, codes, time.monotonic() + timeout_s)
    _answering.update(addresses[rank].ip for rank, code in codes.items() if code == 0)
    return {rank: _pulse(codes[rank], address) for rank, address in addresses.items()}


def _await_answers(selector: selectors.BaseSelector, codes: dict[int, int], deadline: float) -> None:
    while selector.get_map() and (left := deadline - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            probe = key.fileobj
            assert isinstance(probe, socket.socket)
            codes[key.data] = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            selector.unregister(probe)


def _pulse(code: int, address: Address) -> Pulse:
    here = address.machine == _machine()
    if not here and ipaddress.ip_address(address.ip).is_loopback:
        return "unknown"  # its own loopback; the one that answered is ours
    if code == 0:
        return "alive"
    counts = here or address.ip in _answering
    return "dead" if code == errno.ECONNREFUSED and counts else "unknown"
