"""TinyWorld, the corpus that this package generates: a small bilingual world of true facts.

Other modules import it from world.py. Read in this order:

1. words.py          the words of the world in English and Chinese, from data/words.tsv
2. facts.py          its facts, from tables, inverses, ordered lists, numbers and letters
3. splits.py         decides which facts, sums and names are held out of training
4. wording.py        the wordings in which each relation is asked, stated and answered
5. arithmetic.py     sums for the calculator and mental sums; stories.py: stories around them
6. talks/            dialogues, follow-up questions, and stories that are told on request
7. documents.py      the base corpus; conversations.py: conversations for midtraining and SFT
8. problems.py       questions whose answers can be graded, for evaluation and RL

The text depends only on seeds. A function that draws random numbers in another order makes another
corpus, which tests/data/test_tinyworld_version.py detects.
"""
