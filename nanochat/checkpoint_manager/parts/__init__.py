"""Reads and writes each rank's part of a step.

Read the modules in this order:
  index       which file holds which rows of which parameter
  model       reads and writes the parameters, in a single file or in one file per rank
  rank_state  the parameters and the optimizer state of one rank, and copies in host memory
  background  writes checkpoints during training
"""
