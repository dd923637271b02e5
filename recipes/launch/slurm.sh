#!/usr/bin/env bash
# SLURM with one task per GPU; the job is requeued as long as the run can be resumed:
#   sbatch slurm.sh CONFIG.yaml [section.key=value ...]
# Two minutes before its time limit the job gets SIGUSR1: it saves, stops and is requeued.
#SBATCH --job-name=textmill
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=textmill-%j.log
set -uo pipefail
[ $# -gt 0 ] || { echo "usage: sbatch slurm.sh CONFIG.yaml [section.key=value ...]" >&2; exit 2; }

where='import sys; from textmill.where import open_where; print(open_where(sys.argv[1], sys.argv[2:]).config.folder_of("train"))'
run=$(python -c "$where" "$@") || exit 2

# The processes find each other through srun's variables. If one fails, the others have a minute to report what they
# wait for.
srun --kill-on-bad-exit=0 --wait=60 python -m textmill train "$@"
code=$?
# A run that stops again and again needs attention.
if [ $code -ne 0 ] && [ -f "$run/stopped.json" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${RESTARTS:-20}" ]; then
  echo "slurm.sh: requeued: $(tr -d '\n' < "$run/stopped.json")"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
