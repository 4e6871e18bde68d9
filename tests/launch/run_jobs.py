"""Runs jobs one after the other in the same ranks: starting torch for each would take most of the time.

Called by torchrun with one file, a JSON list of `{"name": ..., "arguments": [...]}`, where arguments
`AOTDIST_...=...` are variables; rank 0 writes each job's exit code to `NAME.code` beside it as soon as it is
known. With `"copied": NAME, "step": N`, the folder of the job begins as a copy of that one, without
checkpoints of later steps.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from aotdist.launch import parallel, train
from aotdist.launch.checkpoints.manifest import CHECKPOINTS_FOLDER, checkpoint_folder, complete_checkpoints


def stay():
    """The ranks stay in their group between jobs."""


join_group = parallel._join_group


def join_once(*arguments):
    if not dist.is_initialized():
        join_group(*arguments)


def copy_run(source, target, step):
    if os.environ["RANK"] == "0":
        shutil.copytree(source, target)
        good = checkpoint_folder(target / CHECKPOINTS_FOLDER, step)
        for later in complete_checkpoints(good.parent):
            if later.name > good.name:
                shutil.rmtree(later)
    if dist.is_initialized():  # a single rank may begin with a copy
        dist.barrier()


parallel._join_group = join_once
train.leave = stay

table = Path(sys.argv[1])
for job in json.loads(table.read_text()):
    if "copied" in job:
        copy_run(table.parent / job["copied"], table.parent / job["name"], job["step"])
    variables = dict(word.split("=") for word in job["arguments"] if word.startswith("AOTDIST_"))
    with patch.dict(os.environ, variables):
        code = train.main([word for word in job["arguments"] if not word.startswith("AOTDIST_")])
    if dist.get_rank() == 0:
        (table.parent / f"{job['name']}.code").write_text(str(code))
dist.destroy_process_group()
