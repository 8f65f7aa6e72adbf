"""Exports checkpoints in the formats of other programs.

`python -m nanochat.export` writes a folder for Hugging Face transformers, which vLLM can load too
if the model is of the Qwen family, or one GGUF file for llama.cpp. Adapters are merged into the
model.

Read the modules in this order:
- huggingface.py: the folder with config, tokenizer, README and weights.
- modeling_nanochat.py: the GPT for transformers, in a file that is copied into the folder.
- llama.py: names and layout of the parameters in llama.cpp; llama_vocabulary.py: its vocabulary.
- gguf.py: the GGUF file format.
- __main__.py: the command line.
"""
