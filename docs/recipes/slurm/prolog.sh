#!/bin/bash
# Prolog and Epilog of slurmd: level quick of the acceptance suite on all GPUs of the node. A node that is not ACCEPTED is
# drained. In slurm.conf of nodes with GPUs:
#
#     Prolog=/etc/slurm/gpufleet/prolog.sh
#     Epilog=/etc/slurm/gpufleet/prolog.sh
#     PrologEpilogTimeout=90
#
# Call it by hand on one node first: SLURM_JOB_GPUS=0,1,2,3,4,5,6,7 ./prolog.sh; echo $?

GPUS=8 # of each node, as ordered
GPUFLEET=/opt/gpufleet/bin/gpufleet
REPORTS=/var/log/gpufleet

# Slurm sets no search path, for reasons of security.
export PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin

# A job beside others has a part of the GPUs: a load on all of them would disturb the others and be disturbed.
IFS=, read -ra job_gpus <<<"${SLURM_JOB_GPUS:-}"
[ "${#job_gpus[@]}" -eq "$GPUS" ] || exit 0

mkdir -p "$REPORTS" && cd "$REPORTS" || exit 0
"$GPUFLEET" accept --gpus "$GPUS" --fleet-level quick --fleet-deadline 60s --fleet-dir "$REPORTS" --fleet-keep 50 \
    -q -p no:cacheprovider >"$REPORTS/last-${SLURM_SCRIPT_CONTEXT:-by-hand}.log" 2>&1
status=$?

case $status in
0) exit 0 ;;
1) why="REJECTED" ;;
10) why="INCOMPLETE" ;;
4 | 5) # called in a wrong way, or the GPUs are locked by another run: that says nothing about the node
    logger -t gpufleet "exit status $status: see $REPORTS"
    exit 0
    ;;
*) why="exit status $status" ;;
esac
# Slurm drains a node by itself when its prolog fails. This gives it a reason that says more, and only where it is needed:
# commands of Slurm in every prolog would be a load on the controller.
scontrol update NodeName="${SLURMD_NODENAME:-$(hostname -s)}" State=DRAIN Reason="gpufleet: $why, see $REPORTS"
exit 1
