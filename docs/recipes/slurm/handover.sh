#!/bin/bash
# The handover of many nodes as one job: each by itself, and between them.
#
#     sbatch --nodes=16 handover.sh
#
# The first node writes REPORTS, with the folders of all: no other needs to see it. The others are to have the same Python
# and package, or the same image (pyxis and enroot): CONTAINER=registry.example#gpufleet:0.4.0 sbatch ...
# What only root may read leaves the verdict INCOMPLETE. Submit it as root, or leave that out, where users may read the
# kernel log (kernel.dmesg_restrict=0): WITHOUT=acs,bmc,cabling,disks,memory,optics sbatch ...
#SBATCH --job-name=gpufleet
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=03:00:00
#SBATCH --no-requeue
#SBATCH --output=gpufleet-%j.log

set -u
GPUFLEET=${GPUFLEET:-/opt/gpufleet/bin/gpufleet}
REPORTS=${REPORTS:-$SLURM_SUBMIT_DIR/reports}
GPUFLEET_SECRET=${GPUFLEET_SECRET:-$(openssl rand -hex 32)} # of this job
export GPUFLEET_SECRET
gpus=${SLURM_GPUS_PER_NODE:-8} # also "h100:8"
mkdir -p "$REPORTS"

container=()
if [ -n "${CONTAINER:-}" ]; then
    container=(--container-image="$CONTAINER" --container-mounts="$REPORTS:$REPORTS,/dev:/dev,/sys:/sys"
        --no-container-mount-home --container-remap-root --container-workdir="$REPORTS")
fi
# One task has all processors and all memory of its node. Agents end with 0, and the head with the verdict; no end of
# one ends the others.
exec srun --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --mem=0 "${container[@]}" \
    "$GPUFLEET" accept --nodes "$SLURM_JOB_NUM_NODES" --gpus "${gpus##*:}" --fleet-deadline 150m --fleet-dir "$REPORTS" -q \
    -p no:cacheprovider ${WITHOUT:+"--fleet-without=$WITHOUT"}
