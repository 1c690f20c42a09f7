#!/usr/bin/env bash
# Start a federation on several machines with torchrun. Run the same command on each machine:
#
#   NODES=2 HEAD=node0:29400 configs/cluster/torchrun.sh --config configs/quickstart.yaml [options of `sparsefl fit`]
#
# NODES    number of machines, or a range, such as 1:4: machines may then leave and join (default: 1)
# RANKS    number of processes on this machine: its devices times federation.workers_per_device (default: one per GPU, or
#          one per core without GPUs)
# HEAD     name and port of one of the machines, reachable from all others (default: this machine)
# JOB      name of the job, the same on all machines; jobs with the same HEAD need different names (default: sparsefl)
# RESTARTS number of failures after which all processes are started again, with those machines that are left
#          (default: 0)
# RUNS     folder for run folders, on a disk that all machines share
#
# With a range of NODES, or with RESTARTS, the job has a folder of its own, RUNS/JOB, and goes on from its last committed
# round, also if the same command is started again later.
set -euo pipefail

nodes=${NODES:-1} restarts=${RESTARTS:-0} job=${JOB:-sparsefl} root=()
if [[ $nodes == *:* || $restarts != 0 ]]; then
  root=(--trainer.default_root_dir "${RUNS:-runs}/$job" --ckpt_path auto)
elif [[ -n ${RUNS:-} ]]; then
  root=(--trainer.default_root_dir "$RUNS")
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # only for the start-up; the run uses trainer.num_threads
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # else a restarted process may read the address of one that has died
exec torchrun --nnodes "$nodes" --nproc_per_node "${RANKS:-auto}" --max_restarts "$restarts" \
  --rdzv_id "$job" --rdzv_backend c10d --rdzv_endpoint "${HEAD:-localhost:29400}" \
  "$(command -v sparsefl)" fit ${root[@]+"${root[@]}"} "$@" --trainer.devices auto
