#!/bin/bash
# Level quick of the acceptance suite on all GPUs of a node, for Slurm. A node that is REJECTED is drained; what else comes
# of it is logged. In slurm.conf of nodes with GPUs, once a day on nodes without a job:
#
#     HealthCheckProgram=/etc/slurm/gpufleet/prolog.sh
#     HealthCheckInterval=86400
#     HealthCheckNodeState=IDLE,CYCLE
#
# Or before each job that has all GPUs of its node, which then begins 10 s later:
#
#     Prolog=/etc/slurm/gpufleet/prolog.sh
#     PrologEpilogTimeout=90
#
# Call it by hand on one node first: ./prolog.sh; echo $?

GPUS=8 # of each node, as ordered
GPUFLEET=/opt/gpufleet/bin/gpufleet
REPORTS=/var/log/gpufleet

# Slurm sets no search path, for reasons of security.
export PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin

if [ -n "${SLURM_SCRIPT_CONTEXT:-}" ]; then
    # A job beside others has a part of the GPUs: a load on all of them would disturb the others and be disturbed.
    IFS=, read -ra job_gpus <<<"${SLURM_JOB_GPUS:-}"
    [ "${#job_gpus[@]}" -eq "$GPUS" ] || exit 0
fi

# What is no fault of the node drains none: a full disk or a slow file server would drain them all at once.
log_and_go_on() {
    logger -t gpufleet "$1"
    exit 0
}
mkdir -p "$REPORTS" && cd "$REPORTS" && [ -w "$REPORTS" ] || log_and_go_on "not checked: $REPORTS cannot be written"
output="$REPORTS/last-${SLURM_SCRIPT_CONTEXT:-check}.log"
"$GPUFLEET" accept --gpus "$GPUS" --fleet-level quick --fleet-deadline 60s --fleet-dir "$REPORTS" --fleet-keep 50 \
    -q -p no:cacheprovider >"$output" 2>&1
status=$?
# A Python that cannot import the package, as of a file server that is gone, ends with 1 too.
[ "$status" -ne 1 ] || grep -q REJECTED "$output" || log_and_go_on "exit status 1 without a verdict: see $output"

case $status in
0) exit 0 ;;
1) why="REJECTED, see $REPORTS" ;;
10) log_and_go_on "INCOMPLETE: see $REPORTS" ;;
*) log_and_go_on "exit status $status: see $REPORTS" ;;
esac
# Slurm drains a node by itself when its prolog fails, and not for a HealthCheckProgram. This also gives the reason.
scontrol update NodeName="${SLURMD_NODENAME:-$(hostname -s)}" State=DRAIN Reason="gpufleet: $why"
exit 1
