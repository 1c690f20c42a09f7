#!/usr/bin/env bash
# Start a federation on several machines with SLURM:
#
#   sbatch --nodes 2 --ntasks-per-node 4 --gpus-per-node 4 configs/cluster/slurm.sh --config FILE [options of `fit`]
#
# Each task is a rank: --ntasks-per-node is the number of devices times federation.workers_per_device. Every task must
# see all GPUs of its machine (--gpus-per-node, not --gpus-per-task).
#
# RUNS    folder for run folders, on a disk that all machines share (default: runs)
# RESUME  number of an earlier job to resume (default: this job, if SLURM has requeued it)
#SBATCH --job-name=sparsefl
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
set -euo pipefail

root=${RUNS:-runs}/job-${RESUME:-$SLURM_JOB_ID}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # only for the start-up; the run uses trainer.num_threads
exec srun --kill-on-bad-exit=1 sparsefl fit --ckpt_path auto "$@" \
  --trainer.num_nodes "$SLURM_NNODES" --trainer.devices auto --trainer.default_root_dir "$root"
