"""A process that lives answers; one that is gone is `dead` at once; anything doubtful is `unknown`."""

import multiprocessing
import os
import signal
import socket
import time

import pytest
import torch.distributed as dist

from aotdist.runtime.ranks import liveness
from aotdist.runtime.ranks.liveness import Address, address_of_this_process, dead_among, meet_machines, pulses
from tests.ranks.harness import fork_server


@pytest.fixture
def store():
    return dist.PrefixStore("default_pg", dist.HashStore())


def report_and_sleep(pipe):
    pipe.send(address_of_this_process(dist.HashStore()))
    time.sleep(60)


@pytest.fixture
def other():
    """Another process and its address."""
    here, there = multiprocessing.Pipe()
    process = fork_server().Process(target=report_and_sleep, args=(there,))
    process.start()
    yield process, here.recv()
    process.kill()
    process.join()


def test_the_own_process_is_alive(store):
    assert pulses({3: address_of_this_process(store)}) == {3: "alive"}
    assert address_of_this_process(store) == address_of_this_process(store)


def test_the_port_is_open_on_the_interface_of_the_ranks_alone(store, own_ip):
    address = address_of_this_process(store)
    assert address.ip == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((own_ip, address.port), timeout=5).close()


def test_a_stopped_process_is_alive_and_a_killed_one_is_dead(other):
    process, address = other
    os.kill(process.pid, signal.SIGSTOP)
    assert pulses({0: address}) == {0: "alive"}
    process.kill()
    process.join()
    assert dead_among({0: address}) == [0]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # Python 3.12
def test_a_forked_child_does_not_keep_its_parent_alive(store):
    address_of_this_process(store)
    port = liveness._open_port("127.0.0.1")
    child = os.fork()
    if child == 0:
        os._exit(0 if port.fileno() == -1 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert port.fileno() != -1


@pytest.fixture
def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return closed.getsockname()[1]


@pytest.fixture
def own_ip(monkeypatch):
    """This machine's address for others; no connection is made to find it."""
    monkeypatch.setattr(liveness, "_answering", set())
    ip = liveness._ip_towards("192.0.2.1")
    if ip.startswith("127."):
        pytest.skip("this machine has no address but the loopback one")
    return ip


def test_a_loopback_address_of_another_machine_says_nothing(closed_port):
    assert pulses({0: Address("another machine", "127.0.0.1", closed_port)}) == {0: "unknown"}
    assert pulses({0: Address(liveness._machine(), "127.0.0.1", closed_port)}) == {0: "dead"}


def test_a_refusal_counts_only_from_a_machine_that_has_answered(store, closed_port, own_ip):
    """A firewall refuses like a kernel does; this machine's outer address stands for another machine's."""
    living = Address("another machine", own_ip, liveness._open_port(own_ip).getsockname()[1])
    gone = Address("another machine", own_ip, closed_port)
    assert pulses({0: gone}) == {0: "unknown"}
    meet_machines({0: gone, 1: living}, turn=5)
    assert pulses({0: gone, 1: living}) == {0: "dead", 1: "alive"}


def test_a_silent_machine_is_unknown_after_the_timeout():
    """Nobody answers in 192.0.2.0/24 (for documentation), unless a firewall or the own kernel refuses."""
    start = time.monotonic()
    addresses = {rank: Address("far", f"192.0.2.{rank + 1}", 9) for rank in range(20)}
    assert set(pulses(addresses, timeout_s=0.3).values()) == {"unknown"}
    assert time.monotonic() - start < 2.0


def test_hundreds_are_probed_at_once(store):
    address = address_of_this_process(store)
    assert set(pulses(dict.fromkeys(range(600), address)).values()) == {"alive"}


def test_the_address_is_one_from_which_the_store_is_reached():
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert address_of_this_process(dist.PrefixStore("default_pg", host)).ip == "127.0.0.1"
