# shellcheck shell=bash
# The size of a step that a preset asks for, on any number of devices; for speedrun.sh and the scripts of this folder.

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
