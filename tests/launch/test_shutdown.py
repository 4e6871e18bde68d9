"""Signals become requests, faults become one message and an exit code."""

import os
import signal
import sys
import threading

import pytest

from aotdist import BadSettings, InternalError, RankLost
from aotdist.launch import shutdown
from aotdist.launch.parallel import Place
from aotdist.launch.shutdown import Interrupted, StopRequest

ALONE = Place()
SECOND = Place(rank=1, local_rank=1, world_size=2, launched=True)


@pytest.fixture
def stop():
    return StopRequest()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_the_second_acts(number):
    with StopRequest() as stop:
        os.kill(os.getpid(), number)
        assert stop.signal_number == number
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_the_handlers_before_are_put_back():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize("launcher", ["there", "gone", "gone, and the rank hangs"])
def test_a_rank_whose_launcher_is_gone_stops_or_is_killed(stop, monkeypatch, capsys, launcher):
    killed, parent = threading.Event(), os.getppid()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setattr(shutdown, "LAUNCHER_POLL_S", 0.01)
    monkeypatch.setattr(shutdown, "ORPHAN_S", 0.01 if "hangs" in launcher else 30)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.set())
    with shutdown.watching_launcher(stop):
        if launcher != "there":
            monkeypatch.setattr(os, "getppid", lambda: 1)
        assert killed.wait(20 if "hangs" in launcher else 0.2) == ("hangs" in launcher)
    assert stop.signal_number == (None if launcher == "there" else signal.SIGTERM)
    assert (f"its torchrun, process {parent}, is gone" in capsys.readouterr().err) == (launcher != "there")


def test_only_a_launcher_that_outlives_its_ranks_is_watched(stop, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    before = threading.active_count()
    with shutdown.watching_launcher(stop):
        assert threading.active_count() == before


def test_a_launcher_that_is_gone_asks_no_second_time(stop):
    stop.ask(signal.SIGINT)
    stop.ask(signal.SIGTERM)
    assert stop.signal_number == signal.SIGINT


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SystemExit(0), 0),
        (SystemExit(2), 2),
        (KeyboardInterrupt(), 130),
        (Interrupted(signal.SIGTERM), 143),
        (BadSettings("x"), 2),
        (InternalError("x"), 1),
        (ValueError("x"), 1),
    ],
)
def test_every_end_has_its_exit_code(stop, error, code):
    assert shutdown.end(error, ALONE, stop) == code


def test_our_errors_are_shown_without_a_traceback(stop, capsys):
    shutdown.end(BadSettings("no such mesh", fix="another"), ALONE, stop)
    assert capsys.readouterr().err == "BadSettings: no such mesh\n  fix: another\n"


def test_other_errors_are_shown_with_their_traceback_and_rank(stop, capsys):
    try:
        sys.intern(3)
    except TypeError as error:
        shutdown.end(error, SECOND, stop)
    lines = capsys.readouterr().err.splitlines()
    assert "sys.intern(3)" in "".join(lines)
    assert all(line.startswith("[rank 1] ") for line in lines)


def test_another_rank_speaks_when_rank_0_does_not(stop, capsys, monkeypatch):
    monkeypatch.setattr(shutdown, "FIRST_WORD_S", 0.2)
    shutdown.end(BadSettings("only here"), SECOND, stop)
    assert capsys.readouterr().err == "[rank 1] BadSettings: only here\n"


def test_another_rank_is_silent_when_the_launcher_ends_it_meanwhile(stop, capsys):
    stop.signal_number = signal.SIGTERM
    assert shutdown.end(BadSettings("everywhere"), SECOND, stop) == 2
    assert capsys.readouterr().err == ""


def test_the_loss_of_a_rank_is_reported_at_once(stop, capsys):
    stop.signal_number = signal.SIGTERM  # the launcher has noticed as well
    assert shutdown.end(RankLost("rank 0 was lost"), SECOND, stop) == 1
    assert capsys.readouterr().err == "[rank 1] RankLost: rank 0 was lost\n"


def test_a_process_alone_has_no_rank_to_lose():
    with shutdown.naming_lost_ranks():
        pass
