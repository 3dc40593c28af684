#!/usr/bin/env bash
# Several machines: run the same line on each of them, with one process per GPU. See docs/cluster.md.
#   bash runs/multinode.sh HEAD NODES [train.py's flags]
#   NPROC=2 bash runs/multinode.sh 10.0.0.1 2 config/train_gpt2.py
# HEAD: the address of one of the machines, reachable from all. NODES: how many machines; 1:2 waits for
# one, takes two, and continues with one. Environment: NPROC (processes per machine), PORT, RESTARTS (of all
# processes when one is lost; 3), WAIT (seconds until the head has to answer; 600). A restart continues the
# run in out_dir, and so does the same line on another day: --auto_resume.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${VIRTUAL_ENV:-}" ] && [ -d .venv ]; then source .venv/bin/activate; fi
head=$1
nodes=$2
shift 2
port=${PORT:-29500}

# The address that this machine uses to reach the head; on the head it is the head's own. torchrun and gloo would
# otherwise resolve the machine's host name, often to 127.0.1.1.
head_address=$(getent ahostsv4 "$head" | awk 'NR == 1 {print $1}')
here=$(ip -o route get "$head_address" | sed 's/.* src \([^ ]*\).*/\1/')
is_host=0
if [ "$here" = "$head_address" ]; then is_host=1; fi
echo "this is $here; it starts when $nodes machines run this line with the head $head_address:$port" >&2

# Wait for the head: torchrun gives up after a minute or two
if [ $is_host = 0 ]; then
  look="until (: > /dev/tcp/$head_address/$port) 2> /dev/null; do sleep 1; done"
  timeout "${WAIT:-600}" bash -c "$look" || {
    echo "error: the head does not answer ($head_address:$port). Run this line there as well, with the" \
      "same HEAD and PORT, and check for a firewall between the machines." >&2
    exit 2
  }
fi

interface=$(ip -o addr show to "$here" | awk 'NR == 1 {print $2}')
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
# the processes use a store of their own: torchrun's outlives a restart, and each machine counts its own
# restarts, so a new process could read the address of a dead one
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes="$nodes" --nproc_per_node="${NPROC:-gpu}" --max-restarts="${RESTARTS:-3}" \
  --local-addr="$here" --rdzv-backend=c10d --rdzv-endpoint="$head_address:$port" --rdzv-id=flatgpt \
  --rdzv-conf="is_host=$is_host" train.py --auto_resume=True "$@"
