"""Texts as data: conversations, corpora, shards and TinyWorld, without torch."""
