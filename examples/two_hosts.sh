#!/usr/bin/env bash
# Two hosts with one device each train the GPT of examples/gpt.yaml. Here both are this machine: two launchers, one for
# each host, that find each other by an address and a port. On two real hosts each runs its own line, with the first
# host's address in place of 127.0.0.1 and the name of the network card in place of lo.
#
#     bash examples/two_hosts.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
port=${PORT:-29500}

host() { # host NUMBER: what that host runs; `torchrun` is the same as `python -m torch.distributed.run`
  python -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --node-rank "$1" --master-addr 127.0.0.1 --master-port "$port" \
    -m lightning_pipeshift fit --config examples/gpt.yaml \
    --trainer.num_nodes 2 --trainer.devices 1 \
    --trainer.max_steps "${STEPS:-20}" --trainer.val_check_interval "${STEPS:-20}" --trainer.limit_val_batches 4 \
    --trainer.logger.init_args.save_dir "${LOGS:-.}"
}

host 1 &
host 0
wait
