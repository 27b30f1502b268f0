#!/bin/bash
# Many nodes as one job, each by itself and nothing between them, and one report of all: for nodes without a network for
# jobs. No folder that all nodes see is needed.
#
#     sbatch --nodes=16 alone.sh
#
# hosts.txt has the nodes that were ordered, as Slurm writes them, one expression a line: node-[001-016].
#SBATCH --job-name=gpufleet
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=01:00:00
#SBATCH --no-requeue
#SBATCH --output=gpufleet-%j.log

set -u
GPUFLEET=${GPUFLEET:-/opt/gpufleet/bin/gpufleet}
REPORTS=${REPORTS:-$SLURM_SUBMIT_DIR/reports/$SLURM_JOB_ID}
LOCAL=${LOCAL:-/tmp/gpufleet-$SLURM_JOB_ID} # of each node
mkdir -p "$REPORTS"

# A node that is rejected must not end the others, and the slow ones may end.
srun --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --mem=0 \
    "$GPUFLEET" accept --gpus 8 --fleet-deadline 30m --fleet-dir "$LOCAL" -q -p no:cacheprovider || true
sgather --recursive "$LOCAL" "$REPORTS/of" # of.NODE

"$GPUFLEET" fleet "$REPORTS"/of.*/* --expect "$SLURM_SUBMIT_DIR/hosts.txt" -o "$REPORTS/fleet.html"
