#!/usr/bin/env bash
# Trains on a Slurm cluster: sbatch deploy/slurm.sh --gin_file=kd_tiny.gin --workdir=/shared/runs/first
#
# LAYOUT=gpu (default) starts one process for each GPU, LAYOUT=node one for each node; docs/cluster.md says which to choose.
# PYTHON names the interpreter. Partition, account, nodes and times are your cluster's: give them to sbatch, or write them here.
# This script has not been run on a Slurm cluster yet.
#SBATCH --job-name=maestro_jax
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=12:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# SIGTERM goes to all processes 90 s before the time is over: they save a checkpoint and end with code 75. A step and a checkpoint
# must take less; raise the number where they do not.
#SBATCH --signal=TERM@90
set -uo pipefail

layout=${LAYOUT:-gpu}
case $layout in
  gpu) tasks=${SLURM_GPUS_ON_NODE:?"no GPUs are allocated: ask for --gpus-per-node, or use LAYOUT=node"} ;;
  node) tasks=1 ;;
  *)
    echo "LAYOUT=$layout: either gpu or node" >&2
    exit 2
    ;;
esac

# With more than one network, name the one on which arrays are to travel (`ip address` on a node shows them), for example:
# export MAESTRO_INTERFACE=ib0

# Every process sees all GPUs of its node and takes its share of them, so neither --gpus-per-task nor --gpu-bind is needed.
# --kill-on-bad-exit ends all when one fails. After SIGTERM no process leaves before all have saved.
srun \
  --nodes="$SLURM_JOB_NUM_NODES" \
  --ntasks="$((SLURM_JOB_NUM_NODES * tasks))" \
  --ntasks-per-node="$tasks" \
  --cpus-per-task="$((SLURM_CPUS_ON_NODE / tasks))" \
  --kill-on-bad-exit=1 \
  --label \
  "${PYTHON:-python}" -u -m maestro_jax.train "$@"
code=$?

if [ "$code" -eq 75 ]; then
  # Stopped with a checkpoint: the same command goes on from it.
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
