"""Everything around a run's computation: ranks, signals, progress, metrics, traces and costs.

Read the modules in this order:
  parallel     shards models over ranks, sums numbers over ranks, gathers whole tensors
  fingerprint  refuses to run ranks that were started differently
  signals      makes all ranks save and stop at the same step after a signal
  watch        ends all ranks when one of them dies or hangs
  progress     shows progress as a bar on a terminal, or as lines in a log
  tracking     records the metrics of a run in metrics.jsonl and in the trackers of trackers/
  row_adam     AdamW for a table of which a step on a CPU updates only some rows
  graphs       --graphs: captures passes, which the device replays as one launch
  profiling    --profile: measures where the time of a step goes; timeline has its tables
And the programs that start a run:
  launch       starts a process for each device, as torchrun does
  cost         measures a command's time and memory for the report
"""
