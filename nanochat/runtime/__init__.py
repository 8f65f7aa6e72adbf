"""What happens around the computation of a run: ranks, signals, progress, figures, traces, costs.

Read the modules in this order:
  parallel     ranks: sharding, sums, whole tensors
  fingerprint  refuses ranks that were started differently
  signals      a signal asks all ranks to save and stop at the same step
  watch        ranks watch each other: a dead or hanging rank ends all of them
  progress     a bar on a terminal, lines in a log
  tracking     figures of a run in metrics.jsonl and in the trackers of trackers/
  graphs       --graphs: passes that the device replays as one launch
  profiling    --profile: where the time of a step goes; timeline has its tables
And the programs that start a run:
  launch       starts a process for each device, as torchrun does
  cost         measures a command's time and memory for the report
"""
