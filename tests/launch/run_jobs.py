"""Runs jobs one after the other in the same ranks: starting torch for each would take most of the time.

Called by torchrun with one file, a JSON list of `{"name": ..., "arguments": [...]}`; rank 0 writes
each job's exit code to `NAME.code` beside it as soon as it is known.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from aotdist.launch import parallel, train


def stay():
    """The ranks stay in their group between jobs."""


join_group = parallel._join_group


def join_once(*arguments):
    if not dist.is_initialized():
        join_group(*arguments)


parallel._join_group = join_once
train.leave = stay

table = Path(sys.argv[1])
for job in json.loads(table.read_text()):
    code = train.main(job["arguments"])
    if dist.get_rank() == 0:
        (table.parent / f"{job['name']}.code").write_text(str(code))
dist.destroy_process_group()
