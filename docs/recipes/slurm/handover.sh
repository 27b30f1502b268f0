#!/bin/bash
# The handover of many nodes as one job: each runs the suite by itself, and one report is made of all.
#
#     sbatch --nodes=16 handover.sh
#
# REPORTS is a folder that all nodes see. hosts.txt has the nodes that were ordered, as Slurm writes them, one expression
# a line: node-[001-016].
#SBATCH --job-name=gpufleet
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=gpufleet-%j.log

set -u
GPUFLEET=${GPUFLEET:-/opt/gpufleet/bin/gpufleet}
REPORTS=${REPORTS:-$SLURM_SUBMIT_DIR/reports/$SLURM_JOB_ID}
export REPORTS

# A node that is rejected must not end the others, and the slow ones may end.
srun --kill-on-bad-exit=0 --wait=0 \
    "$GPUFLEET" accept --gpus 8 --fleet-deadline 30m --fleet-dir "$REPORTS" -q -p no:cacheprovider || true

"$GPUFLEET" fleet "$REPORTS"/* --expect "$SLURM_SUBMIT_DIR/hosts.txt" -o "$REPORTS/fleet.html"
