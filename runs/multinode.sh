#!/usr/bin/env bash
# Several machines: run the same line on each, with one process per GPU. See docs/cluster.md.
#   bash runs/multinode.sh HEAD NODES [train.py's flags]
#   NPROC=2 bash runs/multinode.sh 10.0.0.1 2 config/train_gpt2.py
# HEAD: the address of one of the machines, as all of them reach it. NODES: how many machines; 1:2 waits for
# one, takes two, and continues with one. Environment: NPROC (processes per machine), PORT, RESTARTS (of all
# processes when one is lost; 3), WAIT (seconds until the head has to answer; 600). A restart continues the
# run; weights to start from, --init_from=PATH, are for the first start alone.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${VIRTUAL_ENV:-}" ] && [ -d .venv ]; then PATH="$PWD/.venv/bin:$PATH"; fi

fail() {
  echo "error: $1" >&2
  exit 2
}

nodes=${2:?"bash runs/multinode.sh HEAD NODES [train.py flags]"}
head=$(getent ahostsv4 "$1" | awk 'NR == 1 {print $1}') ||
  fail "no address is known for the head ($1). give the one that the machines share, like 10.0.0.1"
port=${PORT:-29500}
if [ -z "${NPROC:-}" ]; then
  python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null ||
    fail "no GPU here to count the processes by. say how many: NPROC=2 bash runs/multinode.sh ..."
fi
wait=${WAIT:-600}
shift 2

# The address from which this machine talks to the head; on the head that is the head's own address.
# torchrun would compare with what the machine's own name stands for, often 127.0.1.1; so would gloo.
here=$(ip -o route get "$head" | sed 's/.* src \([^ ]*\).*/\1/')
is_host=0
if [ "$here" = "$head" ]; then
  is_host=1
  if (: > "/dev/tcp/$head/$port") 2> /dev/null; then
    fail "port $port is in use here, by another run? take another on all machines: PORT=29501 bash\
 runs/multinode.sh ..."
  fi
fi

if [ "$nodes" != 1 ]; then
  echo "this is $here; it starts when $nodes machines run this line with the head $head:$port" >&2
fi

# Wait for the head here: torchrun would give up after a minute or two, in eighty lines
if [ $is_host = 0 ]; then
  timeout "$wait" bash -c "until (: > '/dev/tcp/$head/$port') 2> /dev/null; do sleep 1; done" ||
    fail "nobody answers at the head ($head:$port) within $wait s. run this line there as well, with the same\
 HEAD and PORT; is there a firewall between?"
fi

export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$(ip -o addr show to "$here" | awk 'NR == 1 {print $2}')}
# machines count their restarts separately: see support/parallel.py
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes="$nodes" --nproc_per_node="${NPROC:-gpu}" --max-restarts="${RESTARTS:-3}" \
  --local-addr="$here" --rdzv-backend=c10d --rdzv-endpoint="$head:$port" --rdzv-id=flatgpt \
  --rdzv-conf="is_host=$is_host" train.py "$@"
