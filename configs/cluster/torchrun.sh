#!/usr/bin/env bash
# A federation over several machines, by torchrun. Start the same command on every one of them:
#
#   NODES=2 HEAD=node0:29400 configs/cluster/torchrun.sh --config configs/quickstart.yaml [options of `sparsefl fit`]
#
# NODES   machines (default: 1)
# RANKS   processes on each machine: its devices times federation.workers_per_device (default: one for each GPU, or
#         for each core where there is none)
# HEAD    name and port of one of the machines, which all others reach (default: this one)
# JOB     any name, the same on all machines; two jobs on the same HEAD need two (default: sparsefl)
#
# Run folders must lie where all machines see them (--trainer.default_root_dir), to resume with --ckpt_path last.
set -euo pipefail

nodes=${NODES:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # what counts is trainer.num_threads; this is for what starts before
exec torchrun --nnodes "$nodes" --nproc_per_node "${RANKS:-auto}" --max_restarts 0 \
  --rdzv_id "${JOB:-sparsefl}" --rdzv_backend c10d --rdzv_endpoint "${HEAD:-localhost:29400}" \
  "$(command -v sparsefl)" fit "$@" --trainer.num_nodes "$nodes" --trainer.devices auto
