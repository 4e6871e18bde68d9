"""Which files are the user's."""

import torch

from aotdist import api
from aotdist.launch import loop
from aotdist.launch.commands import bench
from aotdist.origins import is_user_file


def test_the_trainer_is_a_user_and_commands_are_not():
    assert is_user_file(__file__)
    assert is_user_file(loop.__file__)
    for file in (bench.__file__, api.__file__, torch.__file__, "<string>"):
        assert not is_user_file(file)
