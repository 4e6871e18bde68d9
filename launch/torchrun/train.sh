#!/bin/bash
# Trains on several machines without a scheduler: run the same line on each of them.
#
#     HEAD=10.0.0.1:29500 NODES=2 RUN=first launch/torchrun/train.sh --optim.steps 100000
#
# HEAD is an address of one of them, on which they meet; NODES how many there are. When a rank dies, those
# that are left end, and torchrun starts all again from the last checkpoint; a machine that comes back joins
# by running the line once more. With NODES=2:8 the run goes on with as many machines as there are. The run
# folder (RUNS, by default `runs`) must lie where all machines see it.
set -euo pipefail

# torch 2.13: a torchrun that joins others waits for ever for the address of a store that they share.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun \
  --nnodes "$NODES" --nproc-per-node "${NPROC:-gpu}" --max-restarts 3 \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "$RUN" \
  -m aotdist.launch.train --resume auto --run.folder "${RUNS:-runs}" --run.name "$RUN" "$@"
