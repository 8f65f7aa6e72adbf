"""Trackers, which record or show the metrics of a run.

Read the modules in this order:
  jsonl     writes and reads metrics.jsonl, the source of truth, in the training process itself
  start     the data that a tracker starts with, and the interface that it implements
  beside    starts a tracker in a process of its own, and feeds it
  __main__  the program that runs in that process
  wandb, swanlab, tensorboard   the trackers that run in processes of their own
"""
