"""Trackers: the places that show the figures of a run, each in a process of its own.

Read the modules in this order:
  jsonl     metrics.jsonl, the source of truth; written by the training process itself
  start     what a tracker gets when it starts, and what it must be able to do
  beside    starts and feeds the process of a tracker
  __main__  that process
  wandb, swanlab, tensorboard   the trackers
"""
