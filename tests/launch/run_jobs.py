"""Runs jobs one after the other in the same ranks: starting torch for each would take most of the time."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from aotdist.launch import parallel, train
from aotdist.launch.checkpoints.manifest import CHECKPOINTS_FOLDER, checkpoint_folder, complete_checkpoints
from tests.launch.harness import GoesOn, Job


def stay(*_: object) -> None:
    """The ranks stay in their group before, between and after jobs."""


def copy_run(source: Path, target: Path, step: int) -> None:
    if dist.get_rank() == 0:
        shutil.copytree(source, target)
        good = checkpoint_folder(target / CHECKPOINTS_FOLDER, step)
        for later in complete_checkpoints(good.parent):
            if later.name > good.name:
                shutil.rmtree(later)
    dist.barrier()


def run(small: Job, jobs: Mapping[str, Sequence[str] | GoesOn]) -> dict[str, int]:
    """The exit code of each job, in ranks that are told where they are as torchrun tells them."""
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    parallel._join_group = train.leave = stay
    codes = {}
    for name, job in jobs.items():
        if isinstance(job, GoesOn):
            copy_run(small.folder / job.name, small.folder / name, job.step)
            codes[name] = train.main(["--resume", str(small.folder / name), *job.options])
        else:
            variables = dict(word.split("=") for word in job if word.startswith("AOTDIST_"))
            with patch.dict(os.environ, variables):
                options = [word for word in job if not word.startswith("AOTDIST_")]
                codes[name] = train.main(small.arguments(name, *options))
    sys.stdout.flush()
    return codes
