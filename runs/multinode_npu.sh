#!/usr/bin/env bash
# Runs a script on several hosts: type the same command on each host, with a different NODE_RANK.
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash runs/multinode_npu.sh scripts.base_train --depth=20
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 bash runs/multinode_npu.sh scripts.base_train --depth=20
# ModelArts sets all three variables, and so does Volcano with the plug-ins env and svc and a task named worker.
# NANOCHAT_BASE_DIR must be a folder that all hosts share. Prepare the data on one host first.

# 在几台主机上运行一个脚本：每台主机输入同一条命令，只有 NODE_RANK 不同。
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash runs/multinode_npu.sh scripts.base_train --depth=20
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 bash runs/multinode_npu.sh scripts.base_train --depth=20
# ModelArts 会设置这三个变量；Volcano 启用插件 env 和 svc、任务名为 worker 时也会。
# NANOCHAT_BASE_DIR 必须是所有主机共用的目录。请先在一台主机上准备好数据。

set -euo pipefail
typed_in=$PWD
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source runs/common.sh

case ${1:-} in
-h | --help) show_help runs/multinode_npu.sh ;;
'')
    (show_help runs/multinode_npu.sh) >&2
    exit 2
    ;;
esac
words=()
for word in "$@"; do words+=("$(from_here "$typed_in" "$word")"); done
set -- # setup_ascend.sh must not see these arguments
hosts=${NNODES:-${MA_NUM_HOSTS:-${VC_WORKER_NUM:-1}}}
number=${NODE_RANK:-${VC_TASK_INDEX:-}}
first=${MASTER_ADDR:-${VC_WORKER_HOSTS:-}}
first=${first%%,*}
port=${MASTER_PORT:-29500}
if ! [[ $hosts =~ ^[1-9][0-9]*$ ]]; then
    tell "error: NNODES must be the number of hosts, got $hosts; set it to the same number on every host" "错误：NNODES 必须是主机数，得到的是 $hosts；请在每台主机上设成同一个数" >&2
    exit 2
fi
if [ "$hosts" -gt 1 ]; then
    if ! [[ $port =~ ^[0-9]{1,5}$ ]] || [ "$port" -gt 65535 ]; then
        tell "error: MASTER_PORT must be a whole number up to 65535, got '$port'; set it to the same free port on every host" "错误：MASTER_PORT 必须是不超过 65535 的整数，得到的是 '$port'；请在每台主机上设成同一个空闲端口" >&2
        exit 2
    fi
    if ! [[ $number =~ ^[0-9]+$ ]] || [ "$number" -ge "$hosts" ]; then
        tell "error: NODE_RANK must be this host's number, from 0 to $((hosts - 1)), got '$number'; set a different number on every host" "错误：NODE_RANK 必须是本机的编号，从 0 到 $((hosts - 1))，得到的是 '$number'；请在每台主机上设成不同的数" >&2
        exit 2
    fi
    if [ -z "$first" ]; then
        tell "error: MASTER_ADDR must be the address of the host with NODE_RANK=0, and is not set; set it to the same address on every host" "错误：MASTER_ADDR 必须是 NODE_RANK=0 的主机的地址，现在没有设置；请在每台主机上设成同一个地址" >&2
        exit 2
    fi
fi
prepare
if [ "$hosts" -eq 1 ]; then
    launch "${words[@]}"
    exit
fi
tell "multinode: host $number of $hosts, $devices $device device(s) each, meeting at $first:$port" "multinode：$hosts 台主机中的第 $number 台，每台 $devices 个 $device 设备，在 $first:$port 集合"
exec python -m nanochat.runtime.launch --nnodes="$hosts" --node_rank="$number" --nproc_per_node="$devices" \
    --master_addr="$first" --master_port="$port" -m "${words[0]}" -- "${words[@]:1}"
