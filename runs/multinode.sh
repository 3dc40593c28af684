#!/usr/bin/env bash
# Several machines: the same line on each. HEAD is the address of one of them as all reach it, NODES how many there are; 1:2 waits
# for one, takes two, and goes on with one. A process per GPU; before the line can stand NPROC, PORT,
# RESTARTS (of the processes, when one is lost; 3), WAIT (seconds for the head to be there; 600).
#   bash runs/multinode.sh HEAD NODES [train.py's flags]
#   NPROC=2 bash runs/multinode.sh 10.0.0.1 2 config/train_gpt2.py
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${VIRTUAL_ENV:-}" ] && [ -d .venv ]; then PATH="$PWD/.venv/bin:$PATH"; fi
nodes=${2:?"bash runs/multinode.sh HEAD NODES [train.py flags]"}
head=$(getent ahostsv4 "$1" | awk 'NR == 1 {print $1}') || { echo "error: no address is known for the head ($1). give the one that the machines share, like 10.0.0.1" >&2; exit 2; }
port=${PORT:-29500}
shift 2
here=$(ip -o route get "$head" | sed 's/.* src \([^ ]*\).*/\1/')  # where this machine talks to the head from; on the head that is its own address
# torchrun hosts the meeting place where the head's address is what the machine's own name stands for, and gloo listens there; often that is 127.0.1.1
is_host=$([ "$here" = "$head" ] && echo 1 || echo 0)
if [ $is_host = 0 ]; then  # wait for it here: torchrun would give up after a minute or two, in eighty lines
  timeout "${WAIT:-600}" bash -c "until (: > '/dev/tcp/$head/$port') 2> /dev/null; do sleep 1; done" ||
    { echo "error: nobody answers at the head ($head:$port) within ${WAIT:-600} s. give this line there as well, with the same HEAD and PORT; is a firewall between?" >&2; exit 2; }
fi
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$(ip -o addr show to "$here" | awk 'NR == 1 {print $2}')}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # machines count their restarts apart: see parallel.py
exec torchrun --nnodes="$nodes" --nproc_per_node="${NPROC:-gpu}" --max-restarts="${RESTARTS:-3}" --local-addr="$here" \
  --rdzv-backend=c10d --rdzv-endpoint="$head:$port" --rdzv-id=flatgpt --rdzv-conf="is_host=$is_host" train.py --init_from=auto "$@"
