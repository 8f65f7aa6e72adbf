"""Conversations of several sentences or turns: dialogues, follow-up questions, and tales.

A tale is a story that is told on request. Read tale_grammar.py first, which defines the words that
fill each slot of a sentence and the order of the sentences. tale_telling.py tells tales by that
grammar, and tale_reading.py grades the tales of a model.
"""
