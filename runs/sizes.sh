# shellcheck shell=bash
# The number of processes, and the size of a step that a preset asks for, on any number of devices; for speedrun.sh and
# the scripts of this folder, which read both from modules.

ask() { # MODULE FLAGS...: run a module whose output the script reads, into which CANN must not print its log
    env -u ASCEND_SLOG_PRINT_TO_STDOUT python -m "$@"
}

# shellcheck disable=SC2154  # the script that sources this file sets device and devices
take_processes() { # set `devices` to NPROC_PER_NODE, if that is set; end the script if that many cannot run
    if [ -z "${NPROC_PER_NODE:-}" ]; then return; fi
    local is_number=''
    if [[ $NPROC_PER_NODE =~ ^[1-9][0-9]*$ ]]; then is_number=yes; fi
    if [ "$device" = cpu ] && [ -z "$is_number" ]; then
        tell "error: NPROC_PER_NODE must be the number of processes, 1 or more, got $NPROC_PER_NODE; set another number, or unset it to use one process" \
            "错误：NPROC_PER_NODE 必须是进程数（至少为 1），得到的是 $NPROC_PER_NODE；请改成别的数，或取消这个变量，只用一个进程" >&2
        exit 2
    elif [ "$device" != cpu ] && { [ -z "$is_number" ] || [ "$NPROC_PER_NODE" -gt "$devices" ]; }; then
        tell "error: NPROC_PER_NODE must be from 1 to $devices, the $device device(s) that are visible, got $NPROC_PER_NODE; set another number, or unset it to use all of them" \
            "错误：NPROC_PER_NODE 必须是 1 到 $devices（可见的 $device 设备数），得到的是 $NPROC_PER_NODE；请改成别的数，或取消这个变量以使用全部设备" >&2
        exit 2
    fi
    devices=$NPROC_PER_NODE
}

fit() { # FLAG NUMBER [UNIT]: print --FLAG=NUMBER, or the nearest number of which each of `devices` takes whole units
    # shellcheck disable=SC2154  # the script that sources this file sets devices
    local number=$2 unit=$((${3:-1} * devices))
    local share # how many units each device takes
    if [ $((number % unit)) -ne 0 ]; then
        share=$(((number + unit / 2) / unit))
        if [ $share -ge 16 ]; then share=$(((share + 4) / 8 * 8)); fi # a prime number would make passes of one row
        if [ $share -eq 0 ]; then share=1; fi
        number=$((share * unit))
        tell "sizes: --$1=$number instead of $2, so that $devices devices share a step equally" \
            "sizes：--$1=$number 代替 $2，使 $devices 个设备平均分担一步" >&2
    fi
    echo "--$1=$number"
}
