"""Training data, handled without torch: corpora of documents, conversations, and their sources.

A corpus is a named folder of parquet shards. `python -m nanochat.dataset` makes one, and
prepare/ turns its documents into tokens. Read in this order:

1. conversation.py  the types that everything else passes around: Conversation, Message, Task
2. shards.py        a corpus on disk: parquet files, the last one with validation documents;
                    parquet_footers.py refuses files that unpack to far more than any text
3. corpora.py       finds corpora by name; mixing.py reads --data web:0.7,books:0.3; traits.py
                    holds the settings that suit a corpus
4. sources/         the sources of documents: published corpora, lists of addresses, your files
5. tinyworld/       the embedded corpus, made on this machine
6. bpe.py           byte pair encoding: learns merges and applies them, for tokenizer.py;
                    tokenizer_file.py reads and checks tokenizer.json
7. locks.py         keeps two processes from writing the same file at once
8. calculator.py    the calculator that a model can call in a chat

command_line.py and help_texts.py read and explain the flags of scripts, which are plain data too.
"""
