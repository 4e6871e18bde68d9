"""Which folder a run writes to: a new one, or that of a run that goes on."""

import json

import pytest

from aotdist import BadSettings
from aotdist.launch.config import JobOptions, RunOptions
from aotdist.launch.parallel import Place
from aotdist.launch.run_folder import RunFolder, claim_run_folder
from aotdist.launch.run_lock import LOCK_FILE, RunLock

FIRST = Place(launched=True, launch_id="a")
RESTARTED = Place(launched=True, launch_id="a", restarts=1)


@pytest.fixture
def options(tmp_path):
    def make(name=None, resume=None):
        return JobOptions(run=RunOptions(folder=tmp_path, name=name), resume=resume)

    return make


def claim(options, place):
    """The folder, which is released at once."""
    with RunLock() as lock:
        return claim_run_folder(options, place, lock)


def begun(folder, launch_id):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"environment": {"launch_id": launch_id}}))
    return folder


def test_ranks_that_are_started_again_go_on_with_their_own_run(options, tmp_path):
    begun(tmp_path / "other", "b")
    mine = begun(tmp_path / "mine", "a")
    assert claim(options(), RESTARTED) == RunFolder(mine, is_new=False)
    assert claim(options("mine"), RESTARTED) == RunFolder(mine, is_new=False)
    with pytest.raises(BadSettings, match="'mine' exists already"):
        claim(options("mine"), FIRST)
    with pytest.raises(BadSettings, match="'other' exists already"):
        claim(options("other"), RESTARTED)


def test_ranks_that_died_before_they_had_a_run_begin_one(options, tmp_path):
    begun(tmp_path / "other", "b")
    claimed = claim(options(), RESTARTED)
    assert claimed.is_new and claimed.path.parent == tmp_path and claimed.path.name != "other"


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_folder_whose_process_died_at_once_is_free(options, tmp_path, resume):
    (tmp_path / "young").mkdir()
    (tmp_path / "young" / ".config.json.a1").write_text("{")
    assert claim(options("young", resume), FIRST) == RunFolder(tmp_path / "young", is_new=True)
    (tmp_path / "young" / "notes").write_text("mine")
    with pytest.raises(BadSettings, match="exists already"):
        claim(options("young", resume), FIRST)


def test_a_folder_that_is_named_is_taken(options, tmp_path):
    begun(tmp_path / "there", "b")
    assert claim(options(resume=str(tmp_path / "there")), FIRST).path.name == "there"


def test_a_folder_that_another_process_has_just_made_is_not_free(options, tmp_path):
    with RunLock() as held:
        first = claim_run_folder(options("young"), FIRST, held)
        assert {path.name for path in first.path.iterdir()} == {LOCK_FILE}
        with pytest.raises(BadSettings, match="exists already"):
            claim(options("young"), FIRST)
    assert claim(options("young"), FIRST) == first


def test_a_damaged_run_beside_it_is_in_nobodys_way(options, tmp_path):
    mine = begun(tmp_path / "mine", "a")
    for name, written in (("x", "{"), ("y", "[]"), ("z", '{"environment": 3}')):
        (begun(tmp_path / name, "b") / "config.json").write_text(written)
    assert claim(options(), RESTARTED).path == mine
