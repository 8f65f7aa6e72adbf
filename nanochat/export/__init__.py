"""Exports checkpoints in the formats of other programs.

`python -m nanochat.export` writes a folder for Hugging Face transformers, which vLLM can load too
if the model is a Qwen or a Llama, or one GGUF file for llama.cpp. Adapters are merged into the
model. With --from-gguf, it turns a GGUF file of llama.cpp into a folder.

Read the modules in this order:
- huggingface.py: the folder with config, tokenizer, README and weights.
- modeling_nanochat.py: the GPT for transformers, in a file that is copied into the folder.
- llama.py: names and layout of the parameters in llama.cpp; llama_vocabulary.py: its vocabulary.
- llama_splits.py: the ways of splitting text that llama.cpp knows by name.
- llama_pieces.py: vocabularies of SentencePiece; llama_rope.py: rotary embeddings.
- gguf.py: the GGUF file format; q8_0.py: its blocks of 8-bit integers.
- ollama.py: the Modelfile beside a GGUF file.
- gguf_reader.py: GGUF files, read with the package gguf; gguf_tokenizer.py: the tokenizer in them.
- from_gguf.py: the folder of the model in a GGUF file.
- __main__.py: the command line.
"""
