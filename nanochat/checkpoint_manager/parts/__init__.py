"""What each rank writes and reads of a step.

Read the modules in this order:
  index       which file holds which rows of which parameter
  model       the parameters: in one file or in a file of each rank, written and read
  rank_state  the parameters and the optimizer state of one rank, and copies of them on the host
  background  writes checkpoints beside training
"""
