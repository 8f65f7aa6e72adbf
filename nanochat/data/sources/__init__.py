"""Where documents come from: published corpora, lists of addresses and your own files, one file for each."""
