"""Prepare documents and conversations as rows of tokens: everything that is done once, before
training.

It runs when a stage first needs the tokens, or ahead of training with `python -m nanochat.prepare`.
Read in this order:

1. documents.py      a corpus as token files: every shard is tokenised once, in several processes
                     if the corpus is large (workers.py)
2. conversations.py  the same for conversations, with a mask of the tokens that are trained
3. token_files.py    the format of token files, how they are written, mapped and checked
4. packing.py        best fit: which pieces of which documents make up each row
5. plan.py           saves that packing plan beside the tokens
6. clean.py          leaves out near-duplicates (minhash.py) and documents with passages of
                     evaluations (overlap.py), on request

dataloader.py reads the result.
"""
