"""What the training scripts share: optimizers, schedules, sizes, compilation, one stage."""
