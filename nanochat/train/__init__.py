"""Code that training scripts share: flags, sizes, setup, compilation, validation and samples."""
