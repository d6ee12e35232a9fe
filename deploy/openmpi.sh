#!/bin/bash
# Trains on the hosts of a hostfile, one process on each, with all of its GPUs:
#   deploy/openmpi.sh hostfile llama3-8b runs/first --layout fsdp=16
# Open MPI places the processes; JAX is told where the first one runs, which Open MPI 5 no longer tells.
set -u
hostfile=${1:?name a hostfile} config=${2:?name a config} folder=${3:?name a folder that all hosts share}
shift 3
first=$(awk 'NF && $1 !~ /^#/ { print $1; exit }' "$hostfile")
num_hosts=$(awk 'NF && $1 !~ /^#/ { hosts[$1] } END { print length(hosts) }' "$hostfile")
exec mpirun --hostfile "$hostfile" --np "$num_hosts" --map-by ppr:1:node --bind-to none \
    -x "JAX_COORDINATOR_ADDRESS=$first:${PORT:-12321}" -x PATH \
    meshwright train "$config" --folder "$folder" --resume "$@"
