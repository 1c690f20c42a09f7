#!/usr/bin/env bash
# Start a federation on several machines with torchrun. Run the same command on each machine:
#
#   NODES=2 HEAD=node0:29400 configs/cluster/torchrun.sh --config configs/quickstart.yaml [options of `sparsefl fit`]
#
# NODES   number of machines (default: 1)
# RANKS   number of processes on each machine: its devices times federation.workers_per_device (default: one per GPU, or
#         one per core without GPUs)
# HEAD    name and port of one of the machines, reachable from all others (default: this machine)
# JOB     name of the job, the same on all machines; jobs with the same HEAD need different names (default: sparsefl)
#
# To resume with --ckpt_path last, run folders must be on a disk that all machines share (--trainer.default_root_dir).
set -euo pipefail

nodes=${NODES:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # only for the start-up; the run uses trainer.num_threads
exec torchrun --nnodes "$nodes" --nproc_per_node "${RANKS:-auto}" --max_restarts 0 \
  --rdzv_id "${JOB:-sparsefl}" --rdzv_backend c10d --rdzv_endpoint "${HEAD:-localhost:29400}" \
  "$(command -v sparsefl)" fit "$@" --trainer.num_nodes "$nodes" --trainer.devices auto
