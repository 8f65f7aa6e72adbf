"""Turn documents and conversations into rows of tokens, once, before training.

This happens when a stage first needs the tokens, or ahead of training with `python -m
nanochat.prepare`. Read in this order:

1. documents.py      turns a corpus into token files: every shard is tokenised once, in several
                     processes if the corpus is large (workers.py)
2. conversations.py  the same for conversations, with a mask that marks the trained tokens
3. token_files.py    writes, memory-maps and checks token files, and describes their format
4. packing.py        best fit: decides which pieces of documents make up each row
5. plan.py           makes that packing plan for a set of tokens, and saves it beside them
6. interleave.py    mixes the rows of several corpora into one sequence
7. clean.py          leaves out near-duplicates (minhash.py) and documents with passages of
                     evaluations (overlap.py), on request

dataloader.py reads the result.
"""
