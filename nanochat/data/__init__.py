"""Texts as data, without torch: corpora of documents, conversations, and where both come from.

A corpus is a named folder of parquet shards. `python -m nanochat.dataset` makes one, and
prepare/ turns its documents into tokens. Read in this order:

1. conversation.py  the types that everything else passes around: Conversation, Message, Task
2. shards.py        a corpus on disk: parquet files, of which the last holds validation documents;
                    parquet_footers.py guards against files that unpack without bound
3. corpora.py       finds corpora by name; mixing.py reads --data web:0.7,books:0.3; traits.py
                    says what a corpus asks of the stages that train on it
4. sources/         where documents come from: published corpora, lists of addresses, your files
5. tinyworld/       the embedded corpus, made on this machine
6. bpe.py           the library that learns and applies merges; tokenizer.py stands on it
7. download.py      files over HTTP; locks.py keeps processes apart that write the same files
8. calculator.py    the tool that chats call
"""
