#!/usr/bin/env bash
# A measurement on four nodes of Slurm with one GPU each: sbatch slurm.sh
# Ray's head and the command run on the first node. Submit the same script again after a time limit: it resumes.
#SBATCH --job-name=evalgate
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=6
#SBATCH --gpus-per-node=1
#SBATCH --time=08:00:00
set -euo pipefail

source "$HOME/evalgate/.venv/bin/activate" # the same environment on every node, on a file system that all of them see
export RAY_USAGE_STATS_ENABLED=0
export EVALGATE_CACHE="$SCRATCH/evalgate" # partial results, so that another job goes on with them

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=$(head -n 1 <<< "$nodes")
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{ print $1 }')

start=(ray start --block --num-cpus "$SLURM_CPUS_PER_TASK" --num-gpus 1 --disable-usage-stats)
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
  "${start[@]}" --head --node-ip-address "$address" --port 6379 --include-dashboard=false &
sleep 20
others=$(tail -n +2 <<< "$nodes" | paste -sd,)
srun --overlap --nodes=3 --ntasks=3 --nodelist="$others" "${start[@]}" --address "$address:6379" &
sleep 30

evalgate kl --ref "$SCRATCH/models/reference" --cand "$SCRATCH/models/candidate" --data "$SCRATCH/heldout.jsonl" \
  --out "$SCRATCH/runs/candidate-1" --ray "$address:6379" --workers 4 --num-gpus 1 --num-cpus 4 --quiet
