"""Code that the training scripts share: flags, sizes, setup, compilation, validation and samples."""
