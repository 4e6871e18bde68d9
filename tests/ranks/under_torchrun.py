"""What `test_torchrun.py` starts with torchrun: ranks that diverge, agree, and then lose rank 1."""

import signal

import torch.distributed as dist

from tests.ranks.cases_agreement import one_rank_differs, tells
from tests.ranks.cases_loss import leaves_in_a_step


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the survivors 0.1 s after a death
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    said = one_rank_differs("shape", 1)
    print(f"[{rank}] {said[0] if said else said}", flush=True)
    print(f"[{rank}] {tells([])}", flush=True)
    leaves_in_a_step(1)


if __name__ == "__main__":
    main()
