"""What takes several sentences or turns: dialogues, follow-up questions, and tales.

A tale is a story that is told on request. Read tale_grammar.py first: what fills each slot of a
sentence, and which sentences follow which. tale_telling.py tells tales by that grammar, and
tale_reading.py grades what a model tells.
"""
