"""Texts as data: conversations, corpora, shards, TinyWorld; no tokens and no torch."""
